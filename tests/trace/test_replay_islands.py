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
  """
  sizes = {50: (2, 4), 75: (2, 2)}  # planned steps -> batches
  ways = {  # planned steps -> how
    50: {"attention": "einsum", "remat": "full", "loss_chunks": 2},
    75: {"attention": "einsum", "remat": "none", "loss_chunks": 1},
  }
  lives = {
    f"learner-{m}": [
      events.Started(
        role=f"learner-{m}", devices=1, mesh=(1, 1, 1), batch_size=each[m], learners=2,
        planned_steps=steps, execution=ways[steps] if m else {},
      )
      for steps, each in sizes.items()
    ]
    for m in range(2)
  }  # fmt: skip
  trace = Trace({role: [Entry(1, life) for life in each] for role, each in lives.items()})
  newest = {"remat": "products", "loss_chunks": 4}
  saved = {"num_learners": 3, "devices": 4, "fsdp": 4, "batch_size": 8, **newest}
  config = from_dict({"data": {"source": "synthetic"}, "islands": saved})
  read = []
  monkeypatch.setattr(replay, "Island", lambda *_: SimpleNamespace(compile=int))
  monkeypatch.setattr(
    replay.data,
    "Stream",
    lambda _, live, learner: read.append(live) or SimpleNamespace(batch=learner),
  )
  home = replay.islands(config, trace, jax.devices()[:2])
  for steps, each in sizes.items():
    for role in lives:
      started = next(life for life in lives[role] if life.planned_steps == steps)
      _, learner = home(started)
      assert role == f"learner-{learner}"
      found = [read[-1].islands.island(m).batch_size for m in range(2)]
      assert tuple(found) == each and read[-1].islands.num_learners == 2
      computed = [dataclasses.asdict(read[-1].islands.island(m)).items() for m in range(2)]
      assert ways[steps].items() <= computed[1] and newest.items() <= computed[0]


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
