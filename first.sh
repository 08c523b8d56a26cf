#!/bin/bash
# From a checkout of this branch, on a machine with one GPU; at most 200 s. Writes to $OUT/roll.
export OUT=${OUT:-/tmp/out}
mkdir -p "$OUT/roll"
export PYTHONPATH=. TF_CPP_MIN_LOG_LEVEL=2
export XLA_FLAGS="--xla_dump_to=/tmp/hlo --xla_dump_hlo_as_text --xla_dump_hlo_module_re=.*(advance_slots|_fill).* $XLA_FLAGS"
timeout 199 python3 -u first.py "$@" > "$OUT/roll/log.txt" 2>&1
echo "status $?" >> "$OUT/roll/log.txt"
# Optimised programs alone, compressed: which lines a kernel's name stands for.
for f in $(ls /tmp/hlo/*after_optimizations.txt 2>/dev/null); do gzip -c "$f" > "$OUT/roll/$(basename "$f").gz"; done
rm -rf "$OUT"/roll/trace-*
tail -150 "$OUT/roll/log.txt"
