#!/usr/bin/env bash
# What make_teacher.sh and make_student.sh share: training, GGUF, card.
#
#   bash scripts/demo/make_model.sh teacher|student TYPE TEXT CORPUS OUT [FLAGS of kdjax train ...]
set -euo pipefail

role=$1 type=$2 text=$3 corpus=$4 out=$5
shift 5
: "${WORK:=/tmp/kdjax_$role}" "${PYTHON:=python3}"
mkdir -p "$out" "$WORK"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

rm -rf "$WORK/run"
"$PYTHON" -m kdjax.main --config="configs/demo_$role.py" --workdir="$WORK/run" \
  --config.data.cache_dir="$WORK/rows" --config.data.train="$text" \
  --config.data.heldout="$corpus/heldout.jsonl" "$@"
cp "$WORK/run/receipt.json" "$WORK/run/metrics.jsonl" "$out/"
"$PYTHON" -m kdjax export "$WORK/run" --format=gguf --type="$type" --out="$out/$role.gguf" --overwrite
"$PYTHON" -m scripts.demo.card "$out/receipt.json" --gguf="$out/$role.gguf" --type="$type" \
  --corpus="$corpus" --out="$out/$role.md"
