#!/usr/bin/env bash
# The 7B shape into the 0.5B shape on one GPU, from GGUF files of random valid blocks: speed and
# memory are those of the real pair, what is learned is not. Two runs, one log: 500 steps with
# both evaluations and the save, then the smoke verdict of the configured run's first 500 steps.
#   LOG=log.txt scripts/bench/run_7b_shape.sh FOLDER [--config.<field>=<value> ...]
# TOKENIZER_FROM names a GGUF file whose tokenizer is copied (its tensors may be missing); TEXT names
# what is tokenized (python:stdlib); CONFIG the config; STEPS the steps (500); TEACHER and STUDENT
# other shapes of scripts/bench/random_gguf.py. The smoke run's exit status, 3 for FAIL, is the
# script's.
set -euo pipefail
folder=$(realpath -m "${1:?a folder with 10 GB free}"); shift
log=$(realpath -m "${LOG:-$folder/log.txt}")
tokenizer=${TOKENIZER_FROM:+--tokenizer-from=$(realpath "$TOKENIZER_FROM")}
config=${CONFIG:-configs/qwen7b_0p5b.py}
teacher=${TEACHER:-7b} student=${STUDENT:-0.5b} steps=${STEPS:-500}
cd "$(dirname "$0")/../.."
mkdir -p "$folder" "$(dirname "$log")"
for shape in "$teacher" "$student"; do
  [ -f "$folder/$shape.gguf" ] || python3 -m scripts.bench.random_gguf --shape="$shape" \
    --out="$folder/$shape.gguf" ${tokenizer:+"$tokenizer"}
done
common=(--config="$config" --config.teacher.path="$folder/$teacher.gguf"
  --config.student.path="$folder/$student.gguf" --config.data.train="${TEXT:-python:stdlib}"
  --config.data.heldout= --config.data.cache_dir="$folder/rows" --config.eval.every=0
  --config.checkpoint.every=0 "$@")
revision=$(git rev-parse --short HEAD 2>/dev/null || echo "without git")
cat >"$log" <<TEXT
# RANDOM WEIGHTS: files of the shapes $teacher and $student, of random valid blocks. Speed and memory
# are those of the real pair; losses, KL and the verdict say nothing of what a real pair learns.
# scripts/bench/run_7b_shape.sh FOLDER $*
# revision $revision, $(date -u +%Y-%m-%d)
TEXT
run() {
  local status=0
  printf '\n$ python3 -m kdjax.main --config=%s %s\n' "$config" "${*:2}" >>"$log"
  python3 -m kdjax.main "${common[@]}" --workdir="$folder/$1" "${@:2}" 2>&1 | tee -a "$log" || status=$?
  echo "exit status $status" >>"$log"
  return $status
}
run run --config.train.steps="$steps"
run smoke --config.smoke.steps="$steps"
