#!/usr/bin/env bash
# The far end of dispatch.sh: runs there, in REMOTE. Starts the run unless it is going on or
# finished; prints dispatch.json.
#
#   start.sh SHA RUN PYTHON HOST DIRTY TICKET PHASE COUNT ENVIRONMENT{COUNT} FLAG...
#
# In runs/RUN: run.log, run.pid, run.exit (once it ended), run.command, dispatch.json.
set -euo pipefail
sha=$1 run=$2 python=$3 host=$4 dirty=$5 ticket=$6 phase=$7 count=$8
shift 8
environment=("${@:1:$count}")
shift "$count"
folder=$PWD/runs/$run
mkdir -p "$folder"

refuse() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

# What would run, one word a line: equal commands are the same dispatch.
command_now() { printf '%s\n' "$sha" "$python" ${environment[@]+"${environment[@]}"} "$@"; }

alive() {
  local pid
  pid=$(cat "$folder/run.pid" 2>/dev/null) && kill -0 "$pid" 2>/dev/null || return 1
  # The number may be another process's by now.
  [ ! -r "/proc/$pid/cmdline" ] || tr '\0' ' ' <"/proc/$pid/cmdline" | grep -qF -- "$folder"
}

# Two dispatches at once: one makes the folder, the other waits for what it starts.
for _ in $(seq 100); do
  mkdir "$folder/.starting" 2>/dev/null && break
  # Left by a start that was killed.
  find "$folder/.starting" -maxdepth 0 -mmin +1 -exec rmdir {} \; 2>/dev/null || true
  sleep 0.1
done
[ -d "$folder/.starting" ] || refuse "runs/$run/.starting cannot be made"
trap 'rmdir "$folder/.starting" 2>/dev/null || true' EXIT

same=no
if [ "$(command_now "$@")" = "$(cat "$folder/run.command" 2>/dev/null)" ]; then same=yes; fi
ended=$(cat "$folder/run.exit" 2>/dev/null || true)
state=start
if alive; then state="is going on"; elif [ "$ended" = 0 ]; then state="finished with status 0"; fi
if [ "$state" != start ]; then
  if [ $same = no ]; then
    printf 'error: runs/%s %s with another command; what differs:\n' "$run" "$state" >&2
    command_now "$@" | diff "$folder/run.command" - | grep '^[<>]' >&2 || true
    printf 'Give this one another name, or the same settings to attach.\n' >&2
    exit 2
  fi
  echo "runs/$run $state; nothing was started" >&2
  cat "$folder/dispatch.json"
  exit 0
fi

# Reads the config with its overrides, so that a wrong field is refused here.
PYTHONPATH=source/$sha PYTHONSAFEPATH=1 "$python" -m scripts.dispatch.record \
  --run="$run" --sha="$sha" --dirty="$dirty" --host="$host" --ticket="$ticket" --phase="$phase" \
  -- "$@" >"$folder/dispatch.json.part"
mv "$folder/dispatch.json.part" "$folder/dispatch.json"
command_now "$@" >"$folder/run.command"
rm -f "$folder/run.exit" "$folder/run.pid"

# A session of its own, no terminal, no open stream of the connection: it outlives the ssh that
# started it. The folder is an argument, by which `alive` knows it.
detach=(nohup)
if command -v setsid >/dev/null; then detach=(setsid nohup); fi
# shellcheck disable=SC2016
"${detach[@]}" bash -c '
  folder=$1; shift
  echo $$ >"$folder/run.pid"
  printf "== started %s\n" "$(date -u +%Y-%m-%dT%H:%M:%SZ)" >>"$folder/run.log"
  env "$@" </dev/null >>"$folder/run.log" 2>&1 &
  child=$!
  trap "stopped=yes; kill -TERM $child" TERM INT
  stopped=yes
  while [ $stopped = yes ]; do # a signal ends a wait, not yet the run
    stopped=no status=0
    wait $child || status=$?
  done
  echo $status >"$folder/run.exit.part"
  mv "$folder/run.exit.part" "$folder/run.exit"
' kdjax-run "$folder" "PYTHONPATH=$PWD/source/$sha" PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 \
  ${environment[@]+"${environment[@]}"} "$python" -m kdjax.main "$@" </dev/null >/dev/null 2>&1 &
for _ in $(seq 100); do
  [ ! -s "$folder/run.pid" ] || break
  sleep 0.05
done
[ -s "$folder/run.pid" ] || refuse "the run did not start within 5 s; see $folder/run.log"
echo "runs/$run started, process $(cat "$folder/run.pid")" >&2
cat "$folder/dispatch.json"
