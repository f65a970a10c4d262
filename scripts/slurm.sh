#!/usr/bin/env bash
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@90
# One role of a run as a Slurm job, which comes back after a failure, a preemption, or a lost node.
#
#   sbatch [FLAGS OF SBATCH] scripts/slurm.sh learner|syncer|evaluator [FLAGS OF THE ROLE]
#
# The number of a job in its array is that of the learner or the shard. A shard listens on port 7000
# + its number. An island of several hosts is a job with as many nodes, which meet at the first one,
# on port 7100 + its number.
#
#   ROLE="--config=CONFIG --workdir=SHARED/runs/first --keys=SHARED/keys
#     --syncers=tcp://cpu1:7000,tcp://cpu1:7001"
#   sbatch --array=0-1 --nodelist=cpu1 --cpus-per-task=8 --mem=32G scripts/slurm.sh syncer $ROLE
#   sbatch --array=0-3 --gpus-per-node=8 --exclusive --mem=0 scripts/slurm.sh learner $ROLE
#   sbatch --nodelist=cpu1 --cpus-per-task=4 --mem=32G scripts/slurm.sh evaluator $ROLE
#
# A role that fails is started again, at most MAX_RESTARTS times (10). Of an island of several hosts
# all end then, each with its own words; Slurm kills those that are left after a minute. A role that
# is asked to end, because its job is preempted or reaches its time limit in 90 seconds (sbatch's
# --signal=TERM@90), drains; its job waits in the queue again, two minutes at least. `scancel` ends a
# job for good, after draining too: Slurm's KillWait and GraceTime should be at least the config's
# network.drain_seconds. Exit status: that of the role.
set -u

if [ $# -eq 0 ] || [ "$1" = --help ]; then sed -n '6,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"; exit 0; fi
if [ -z "${SLURM_JOB_ID:-}" ]; then echo "slurm.sh: this is no job. Fix: sbatch $0 $*" >&2; exit 2; fi
number="${SLURM_ARRAY_TASK_ID:-0}" role="$1"
shift
case "$role" in
  learner) set -- "$@" --learner="$number" ;;
  syncer) set -- "$@" --shard="$number" --bind="tcp://0.0.0.0:$((7000 + number))" ;;
  evaluator) ;;
  *) echo "slurm.sh: no role $role. Fix: learner, syncer or evaluator" >&2; exit 2 ;;
esac
host=""
if [ "${SLURM_JOB_NUM_NODES:-1}" -gt 1 ]; then
  first="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
  set -- "$@" --hosts="tcp://$first:$((7100 + number))"
  host='--host="$SLURM_PROCID"'
fi
# Else JAX would train on the CPU of a node whose GPUs it cannot open.
if [ -n "${SLURM_GPUS_ON_NODE:-}" ]; then export JAX_PLATFORMS="${JAX_PLATFORMS:-cuda,cpu}"; fi
# srun no longer takes this from sbatch by itself.
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"; fi

left() { echo $((${SLURM_JOB_END_TIME:-9999999999} - $(date +%s))); }  # seconds of the job
near=150
# So short a job is near its limit from the first: a role that always fails would wait for ever.
[ "$(left)" -ge 300 ] || near=0

# A host that fails must not make Slurm ask the others to end: they would drain, and their status,
# 143, would send the job into the queue, for any failure and without a limit.
for restart in $(seq 0 "${MAX_RESTARTS:-10}"); do
  srun --kill-on-bad-exit=0 --wait=60 bash -c "exec ddiloco \"\$@\" $host" ddiloco \
    "$role" "$@" --term_status=143
  status=$?
  echo "slurm.sh: $role $number ended with status $status (restart $restart)" >&2
  case "$status" in
    0 | 2) exit "$status" ;;  # it is done, or its flags are wrong
    143) exec scontrol requeue "$SLURM_JOB_ID" ;;  # asked to end; `scancel` ends this script too
    # So near the limit, too, whose signal comes up to a minute early: not all its work was merged
    # in time. Slurm would end the next start, and the job for good.
    *) [ "$(left)" -ge "$near" ] || exec scontrol requeue "$SLURM_JOB_ID" ;;
  esac
done
exit "$status"
