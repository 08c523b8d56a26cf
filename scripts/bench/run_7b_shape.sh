#!/usr/bin/env bash
# The 7B shape into the 0.5B shape on one GPU, from GGUF files of random valid blocks: speed and
# memory are those of the real pair, what is learned is not.
#   scripts/bench/run_7b_shape.sh FOLDER [--config.<field>=<value> ...]
# TOKENIZER_FROM names a GGUF file whose tokenizer is copied; TEXT names what is tokenized.
set -euo pipefail
folder=${1:?a folder with 10 GB free}; shift
here=$(cd "$(dirname "$0")/../.." && pwd)
tokenizer=${TOKENIZER_FROM:+--tokenizer-from=$TOKENIZER_FROM}
text=${TEXT:-$(python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')}
mkdir -p "$folder"
cd "$here"
for shape in 7b 0.5b; do
  [ -f "$folder/$shape.gguf" ] ||
    python3 -m scripts.bench.random_gguf --shape="$shape" --out="$folder/$shape.gguf" $tokenizer
done
exec python3 -m kdjax.main --config=configs/qwen7b_0p5b.py --workdir="$folder/run" \
  --config.teacher.path="$folder/7b.gguf" --config.student.path="$folder/0.5b.gguf" \
  --config.data.train="$text" --config.data.cache_dir="$folder/rows" \
  --config.train.steps=500 --config.eval.every=0 --config.checkpoint.every=0 "$@"
