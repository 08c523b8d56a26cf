#!/usr/bin/env bash
# Makes the demo's teacher: training, GGUF, card.
#
#   bash scripts/demo/make_teacher.sh CORPUS OUT [FLAGS of kdjax train ...]
#
# CORPUS is a folder of scripts/demo/make_stories.sh. OUT gets teacher.gguf, teacher.md and the run's
# records. WORK (default /tmp/kdjax_teacher) holds rows and the checkpoint. One H100 takes a minute.
set -euo pipefail
exec bash "$(dirname "$0")/make_model.sh" teacher q4_k_m "$1/stories.jsonl,$1/rest.jsonl" "$@"
