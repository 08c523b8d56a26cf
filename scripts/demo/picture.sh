#!/usr/bin/env bash
# Draws docs/demo_report.png: the top of a demo run's report, by a headless Chromium.
#
#     kdjax train --config=demo --workdir=runs/demo
#     bash scripts/demo/picture.sh runs/demo docs/demo_report.png
set -euo pipefail

workdir=${1:?usage: picture.sh WORKDIR FILE.png}
out=$(realpath -m "${2:?usage: picture.sh WORKDIR FILE.png}")
browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome)
options=(--headless --disable-gpu --hide-scrollbars --window-size=1280,2150)
if [ "$(id -u)" = 0 ]; then options+=(--no-sandbox); fi # Chromium refuses root otherwise
python -m kdjax report "$workdir"
"$browser" "${options[@]}" --screenshot="$out" "file://$(realpath "$workdir/report.html")"
