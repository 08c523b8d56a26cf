#!/usr/bin/env bash
# Starts a run on another machine, over nothing but ssh:
#
#   HOST=gpu1 TEACHER=models/t.gguf STUDENT=models/s.gguf scripts/dispatch/dispatch.sh RUN [--config.x=y ...]
#
# It checks the machine, sends the committed revision, installs it, checks the config, copies models
# that are missing there, and starts the run so that it outlives the connection. The same command again attaches to
# a run that is going on, and resumes one that was stopped; another config under a live run is
# refused. scripts/dispatch/watch.sh RUN follows it.
#
#   HOST            name or address                     REMOTE         folder there (kdjax, in home)
#   SSH_USER, PORT  of the login                        SSH_OPTIONS    words for ssh: -i KEY -F FILE
#   TEACHER         file or folder here to copy, a path there, or hf:ORG/REPO/FILE   STUDENT  the same
#   CONFIG          file[:size] of this repository (configs/qwen7b_0p5b.py)
#   STEPS BATCH LR TEMPERATURE ALPHA                    override the config's fields
#   EXTRA           more flags, split at spaces         ENVIRONMENT    NAME=value ... of the run
#   EVIDENCE        folder here for dispatch.json and the receipt (runs/dispatch/RUN)
#   PYTHON          interpreter there that has everything; without it a venv is made and installed
#   INSTALL_EXTRAS  of pip install (cuda13 where nvidia-smi is)
#   MIN_DISK_GB (15), MIN_MEMORY_GB (16)                what must be free there
#   TICKET, PHASE   noted in dispatch.json              DRY_RUN=1      checks the config here, prints
#                                                                      the commands, runs none
#
# Relative paths of the config start at REMOTE there. Exit status: 0 started, going on or already
# finished; 2 refused; 255 no connection.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# shellcheck source=scripts/dispatch/remote.sh
. "$root/scripts/dispatch/remote.sh"

