#!/usr/bin/env bash
# A Slurm cluster of one node on this machine, with all its files in one new directory, for trying job scripts.
#
#   apt-get install --no-install-recommends slurmctld slurmd slurm-client munge       # Debian, as root
#   tests/slurm_localhost.sh start /tmp/slurm       # prints the line that makes sbatch, srun, ... use it:
#   export SLURM_CONF=/tmp/slurm/slurm.conf
#   srun --ntasks=2 hostname
#   tests/slurm_localhost.sh stop /tmp/slurm
#
# It needs root, listens on the loopback interface only, and gives the node 4 CPUs whatever the machine has.
# SLURM_PORT (default 16817, and the one after it) moves its ports.
set -euo pipefail

usage() {
  echo "usage: $0 start|stop DIRECTORY" >&2
  exit 2
}

start() {
  mkdir "$dir" "$dir/munge" "$dir/state" "$dir/spool"
  dd if=/dev/urandom of="$dir/munge/key" bs=128 count=1 status=none
  chmod 400 "$dir/munge/key"
  cat > "$dir/slurm.conf" << CONF
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=$port
SlurmdPort=$((port + 1))
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge/socket
CredType=cred/munge
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
NodeName=localhost NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
  munged --key-file="$dir/munge/key" --socket="$dir/munge/socket" --pid-file="$dir/munged.pid" \
    --log-file="$dir/munge/log" --seed-file="$dir/munge/seed" --force
  slurmctld -f "$dir/slurm.conf"
  slurmd -f "$dir/slurm.conf" -N localhost
  for _ in $(seq 30); do
    if [ "$(SLURM_CONF="$dir/slurm.conf" sinfo --noheader --format=%t 2> /dev/null)" = idle ]; then
      echo "export SLURM_CONF=$dir/slurm.conf"
      return
    fi
    sleep 1
  done
  echo "Slurm did not start; see $dir/*.log" >&2
  stop
  exit 1
}

stop() {
  export SLURM_CONF=$dir/slurm.conf
  scancel --quiet --user="$(id -un)" || true
  for _ in $(seq 60); do
    [ -n "$(squeue --noheader 2> /dev/null)" ] || break
    sleep 1
  done
  for daemon in slurmd slurmctld munged; do
    if [ -f "$dir/$daemon.pid" ]; then
      kill "$(cat "$dir/$daemon.pid")" || true
    fi
  done
}

[ $# = 2 ] || usage
dir=$(realpath -m "$2")
port=${SLURM_PORT:-16817}
case $1 in
  start) start ;;
  stop) stop ;;
  *) usage ;;
esac
