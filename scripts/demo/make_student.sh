#!/usr/bin/env bash
# Makes the student that the demo begins with: text, training, GGUF, card.
#
#   bash scripts/demo/make_student.sh CORPUS OUT [FLAGS of kdjax.commands.train ...]
#
# CORPUS is a folder that scripts/corpus/wheels.py wrote: train.jsonl and manifest.json. OUT gets
# student.gguf, student.md, student_packages.txt and the run's records. TYPE (default q8_0) is the
# file's, WORK (default /tmp/kdjax_student) holds text, rows and the checkpoint.
set -euo pipefail

corpus=$1 out=$2
shift 2
: "${WORK:=/tmp/kdjax_student}" "${TYPE:=q8_0}" "${PYTHON:=python3}"
mkdir -p "$out" "$WORK"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
say() { echo "$(date +%T) $*"; }

say "text"
"$PYTHON" -m scripts.demo.text "$WORK/text" --corpus="$corpus/train.jsonl" --without-library
say "training"
rm -rf "$WORK/run"
"$PYTHON" -m kdjax.main --config=configs/demo_student.py --workdir="$WORK/run" \
  --config.data.cache_dir="$WORK/rows" --config.data.train="$WORK/text/train.jsonl" \
  --config.data.heldout="$WORK/text/heldout" "$@"
cp "$WORK/run/receipt.json" "$WORK/run/metrics.jsonl" "$WORK/text/text.json" "$out/"
say "export"
"$PYTHON" -m kdjax export "$WORK/run" --format=gguf --type="$TYPE" --out="$out/student.gguf" \
  --overwrite
"$PYTHON" -m scripts.demo.card "$WORK/run" --gguf="$out/student.gguf" --type="$TYPE" \
  --text="$WORK/text" --manifest="$corpus/manifest.json" --out="$out/student.md"
say "done: $out"
