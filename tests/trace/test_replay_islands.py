"""Islands and data of replayed learners."""

import dataclasses
from types import SimpleNamespace

import jax
import pytest

from ddiloco.config import ConfigError, from_dict
from ddiloco.protocol import events
from ddiloco.trace import replay
from ddiloco.trace.operations import Entry, Trace


def test_a_life_reads_its_data_by_the_batches_of_its_own_plan(monkeypatch):
  """A run may go on with other islands; their batches are a part of the order of the data.

  It may go on with another way to compute a step, too, which changes bits: the life says which.
  Plans of as many steps were taken for one, and so the batches of all were those of the newest.
  """
  plans = [((2, 4), 50, "full"), ((4, 2), 50, "none"), ((2,), 75, "none")]  # batches, steps, how
  lives = [
    events.Started(
      role=f"learner-{m}", devices=1, mesh=(1, 1, 1), batch_size=sizes[m % len(sizes)],
      learners=2, batch_sizes=sizes, planned_steps=steps,
      execution={"attention": "einsum", "remat": remat, "loss_chunks": 2},
    )
    for sizes, steps, remat in plans
    for m in range(2)
  ]  # fmt: skip
  trace = Trace({f"learner-{m}": [Entry(1, life) for life in lives[m::2]] for m in range(2)})
  newest = {"num_learners": 3, "devices": 4, "fsdp": 4, "batch_size": 8, "remat": "products"}
  saved = {"data": {"source": "synthetic"}, "islands": newest, "sync": {"min_quorum": 3}}
  config, read = from_dict(saved), []
  monkeypatch.setattr(replay, "Island", lambda *_: SimpleNamespace(compile=int))
  monkeypatch.setattr(
    replay.data,
    "Stream",
    lambda _, live, learner: read.append(live) or SimpleNamespace(batch=learner),
  )
  home = replay.islands(config, trace, jax.devices()[:2])
  for life in lives:
    _, learner = home(life)
    live = read[-1]
    assert life.role == f"learner-{learner}"
    planned = live.islands.num_learners, live.islands.batch_sizes, live.planned_steps()
    assert planned == (life.learners, life.batch_sizes, life.planned_steps)
    mine = dataclasses.asdict(live.islands.island(learner))
    assert {**life.execution, "batch_size": life.batch_size}.items() <= mine.items()
    assert live.inner == config.inner  # an optimizer of the user's own may read all of it


def test_a_learner_is_replayed_on_the_devices_of_its_largest_island():
  devices = {"learner-1": (2, 4, 1), "learner-0": (1,), "syncer-1": (9,)}
  roles = {
    role: [Entry(1, events.Started(role=role, devices=count)) for count in counts]
    for role, counts in devices.items()
  }
  roles["learner-0"].append(Entry(2, events.Captured(role="learner-0", snapshot=1)))
  assert list(Trace(roles).devices().items()) == [(0, 1), (1, 4)]


def test_a_run_of_another_kind_of_device_is_refused():
  """On CPUs it came to an island whose attention was refused, or to losses of other bits."""
  how = {"attention": "cudnn", "remat": "none", "loss_chunks": 1}
  gpu = {"device_kind": "NVIDIA H100 80GB HBM3", "execution": how}
  started = events.Started(role="learner-1", devices=1, mesh=(1, 1, 1), batch_size=2, **gpu)
  trace = Trace({"learner-1": [Entry(1, started)]})
  config = from_dict({"data": {"source": "synthetic"}})
  with pytest.raises(ConfigError, match=r"learner-1 .* 'NVIDIA H100 .* here are cpu, .* --cpu\."):
    replay.islands(config, trace, jax.devices()[:1])


def test_a_run_in_virtual_time_has_nothing_to_compare_and_is_refused(tmp_path):
  """It was trained for real, as long as that took, and was "not identical", without a reason."""
  config = from_dict({"data": {"source": "synthetic"}})
  (tmp_path / "config.json").write_text(config.to_json())
  numbers = {"step": 1, "global_step": 1, "position": 0, "tokens": 8}
  step = events.Step(role="learner-0", seconds=1.0, gap_seconds=1.0, **numbers)
  saved = events.Saved(role="learner-0", snapshot=1, arrays={})
  trace = Trace({"learner-0": [Entry(1, step), Entry(2, saved)]})
  with pytest.raises(ConfigError, match=r"as in virtual time\. Fix: name a run"):
    replay.replay_run(tmp_path, trace)


@pytest.mark.parametrize("hosts", [1, 2])
def test_it_is_said_that_islands_of_several_processes_may_have_other_bits(hosts, capsys):
  """A replay in which four devices of two processes had added ended with a difference, which looked
  like a fault."""
  lives = [events.Started(role=f"learner-{m}", hosts=hosts if m else 1) for m in range(3)]
  replay._warn_of_hosts(Trace({life.role: [Entry(1, life)] for life in lives}))
  said = capsys.readouterr().err
  assert ("WARNING: learner-1, learner-2: several processes may add" in said) == (hosts > 1)
  assert bool(said) == (hosts > 1)
