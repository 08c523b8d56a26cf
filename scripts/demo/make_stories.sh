#!/usr/bin/env bash
# Makes the demo's corpus: requests for stories, a model's answers, the stories that are kept.
#
#   bash scripts/demo/make_stories.sh MODEL OUT [FLAGS of kdjax answers ...]
#
# MODEL is an instruct model, such as qwen2.5-coder-1.5b-instruct-q4_k_m.gguf@packed, whose licence
# lets its answers train another. OUT gets what scripts/demo/stories.py names. The shipped corpus took
# 187 seconds of one H200 (57,344 answers, at 43,000 tokens/s after compiling).
set -euo pipefail

model=$1 out=$2
shift 2
: "${PYTHON:=python3}" "${SECONDS_OF_ANSWERS:=200}"
mkdir -p "$out"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

"$PYTHON" -m scripts.demo.stories prompts "$out/prompts.jsonl" --count=120000
"$PYTHON" -m kdjax answers "$model" --prompts="$out/prompts.jsonl" --out="$out/answers.jsonl" \
  --batch-size=1024 --max-tokens=208 --temperature=0.8 --top-p=0.95 --ended \
  --seconds="$SECONDS_OF_ANSWERS" "$@"
"$PYTHON" -m scripts.demo.stories clean "$out/answers.jsonl" "$out"
