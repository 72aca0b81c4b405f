#!/usr/bin/env bash
# Starts a SLURM cluster of virtual nodes on the loopback interface: no systemd,
# no accounting, everything in one directory. Needs slurm-wlm and munge.
#   usage: up.sh DIR NODES PORT      takes the ports PORT to PORT + NODES
# Then SLURM_CONF=DIR/slurm.conf sbatch ...; ended by down.sh DIR.
set -euo pipefail
dir=$1 nodes=$2 port=$3
host=$(hostname -s)
cpus=$(($(nproc) / nodes))
memory=$((($(awk '/MemTotal/ {print $2}' /proc/meminfo) / 1024 - 512) / nodes))
mkdir -p "$dir"/{state,spool,log,munge}
chmod 0755 "$dir"
chmod 0700 "$dir/log"
chmod 0711 "$dir/munge"

(umask 077 && head -c 1024 /dev/urandom > "$dir/munge/key")
munged --key-file="$dir/munge/key" --socket="$dir/munge/socket" \
  --pid-file="$dir/munge/pid" --log-file="$dir/munge/log" \
  --seed-file="$dir/munge/seed" --force

cat > "$dir/slurm.conf" <<CONF
ClusterName=gqatest
SlurmctldHost=$host(127.0.0.1)
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
SlurmctldPort=$port
AuthType=auth/munge
AuthInfo=socket=$dir/munge/socket
CredType=cred/munge
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0,bf_interval=1
ReturnToService=2
KillWait=5
MinJobAge=3600
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=gqa[1-$nodes] NodeHostname=$host NodeAddr=127.0.0.1 Port=[$((port + 1))-$((port + nodes))] CPUs=$((cpus > 0 ? cpus : 1)) RealMemory=$memory State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
CONF

export SLURM_CONF=$dir/slurm.conf
slurmctld -c
for i in $(seq "$nodes"); do slurmd -c -N "gqa$i"; done
for _ in $(seq 100); do
  idle=$(sinfo --noheader --Node --partition=main --format=%T 2> /dev/null | grep -c idle || true)
  [ "$idle" -eq "$nodes" ] && exit
  sleep 0.2
done
sinfo >&2
exit 1
