#!/usr/bin/env bash
# Makes the demo's teacher: text, training, GGUF, card.
#
#   bash scripts/demo/make_teacher.sh CORPUS OUT [FLAGS of kdjax.commands.train ...]
#
# CORPUS is a train.jsonl or an archive that holds one (and, if it has it, manifest.json); several
# joined by commas. OUT gets teacher.gguf, teacher.md, packages.txt and the run's records. The number
# of steps is what fits TRAIN_SECONDS (default 300) at the speed of a trial of TRIAL (60) steps, or
# STEPS. WORK (default /tmp/kdjax_demo) holds text, rows and checkpoints. On one H200 it takes about
# 7 minutes.
set -euo pipefail

corpus=$1 out=$2
shift 2
: "${WORK:=/tmp/kdjax_demo}" "${TRAIN_SECONDS:=300}" "${TRIAL:=60}" "${STEPS:=}"
: "${PYTHON:=python3}"
mkdir -p "$out" "$WORK"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
say() { echo "$(date +%T) $*"; }

say "text"
corpora=()
for file in ${corpus//,/ }; do corpora+=("--corpus=$file"); done
"$PYTHON" -m scripts.demo.text "$WORK/text" "${corpora[@]}"

train() {
  "$PYTHON" -m kdjax.main --config=configs/demo_teacher.py --config.data.cache_dir="$WORK/rows" \
    --config.data.train="$WORK/text/train.jsonl" --config.data.heldout="$WORK/text/heldout" "$@"
}

if [[ -z $STEPS ]]; then
  say "trial of $TRIAL steps"
  rm -rf "$WORK/trial"
  # A trial may end with status 3: whether the loss fell is not asked here.
  train --workdir="$WORK/trial" "$@" --config.smoke.steps="$TRIAL" || [[ $? == 3 ]]
  STEPS=$("$PYTHON" - "$WORK/trial/receipt.json" "$TRAIN_SECONDS" <<'PY'
import json, sys
step = json.load(open(sys.argv[1]))["smoke"]["median_step_seconds"]
print(max(400, int(float(sys.argv[2]) / step / 100) * 100))
PY
  )
fi
say "training, $STEPS steps"
rm -rf "$WORK/run"
train --workdir="$WORK/run" --config.train.steps="$STEPS" "$@"
cp "$WORK/run/receipt.json" "$WORK/run/metrics.jsonl" "$WORK/text/text.json" "$out/"

say "export"
"$PYTHON" -m kdjax export "$WORK/run" --format=gguf --type=q4_k_m --out="$out/teacher.gguf" \
  --overwrite
manifest=()
for file in ${corpus//,/ }; do
  case $file in
    *.tar*) tar -xOf "$file" --wildcards '*manifest.json' > "$WORK/manifest.json" 2> "$WORK/tar.log" \
      && manifest=("--manifest=$WORK/manifest.json") ;;
    *) [[ -f $(dirname "$file")/manifest.json ]] \
      && manifest=("--manifest=$(dirname "$file")/manifest.json") ;;
  esac || true
done
"$PYTHON" -m scripts.demo.card "$WORK/run" --gguf="$out/teacher.gguf" --type=q4_k_m --text="$WORK/text" \
  --out="$out/teacher.md" "${manifest[@]}"
say "done: $out"
