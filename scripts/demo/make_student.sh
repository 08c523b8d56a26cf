#!/usr/bin/env bash
# Makes the student that the demo begins with: training, GGUF, card.
#
#   bash scripts/demo/make_student.sh CORPUS OUT [FLAGS of kdjax train ...]
#
# As make_teacher.sh; the student reads a little of rest.jsonl, which the demo does not train on.
set -euo pipefail
exec bash "$(dirname "$0")/make_model.sh" student q8_0 "$1/rest.jsonl" "$@"