[ $# -ge 1 ] || die 2 "usage: HOST=... scripts/dispatch/dispatch.sh RUN [--config.field=value ...]"
run=$1
shift
check_run_name "$run"
locate
share_connection
config=${CONFIG:-configs/qwen7b_0p5b.py}
evidence=${EVIDENCE:-$root/runs/dispatch/$run}
sha=$(git -C "$root" rev-parse HEAD)
git -C "$root" cat-file -e "HEAD:${config%%:*}" 2>/dev/null ||
  die 2 "CONFIG=$config: not in revision $sha; name a committed file of this repository."
dirty=0
if [ -n "$(git -C "$root" status --porcelain)" ]; then
  dirty=1
  say "note: uncommitted changes stay here; revision $sha is sent"
fi

preflight() {
  say "== preflight: $HOST"
  # shellcheck disable=SC2016 # expands there
  on_host '
    mkdir -p "$1/runs" "$1/source" "$1/models"; cd "$1"
    fail() { printf "error: preflight: %s\n" "$*" >&2; exit 2; }
    for tool in tar sha256sum nohup; do
      command -v "$tool" >/dev/null || fail "no $tool on this machine; install it."
    done
    "$2" -c "import sys; sys.exit(sys.version_info < (3, 11))" ||
      fail "$2 is not a Python of 3.11 or newer; name one with PYTHON=."
    disk=$(df -Pk . | awk "NR == 2 { print int(\$4 / 1000 / 1000 * 1.024) }")
    [ "$disk" -ge "$3" ] || fail "$disk GB of disk are free in $PWD, MIN_DISK_GB=$3 asks for more."
    memory=$(awk "/^MemAvailable:/ { print int(\$2 / 1000 / 1000 * 1.024) }" /proc/meminfo 2>/dev/null ||
      true)
    [ -z "$memory" ] || [ "$memory" -ge "$4" ] ||
      fail "$memory GB of memory are available, MIN_MEMORY_GB=$4 asks for more."
    echo "python $("$2" -V 2>&1), $disk GB of disk, ${memory:-?} GB of memory" >&2
  ' "$remote" "${PYTHON:-python3}" "${MIN_DISK_GB:-15}" "${MIN_MEMORY_GB:-16}"
}

archive() { [ "${DRY_RUN:-0}" = 1 ] || git -C "$root" archive --format=tar "$sha"; }

sync_revision() {
  say "== revision $sha"
  # shellcheck disable=SC2016
  if [ "${DRY_RUN:-0}" != 1 ] && on_host '[ -e "$1/source/$2/.revision" ]' "$remote" "$sha"; then
    say "already there"
    return
  fi
  [ "${DRY_RUN:-0}" != 1 ] || say "+ git archive $sha |"
  # Unpacked aside and renamed: a connection lost halfway leaves nothing that looks whole.
  # shellcheck disable=SC2016
  archive | send_host '
    cd "$1/source"; aside=".$2.$$"
    trap '\''rm -rf "$aside"'\'' EXIT
    mkdir "$aside"; tar -xf - -C "$aside"
    printf "%s\n" "$2" >"$aside/.revision"
    rm -rf "${2:?}"; mv "$aside" "$2"
  ' "$remote" "$sha"
}

install() {
  [ -z "${PYTHON:-}" ] || return 0
  say "== install"
  # The run itself imports from source/SHA; the venv is for what that needs.
  # shellcheck disable=SC2016
  on_host '
    cd "$1"; extras=$3
    if [ -z "$extras" ] && command -v nvidia-smi >/dev/null; then extras=cuda13; fi
    want="$2 $extras"
    if [ "$(cat venv/.installed 2>/dev/null)" = "$want" ]; then echo "already there" >&2; exit 0; fi
    [ -x venv/bin/python ] || python3 -m venv venv
    venv/bin/python -m pip install --quiet -e "source/$2${extras:+[$extras]}" >&2
    printf "%s\n" "$want" >venv/.installed
  ' "$remote" "$sha" "${INSTALL_EXTRAS:-}"
}

# check_config_here FLAG...: refuses, by the revision that would be sent, a config that cannot run.
check_config_here() {
  local folder
  if ! PYTHONPATH="$root" python3 -c "import kdjax.config" 2>/dev/null; then
    say "note: python3 here has no kdjax; the config is checked on $HOST alone"
    return
  fi
  folder=$(mktemp -d "${TMPDIR:-/tmp}/kdjax.XXXXXX")
  # shellcheck disable=SC2064 # the folder of now
  trap "rm -rf $(quote "$folder")" EXIT
  git -C "$root" archive --format=tar "$sha" | tar -xf - -C "$folder"
  (cd "$folder" && PYTHONPATH=. PYTHONSAFEPATH=1 python3 -m scripts.dispatch.record --run="$run" \
    --sha="$sha" --dirty=0 --host= --ticket= --phase= -- "$@" >/dev/null) || exit $?
}

# stage_file FILE NAME: copies a file to REMOTE/models/NAME unless the same bytes are there.
stage_file() {
  local file=$1 name=$2 size there sum
  size=$(wc -c <"$file" | tr -d ' ')
  # shellcheck disable=SC2016
  there=$(on_host 'wc -c <"$1/models/$2" 2>/dev/null || echo none' "$remote" "$name" | tr -d ' ')
  if [ "${DRY_RUN:-0}" = 1 ] || [ "$there" = "$size" ]; then
    sum=$(sha256 "$file")
    # shellcheck disable=SC2016
    there=$(on_host 'sha256sum "$1/models/$2" | cut -d" " -f1' "$remote" "$name")
    if [ "$there" = "$sum" ]; then
      say "models/$name: already there"
      return
    fi
  fi
  say "models/$name: copying $size bytes"
  # shellcheck disable=SC2016
  send_host '
    cd "$1/models"; mkdir -p "$(dirname "$2")"; aside="$2.part.$$"
    trap '\''rm -f "$aside"'\'' EXIT
    cat >"$aside"
    [ "$(wc -c <"$aside" | tr -d " ")" = "$3" ] || { echo "error: $2 was cut short" >&2; exit 1; }
    mv -f "$aside" "$2"
  ' "$remote" "$name" "$size" <"$file"
}

# path_there PATH: where a model will be, from REMOTE: files and folders here go to models/.
path_there() {
  if [ -f "$1" ] || [ -d "$1" ]; then printf 'models/%s' "$(basename "$1")"; else printf '%s' "$1"; fi
}

# stage WHAT PATH: copies it. What is not here must be there, or on the Hugging Face Hub.
stage() {
  local what=$1 path=$2 file name
  name=$(basename "$path")
  if [ -f "$path" ]; then
    stage_file "$path" "$name"
  elif [ -d "$path" ]; then
    while IFS= read -r -d '' file; do
      stage_file "$file" "$name/$(basename "$file")"
    done < <(find -L "$path" -maxdepth 1 -type f -print0)
  elif [[ "$path" != hf:* ]]; then
    # shellcheck disable=SC2016
    on_host 'cd "$1"; [ -e "$2" ]' "$remote" "$path" ||
      die 2 "$what=$path: neither here nor, from $remote, on $HOST. Give the file to copy."
  fi
}

preflight
sync_revision
install

flags=("--config=source/$sha/$config" "--workdir=runs/$run")
[ -z "${TEACHER:-}" ] || flags+=("--config.teacher.path=$(path_there "$TEACHER")")
[ -z "${STUDENT:-}" ] || flags+=("--config.student.path=$(path_there "$STUDENT")")
[ -z "${STEPS:-}" ] || flags+=("--config.train.steps=$STEPS")
[ -z "${BATCH:-}" ] || flags+=("--config.train.batch_size=$BATCH")
[ -z "${LR:-}" ] || flags+=("--config.optim.learning_rate=$LR")
[ -z "${TEMPERATURE:-}" ] || flags+=("--config.loss.temperature=$TEMPERATURE")
[ -z "${ALPHA:-}" ] || flags+=("--config.loss.alpha=$ALPHA")
read -r -a extra <<<"${EXTRA:-}"
flags+=(${extra[@]+"${extra[@]}"} "$@")
read -r -a environment <<<"${ENVIRONMENT:-}"
python=${PYTHON:-venv/bin/python}

# Before gigabytes are copied for a run that cannot start.
say "== config"
[ "${DRY_RUN:-0}" != 1 ] || check_config_here "--config=$config" "${flags[@]:1}"
# shellcheck disable=SC2016
on_host '
  cd "$1"; run=$2 sha=$3 python=$4; shift 4
  PYTHONPATH=source/$sha PYTHONSAFEPATH=1 "$python" -m scripts.dispatch.record --run="$run" \
    --sha="$sha" --dirty=0 --host= --ticket= --phase= -- "$@" >/dev/null
' "$remote" "$run" "$sha" "$python" "${flags[@]}"

say "== models"
[ -z "${TEACHER:-}" ] || stage TEACHER "$TEACHER"
[ -z "${STUDENT:-}" ] || stage STUDENT "$STUDENT"

say "== start: $run"
# start.sh answers with dispatch.json on standard output, or refuses with status 2.
# shellcheck disable=SC2016
answer=$(
  on_host 'cd "$1"; shift; exec bash "source/$1/scripts/dispatch/start.sh" "$@"' \
    "$remote" "$sha" "$run" "$python" "$HOST" "$dirty" "${TICKET:-}" \
    "${PHASE:-}" "${#environment[@]}" ${environment[@]+"${environment[@]}"} "${flags[@]}"
)
if [ "${DRY_RUN:-0}" = 1 ]; then
  say "+ mkdir -p $(quote "$evidence"), and keep the answer in dispatch.json there"
  exit 0
fi
mkdir -p "$evidence"
printf '%s\n' "$answer" >"$evidence/dispatch.json"
say "$evidence/dispatch.json; follow it with: HOST=$HOST scripts/dispatch/watch.sh $run"
