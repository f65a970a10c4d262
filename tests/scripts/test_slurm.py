"""scripts/slurm.sh with stand-ins for Slurm's programs and for ddiloco."""

from __future__ import annotations

import os
import re
import stat
import subprocess
from pathlib import Path

import pytest

from ddiloco.config.schema import NetworkConfig

ROOT = Path(__file__).parents[2]
# Each writes a line of what it was asked for; ddiloco ends with the next of the planned statuses.
PROGRAMS = {
  # Its own flags; then the command, as on each node. Of several hosts the last one fails; Slurm
  # asks the others to end at once, if it was told so, and says the greatest status.
  "srun": """
    asks=no
    while [[ $1 == --* ]]; do [ "$1" != --kill-on-bad-exit=1 ] || asks=143; shift; done
    if [ "${SLURM_JOB_NUM_NODES:-1}" = 1 ] || [ $asks = no ]; then exec "$@"; fi
    "$@" || exit $asks
  """,
  "scontrol": 'echo "scontrol $*" >> "$CALLS"; [ "$1" != show ] || printf "node-a\\nnode-b\\n"',
  "ddiloco": """
    printf '%s|' "$JAX_PLATFORMS" "$@" >> "$CALLS"; echo >> "$CALLS"
    read -r status < "$PLAN"; sed -i 1d "$PLAN"; exit "$status"
  """,
  "date": 'read -r now < "$CLOCK"; sed -i 1d "$CLOCK"; echo "$now"',
}


@pytest.fixture
def job(tmp_path):
  """Runs the script as a job with these variables; returns (exit status, calls, said)."""
  for name, text in PROGRAMS.items():
    program = tmp_path / name
    program.write_text(f"#!/usr/bin/env bash\n{text}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)

  def run(*arguments: str, statuses: tuple[int, ...] = (0,), clock=(0,) * 20, **variables: str):
    calls, plan = tmp_path / "calls", tmp_path / "plan"
    calls.write_text("")
    (tmp_path / "clock").write_text("".join(f"{each}\n" for each in clock))
    plan.write_text("".join(f"{each}\n" for each in statuses))
    named = {"CALLS": str(calls), "PLAN": str(plan), "CLOCK": str(tmp_path / "clock")}
    named |= {"SLURM_JOB_ID": "42", **variables}
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
      ["bash", str(ROOT / "scripts" / "slurm.sh"), *arguments],
      env={"PATH": path, **{name: value for name, value in named.items() if value}},
      capture_output=True,
      text=True,
    )
    return done.returncode, calls.read_text().splitlines(), done.stdout + done.stderr

  return run


def test_a_role_that_fails_is_started_again_until_it_is_done(job):
  flags = "--config=a b.py", "--workdir=runs/first"
  status, calls, said = job("learner", *flags, statuses=(137, 1, 0), SLURM_ARRAY_TASK_ID="3")
  assert status == 0 and len(calls) == 3 and "status 137 (restart 0)" in said
  assert set(calls) == {f"|learner|{'|'.join(flags)}|--learner=3|--term_status=143|"}


@pytest.mark.parametrize(
  ("statuses", "most", "status", "starts"),
  [((2, 0), "10", 2, 1), ((1, 1, 137, 0), "2", 137, 3), ((1, 0), "0", 1, 1)],
)
def test_wrong_flags_and_too_many_failures_end_the_job(job, statuses, most, status, starts):
  found, calls, _ = job("evaluator", statuses=statuses, MAX_RESTARTS=most)
  assert found == status and len(calls) == starts


def test_a_role_that_was_asked_to_end_waits_in_the_queue_again(job):
  status, calls, _ = job("learner", statuses=(1, 143, 0))
  assert status == 0 and calls[-1] == "scontrol requeue 42" and len(calls) == 3


def test_a_role_drains_before_its_time_limit():
  """Slurm would end its job for good there."""
  text = (ROOT / "scripts" / "slurm.sh").read_text()
  asked = re.search(r"^#SBATCH --signal=TERM@(\d+)$", text, re.MULTILINE)
  assert asked and int(asked[1]) > NetworkConfig().drain_seconds


@pytest.mark.parametrize(("ends", "requeued"), [(3460, True), (10, False)])
def test_a_role_that_has_lost_work_at_its_time_limit_waits_in_the_queue_again(job, ends, requeued):
  """It was started once more, and Slurm ended that start, and the job for good."""
  given = {"clock": (0, ends, 3600), "SLURM_JOB_END_TIME": "3600"}
  status, calls, _ = job("learner", statuses=(1, 0), **given)
  assert status == 0 and len(calls) == 2 and (calls[-1] == "scontrol requeue 42") == requeued


def test_a_role_that_always_fails_does_not_send_a_short_job_into_the_queue_for_ever(job):
  given = {"clock": (0, 20, 40, 60), "SLURM_JOB_END_TIME": "120", "MAX_RESTARTS": "2"}
  status, calls, _ = job("learner", statuses=(1, 1, 1), **given)
  assert status == 1 and len(calls) == 3 and "scontrol requeue 42" not in calls


def test_a_shard_listens_on_the_port_of_its_number(job):
  _, calls, _ = job("syncer", SLURM_ARRAY_TASK_ID="1")
  assert calls == ["|syncer|--shard=1|--bind=tcp://0.0.0.0:7001|--term_status=143|"]


def test_hosts_of_an_island_meet_at_the_first_node(job):
  several = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_PROCID": "1"}
  _, calls, _ = job("learner", SLURM_ARRAY_TASK_ID="5", **several)
  assert calls[0] == "scontrol show hostnames node-[a-b]"
  assert "|--learner=5|--hosts=tcp://node-a:7105|--term_status=143|--host=1|" in calls[1]


def test_a_host_that_fails_does_not_send_its_job_into_the_queue(job):
  several = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_PROCID": "1"}
  status, calls, _ = job("learner", statuses=(1, 1, 1), MAX_RESTARTS="2", **several)
  assert status == 1 and "scontrol requeue 42" not in calls


def test_with_gpus_jax_may_not_train_on_the_cpu_by_itself(job):
  assert job("learner", SLURM_GPUS_ON_NODE="8")[1][0].startswith("cuda,cpu|learner|")
  chosen = job("learner", SLURM_GPUS_ON_NODE="8", JAX_PLATFORMS="rocm,cpu")
  assert chosen[1][0].startswith("rocm,cpu|learner|")


def test_what_is_wrong_is_named_with_its_fix(job):
  status, calls, said = job("learner", SLURM_JOB_ID="")
  assert (status, calls) == (2, []) and "Fix: sbatch" in said
  status, calls, said = job("lerner")
  assert (status, calls) == (2, []) and "no role lerner. Fix: " in said
  status, calls, said = job("--help")
  assert (status, calls) == (0, []) and said.startswith("One role of a run as a Slurm job")
  assert "sbatch --array=0-3" in said and "set -u" not in said
