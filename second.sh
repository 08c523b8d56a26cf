#!/bin/bash
# From a checkout of this branch, on a machine with one GPU; at most 150 s. Writes to $OUT/roll.
export OUT=${OUT:-/tmp/out}
mkdir -p "$OUT/roll"
export PYTHONPATH=. TF_CPP_MIN_LOG_LEVEL=2
timeout ${LIMIT:-152} python3 -u second.py "$@" > "$OUT/roll/log2.txt" 2>&1
echo "status $?" >> "$OUT/roll/log2.txt"
tail -120 "$OUT/roll/log2.txt"
