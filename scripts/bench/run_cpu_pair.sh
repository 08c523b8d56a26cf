#!/usr/bin/env bash
# The published 1.5B and 0.5B on a CPU: 20 steps of 2 x 64 tokens, then the same run killed (-9) and
# resumed; both curves must be equal. Needs 16 GiB and the two GGUF files in MODELS.
#   MODELS=models scripts/bench/run_cpu_pair.sh runs/cpu
set -euo pipefail
out=${1:?a folder for the two runs}
models=${MODELS:-models}
python=${PYTHON:-python3}
cd "$(dirname "$0")/../.."
stdlib=$("$python" -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
run() {
  JAX_PLATFORMS=cpu "$python" -m kdjax.main --config=configs/qwen1p5b_0p5b.py --workdir="$1" \
    --config.teacher.path="$models/qwen2.5-coder-1.5b-instruct-q4_k_m.gguf" \
    --config.student.path="$models/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf" \
    --config.data.train="$stdlib/json,$stdlib/email,$stdlib/asyncio" \
    --config.data.heldout_fraction=0.1 --config.data.cache_dir="$out/rows" \
    --config.data.seq_len=64 --config.train.batch_size=2 --config.train.compute_dtype=float32 \
    --config.train.steps=20 --config.optim.warmup_steps=2 --config.loss.chunk_tokens=128 \
    --config.optim.learning_rate=1e-5 --config.student.remat=none \
    --config.eval.every=10 --config.eval.rows=24 --config.eval.batch_size=4 \
    --config.checkpoint.every=5 --config.checkpoint.keep=1 --config.log.every=1
}
run "$out/straight"
run "$out/killed" & pid=$!
until grep -qs '"step": 13,' "$out/killed/metrics.jsonl"; do sleep 1; done
pkill -9 -f -- "--workdir=$out/killed" || true
wait $pid || echo "killed after step 13, status $?"
run "$out/killed"
"$python" - "$out" <<'PY'
import json, sys
def curve(name):
    lines = [json.loads(l) for l in open(f"{sys.argv[1]}/{name}/metrics.jsonl")]
    return [{k: v for k, v in l.items() if k != "tokens_per_second"} for l in lines]
same = curve("straight") == curve("killed")
print("resumed curve equal, bit for bit:", same)
sys.exit(not same)
PY
