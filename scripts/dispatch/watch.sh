#!/usr/bin/env bash
# Follows a run that dispatch.sh started, and ends with its exit status:
#
#   HOST=gpu1 scripts/dispatch/watch.sh RUN
#
# Shows steps, losses, held-out figures, errors and verdicts (ALL=1: every line). A lost connection
# is made again where it broke off; interrupting it leaves the run alone. HOST, SSH_USER, PORT,
# SSH_OPTIONS, REMOTE and EVIDENCE are those of dispatch.sh.
#
#   POLL   seconds between looks at the log (1)      RETRY     seconds before connecting again (5)
#   TRIES  failed connections in a row before giving up (120)
#
# Exit status: the run's; 2 no such run; 1 it was killed without one; 255 no connection.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# shellcheck source=scripts/dispatch/remote.sh
. "$root/scripts/dispatch/remote.sh"

[ $# -eq 1 ] || die 2 "usage: HOST=... scripts/dispatch/watch.sh RUN"
run=$1
check_run_name "$run"
locate
evidence=${EVIDENCE:-$root/runs/dispatch/$run}
shown='^(== started|step |held-out |checkpoint |error| *warning|saved;|done:|stopping )|F-DISTILL-|steps would take|[Ee]rror|Traceback|loss|[Ii]nterrupt|(finished|interrupted|failed) after|[Kk]illed|nothing to do'

# Streams the log from byte $3 on until the run ended; exits with its status. The log is looked at
# again after the end was seen: the last lines come before it.
# shellcheck disable=SC2016
follow='
  cd "$1/runs/$2" 2>/dev/null || { echo "error: no run $2 in $1/runs" >&2; exit 2; }
  offset=$3
  alive() {
    local pid; pid=$(cat run.pid 2>/dev/null) && kill -0 "$pid" 2>/dev/null || return 1
    [ ! -r "/proc/$pid/cmdline" ] || tr "\0" " " <"/proc/$pid/cmdline" | grep -qF "runs/$2"
  }
  while :; do
    end=
    if [ -e run.exit ]; then end=$(cat run.exit)
    elif ! alive "$@" && [ ! -e .starting ] && [ ! -e run.exit ]; then end=dead; fi
    size=$(wc -c <run.log 2>/dev/null || echo 0)
    if [ "$size" -gt "$offset" ]; then
      tail -c "+$((offset + 1))" run.log | head -c "$((size - offset))" || true
      offset=$size
    fi
    case $end in
      "") ;;
      dead) echo "error: $2 ended without an exit status: killed, or the machine restarted" >&2
        exit 1 ;;
      *) exit "$end" ;;
    esac
    kill -0 "$PPID" 2>/dev/null || exit 255 # the connection is gone
    sleep "$4"
  done
'
# Where the newest start begins in the log: an earlier attempt is not this one.
# shellcheck disable=SC2016
newest='
  cd "$1/runs/$2" 2>/dev/null || { echo "error: no run $2 in $1/runs" >&2; exit 2; }
  grep -ab "^== started " run.log 2>/dev/null | tail -n 1 | cut -d: -f1
'

state=$(mktemp)
trap 'rm -f "$state"' EXIT

# Prints what is worth it and keeps the number of bytes of whole lines; a line that the lost
# connection cut short comes again.
show() {
  local line offset=$1
  export LC_ALL=C # ${#line} in bytes
  while IFS= read -r line; do
    offset=$((offset + ${#line} + 1))
    printf '%s\n' "$offset" >"$state"
    if [ "${ALL:-0}" = 1 ] || [[ "$line" =~ $shown ]]; then printf '%s\n' "$line"; fi
  done
}

failures=0
lost() {
  failures=$((failures + 1))
  [ "$failures" -lt "${TRIES:-120}" ] || die 255 "no connection to $HOST after $failures tries"
  say "connection lost; trying again in ${RETRY:-5} s"
  sleep "${RETRY:-5}"
}

while :; do
  status=0
  start=$(on_host "$newest" "$remote" "$run") || status=$?
  [ "$status" = 255 ] || break
  lost
done
[ "$status" = 0 ] || exit "$status"
printf '%s\n' "${start:-0}" >"$state"
while :; do
  before=$(cat "$state")
  set +e
  on_host "$follow" "$remote" "$run" "$before" "${POLL:-1}" | show "$before"
  status=${PIPESTATUS[0]}
  set -e
  [ "$status" = 255 ] || break
  [ "$(cat "$state")" = "$before" ] || failures=0
  lost
done
[ "${DRY_RUN:-0}" != 1 ] || exit 0

mkdir -p "$evidence"
for file in receipt.json metrics.jsonl run.log; do
  # shellcheck disable=SC2016
  if on_host 'cat "$1/runs/$2/$3" 2>/dev/null' "$remote" "$run" "$file" >"$evidence/$file.part"; then
    mv "$evidence/$file.part" "$evidence/$file"
  else
    rm -f "$evidence/$file.part"
  fi
done
say "$run ended with status $status; evidence in $evidence"
exit "$status"
