#!/usr/bin/env bash
# Ends the cluster that up.sh DIR started, and its jobs.
dir=$1
export SLURM_CONF=$dir/slurm.conf
scancel --full --signal=KILL --user="$(id -un)" 2> /dev/null
scontrol shutdown 2> /dev/null
for _ in $(seq 50); do
  ls "$dir"/slurmctld.pid "$dir"/slurmd.*.pid > /dev/null 2>&1 || break
  sleep 0.1
done
for file in "$dir"/slurmctld.pid "$dir"/slurmd.*.pid "$dir/munge/pid"; do
  [ -s "$file" ] && kill "$(cat "$file")"
done
exit 0
