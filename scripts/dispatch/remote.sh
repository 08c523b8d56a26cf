# shellcheck shell=bash
# What dispatch.sh and watch.sh share: where the run is, and how commands get there. Sourced.

die() {
  local status=$1
  shift
  printf 'error: %s\n' "$*" >&2
  exit "$status"
}

say() { printf '%s\n' "$*" >&2; }

# One word for a POSIX shell, whatever is in it. The remote login shell need not be bash, so
# bash's own %q, which writes $'...', will not do.
quote() { printf "'%s'" "${1//\'/\'\\\'\'}"; }

quoted() {
  local word line=
  for word in "$@"; do line+="$(quote "$word") "; done
  printf '%s' "${line% }"
}

# The SHA-256 of a file here, in hex.
sha256() {
  if command -v sha256sum >/dev/null; then sha256sum "$1"; else shasum -a 256 "$1"; fi | cut -d' ' -f1
}

# Sets ssh_command and remote from HOST, SSH_USER (or a USER that is not the login's own), PORT,
# SSH_OPTIONS and REMOTE.
locate() {
  [ -n "${HOST:-}" ] ||
    die 2 "HOST is not set: give a name that ssh reaches, as in HOST=gpu1 $0 RUN. (GX10_HOST and \
the like are aprender's: docs/dispatch.md says what they are called here.)"
  # shellcheck disable=SC2034 # by who sources this
  remote=${REMOTE:-kdjax}
  local options=() login=${SSH_USER:-}
  # Every shell sets USER; one that differs from the account was set for this command.
  if [ -z "$login" ] && [ -n "${USER:-}" ] && [ "$USER" != "$(id -un)" ]; then login=$USER; fi
  read -r -a options <<<"${SSH_OPTIONS:-}"
  # ssh takes the first value of an option, so the caller's come first.
  ssh_command=("${SSH:-ssh}" ${options[@]+"${options[@]}"} -o BatchMode=yes -o ConnectTimeout=15
    -o ServerAliveInterval=15 -o ServerAliveCountMax=4)
  [ -z "${PORT:-}" ] || ssh_command+=(-p "$PORT")
  [ -z "$login" ] || ssh_command+=(-l "$login")
  ssh_command+=("$HOST")
}

# Lets every later command use one connection: one handshake, one password of a key.
share_connection() {
  [ "${DRY_RUN:-0}" != 1 ] || return 0
  control=$(mktemp -d "${TMPDIR:-/tmp}/kdjax.XXXXXX")
  trap 'leave_connection' EXIT
  local host=${ssh_command[${#ssh_command[@]} - 1]}
  unset 'ssh_command[${#ssh_command[@]}-1]'
  ssh_command+=(-o ControlMaster=auto -o ControlPersist=60 -o "ControlPath=$control/c" "$host")
}

leave_connection() {
  "${ssh_command[@]:0:${#ssh_command[@]}-1}" -O exit "$HOST" >/dev/null 2>&1 || true
  rm -rf "$control"
}

# on_host SCRIPT [ARGUMENT...]: runs a bash script there, without standard input. The script sees
# the arguments as $1, $2, ... and needs no quoting of its own.
on_host() { send_host "$@" </dev/null; }

# send_host SCRIPT [ARGUMENT...]: the same, with our standard input.
send_host() {
  local command
  command="bash -c $(quoted "set -euo pipefail
$1" kdjax "${@:2}")"
  if [ "${DRY_RUN:-0}" = 1 ]; then
    say "+ $(quoted "${ssh_command[@]}" "$command")"
    return 0
  fi
  "${ssh_command[@]}" "$command"
}

check_run_name() {
  [[ "$1" =~ ^[A-Za-z0-9_][A-Za-z0-9._-]*$ ]] ||
    die 2 "run name '$1': use letters, digits, dots, dashes and underscores; it names a folder."
}
