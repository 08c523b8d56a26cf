#!/usr/bin/env bash
# Trains the tiny run through an engine on this host's processors, in two and in four processes; one is killed in
# the middle, the run goes on, and its figures are compared with those of a single process.
#   scripts/cluster/try_engines.sh ompi|slurm|ray FOLDER [PROCESSES...]
# ompi needs openmpi-bin; slurm needs slurm-wlm and munge, and root: it starts a cluster of one node and ends it; ray needs
# `pip install 'ray[train]'` beside kdjax in the environment of $PYTHON.
set -euo pipefail
engine=${1:?ompi, slurm or ray} folder=$(realpath -m "${2:?a folder that does not exist}")
shift 2
python=${PYTHON:-python3}
cd "$(dirname "$0")/../.."
export JAX_PLATFORMS=cpu JAX_DISABLE_MOST_OPTIMIZATIONS=1 JAX_COMPILATION_CACHE_DIR=$folder/xla
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
"$python" -m scripts.cluster.tiny "$folder"
steps=(--config.train.steps=20 --config.checkpoint.every=4 --config.eval.every=10 --config.eval.samples=0)

start_slurm() {
  mkdir -p "$folder/slurm/state" "$folder/slurm/spool" /run/munge
  chown munge /run/munge
  [ -f /etc/munge/munge.key ] || dd if=/dev/urandom of=/etc/munge/munge.key bs=1024 count=1 status=none
  chown munge /etc/munge/munge.key && chmod 400 /etc/munge/munge.key
  pgrep munged >/dev/null || { runuser -u munge -- munged --force && munge_file=/run/munge/munged.pid; }
  cat >"$folder/slurm/slurm.conf" <<CONF
ClusterName=one
SlurmctldHost=$(hostname -s)
SlurmUser=root
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
StateSaveLocation=$folder/slurm/state
SlurmdSpoolDir=$folder/slurm/spool
SlurmctldPidFile=$folder/slurm/slurmctld.pid
SlurmdPidFile=$folder/slurm/slurmd.pid
KillWait=5
NodeName=$(hostname -s) CPUs=$(nproc) State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES OverSubscribe=FORCE:8 State=UP
CONF
  export SLURM_CONF=$folder/slurm/slurm.conf
  slurmctld -L "$folder/slurm/slurmctld.log" && slurmd -L "$folder/slurm/slurmd.log"
  for _ in $(seq 30); do sinfo -h -o %T 2>/dev/null | grep -q idle && return; sleep 1; done
  sinfo
  return 1
}

stop_slurm() {
  scontrol shutdown >/dev/null 2>&1 || true
  [ -z "${munge_file:-}" ] || kill "$(cat "$munge_file")"
}

# launch ENGINE COUNT WORKDIR FLAG...: as the engine's users start it; all processes together have four devices.
launch() {
  local engine=$1 count=$2 workdir=$3
  shift 3
  export XLA_FLAGS=--xla_force_host_platform_device_count=$((4 / count))
  local command=("$python" -m kdjax.main --config="$folder/config.py" --workdir="$workdir" --join_timeout=60 "${steps[@]}" "$@")
  case $engine in
    none) "${command[@]}" ;;
    ompi) mpirun --allow-run-as-root --oversubscribe -n "$count" "${command[@]}" ;;
    ray) "$python" -m scripts.cluster.ray_program "$folder/config.py" "$workdir" "$count" "${steps[@]}" "$@" ;;
    slurm) srun --overcommit -n "$count" --cpu-bind=none "${command[@]}" ;;
    *) echo "unknown engine $engine" >&2 && exit 2 ;;
  esac
}

launch none 1 "$folder/alone" >"$folder/alone.log" 2>&1
if [ "$engine" = slurm ]; then
  trap stop_slurm EXIT
  start_slurm
fi
[ $# -gt 0 ] || set -- 2 4
for count; do
  run=$folder/$engine-$count
  launch "$engine" "$count" "$run" >"$run.log" 2>&1 &
  launched=$!
  for _ in $(seq 1800); do
    [ -d "$run/checkpoints/8" ] && break
    sleep 0.1
  done
  if [ "$engine" = ray ]; then
    victim=$(cat "$run.1")
  else
    victim=$(pgrep -f "kdjax.main.*--workdir=$run" | while read -r pid; do
      if tr '\0' '\n' <"/proc/$pid/environ" | grep -qE '^(OMPI_COMM_WORLD_RANK|SLURM_PROCID)=1$'; then echo "$pid"; fi
    done | tail -1)
  fi
  kill -9 "$victim"
  killed=$SECONDS status=0
  wait "$launched" || status=$?
  echo "$engine, $count processes: the second was killed; the engine ended with status $status after $((SECONDS - killed)) s"
  status=0
  [ "$engine" = ray ] || launch "$engine" "$count" "$run" >>"$run.log" 2>&1 || status=$? # Ray has started it by itself
  [ $status = 0 ] || { tail -n 60 "$run.log" && exit $status; }
  "$python" - "$folder/alone" "$run" <<'PY'
import sys
from pathlib import Path

from scripts.cluster.tiny import largest_difference

difference = largest_difference(*map(Path, sys.argv[1:]))
print(f"resumed; largest relative difference to one process: {difference:.1e}")
sys.exit(difference > 1e-6)
PY
done
