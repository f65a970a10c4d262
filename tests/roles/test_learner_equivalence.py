"""The real roles and threads against references that fit on a page."""

import numpy as np
import pytest

from ddiloco.core import fragments
from ddiloco.protocol.rules import due_after
from tests.roles import fleet, toy


def outer_step(value, momentum, delta, rate, mu):
  """Nesterov SGD; returns the new value and momentum."""
  momentum = mu * momentum + delta
  return value - rate * (delta + mu * momentum), momentum


def diloco(learners: int, steps: int, period: int, rate: float, mu: float):
  """Synchronous DiLoCo (2311.08105): H local steps, average, Nesterov, everybody starts again."""
  value = toy.initial_params()
  momentum = {name: np.zeros_like(v) for name, v in value.items()}
  local = [{name: v.copy() for name, v in value.items()} for _ in range(learners)]
  for step in range(1, steps + 1):
    for m in range(learners):
      toy.inner_step(local[m], m, step - 1)
    if step % period == 0:
      for name in value:
        delta = sum(value[name] - local[m][name] for m in range(learners)) / learners
        value[name], momentum[name] = outer_step(value[name], momentum[name], delta, rate, mu)
        for m in range(learners):
          local[m][name] = value[name].copy()
  return value


def streaming_diloco(config, learners: int, steps: int, rate: float, mu: float):
  """Streaming DiLoCo (2501.18512): fragments in turn, sent at t, mixed in at t + tau."""
  sync, plan = config.sync, fragments.make_plan(toy.SPECS, config.sync)
  first = toy.initial_params()
  value = {f.index: fragments.gather(f, first) for f in plan.fragments}
  momentum = {p: np.zeros_like(v) for p, v in value.items()}
  local = [{name: v.copy() for name, v in first.items()} for _ in range(learners)]
  sent = {}  # (fragment, step at which it is mixed in) -> new value
  versions = dict.fromkeys(value, 0)
  for step in range(1, steps + 1):
    for m in range(learners):
      toy.inner_step(local[m], m, step - 1)
    for f in plan.fragments:
      p, offset = f.index, due_after(f.index, 0, sync)
      if (p, step) in sent:
        value[p], versions[p] = sent.pop((p, step)), versions[p] + 1
        for params in local:
          mine = fragments.gather(f, params)
          alpha = np.float32(sync.mix_alpha)
          fragments.scatter(f, alpha * mine + (1 - alpha) * value[p], params)
      if step >= offset and (step - offset) % sync.sync_period == 0:
        deltas = [value[p] - fragments.gather(f, params) for params in local]
        delta = sum(deltas) / learners
        new, momentum[p] = outer_step(value[p], momentum[p], delta, rate, mu)
        sent[p, step + sync.overlap_steps] = new
  return value, versions, sent


def close(a, b):
  np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def lock_step(learners, steps, period, rate, momentum, shards=1):
  """DiLoCo: all wait for all, and take the outer step on the average."""
  return toy.config(
    learners,
    steps,
    num_shards=shards,
    num_fragments=shards,
    sync_period=period,
    overlap_steps=0,
    min_quorum=learners,
    blocking=True,
    apply="overwrite",
    merge="average",
    outer={"learning_rate": rate, "momentum": momentum, "decay_share": 0.0},
  )


def test_synchronous_diloco_is_its_reference():
  learners, rounds, period = 3, 7, 5
  result = fleet.run(lock_step(learners, rounds * period, period, 0.7, 0.9))
  expected = diloco(learners, rounds * period, period, 0.7, 0.9)
  assert result.versions == [rounds]
  for name, value in expected.items():
    close(result.params[name], value)
  assert {role.exchange.state.step for role in result.learners} == {rounds * period}


def test_a_sync_at_every_step_that_takes_the_average_is_data_parallel():
  """With SGD inside, the average of the deltas of one step is that of the gradients."""
  learners, steps = 3, 20
  result = fleet.run(lock_step(learners, steps, 1, 1.0, 0.0, shards=2))
  assert result.versions == [steps, steps]
  assert result.params.keys() == toy.initial_params().keys()
  for name, value in toy.initial_params().items():
    for step in range(steps):
      targets = [toy.target(m, step, value.shape) for m in range(learners)]
      value -= np.float32(toy.INNER_RATE) * (value - np.mean(targets, axis=0))
    close(result.params[name], value)


@pytest.mark.parametrize("shards", [1, 2])
def test_streaming_diloco_is_its_reference(shards):
  learners, period, tau, rounds = 2, 8, 2, 5
  config = toy.config(
    learners,
    steps=rounds * period,
    num_shards=shards,
    num_fragments=4,
    sync_period=period,
    overlap_steps=tau,
    min_quorum=learners,
    blocking=True,
    apply="mix",
    mix_alpha=0.5,
    merge="average",
    outer={"learning_rate": 0.4, "momentum": 0.9, "decay_share": 0.0},
  )
  result = fleet.run(config)
  # The run ends when every fragment has merged its tokens, that is `tau` steps after the last push.
  steps = {role.exchange.state.step for role in result.learners}
  assert len(steps) == 1
  value, versions, sent = streaming_diloco(config, learners, steps.pop(), 0.4, 0.9)
  plan = fragments.make_plan(toy.SPECS, config.sync)
  for fragment in plan.fragments:
    p = fragment.index
    # A push of the very last step may have been committed or not when the run ended.
    late = [new for (q, _), new in sent.items() if q == p]
    known = dict(enumerate([value[p], *late], start=versions[p]))
    assert result.versions[p] in known
    close(fragments.gather(fragment, result.params), known[result.versions[p]])


def test_one_learner_with_outer_rate_one_is_plain_training():
  """One learner, outer learning rate 1, no momentum, rebase: the exchange must change nothing."""
  config = toy.config(
    *(1, 100),
    num_shards=2,
    num_fragments=3,
    sync_period=4,
    apply="rebase",
    outer={"learning_rate": 1.0, "momentum": 0.0, "decay_share": 0.0},
  )
  plan = fragments.make_plan(toy.SPECS, config.sync)
  island = toy.ToyIsland(0, plan, step_seconds=0.002)
  result = fleet.run(config, [island])
  plain = toy.initial_params()
  for step in range(result.learners[0].exchange.state.step):
    toy.inner_step(plain, 0, step)
  for name, value in plain.items():
    close(island.params[name], value)
  assert min(result.versions) >= 5, "rounds were really committed"


def test_no_learner_is_ever_blocked_and_all_tokens_have_one_fate():
  config = toy.config(
    3, 100, num_shards=2, num_fragments=4, sync_period=6, min_quorum=1, push_codec="int8"
  )
  plan = fragments.make_plan(toy.SPECS, config.sync)
  result = fleet.run(config, [toy.ToyIsland(m, plan, step_seconds=0.002) for m in range(3)])
  for m, role in enumerate(result.learners):
    state = role.exchange.state
    for f in state.fragments:
      assert state.trained_tokens == f.acknowledged_tokens + f.tokens + f.discarded_tokens
      assert f.discarded_tokens == 0
    steps = [e for e in result.events[f"learner-{m}"] if e.kind == "step"]
    assert sum(e.blocked_seconds for e in steps) == 0


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4"])
def test_lossy_codecs_both_ways_stay_close_to_exact_ones(codec):
  """In lock-step, where two runs see the same data at the same versions and only bits differ."""
  lockstep = {
    "num_shards": 2,
    "num_fragments": 4,
    "sync_period": 6,
    "min_quorum": 2,
    "blocking": True,
    "apply": "overwrite",
  }
  exact = fleet.run(toy.config(2, 60, **lockstep))
  lossy = fleet.run(toy.config(2, 60, push_codec=codec, publish_codec=codec, **lockstep))
  bound = {"bf16": 0.01, "int8": 0.02, "int4": 0.4}[codec]
  compared = 0
  for fragment in fragments.make_plan(toy.SPECS, toy.config(2, 60, **lockstep).sync).fragments:
    p = fragment.index
    first, second = (role.exchange for role in lossy.learners)
    states = [role.exchange.state.fragments[p] for role in lossy.learners]
    at_rest = not any(f.incoming for f in states)  # or a base may already be that of the next
    if at_rest and states[0].version == states[1].version:
      assert first._deltas.base[p].tobytes() == second._deltas.base[p].tobytes(), (
        "all hold the same bits"
      )
    if exact.versions[p] == lossy.versions[p]:  # a push of the last step may be in or not
      one, other = (fragments.gather(fragment, run.params) for run in (exact, lossy))
      assert 0 < np.abs(one - other).max() < bound
      compared += 1
  assert compared


def test_a_poisoned_learner_is_rejected_and_the_run_goes_on():
  config = toy.config(3, 150, num_shards=1, num_fragments=4, sync_period=6, min_quorum=2)
  plan = fragments.make_plan(toy.SPECS, config.sync)
  islands = [toy.ToyIsland(m, plan, step_seconds=0.002) for m in range(3)]
  islands[1].poison_at = 30
  result = fleet.run(config, islands)
  assert all(np.isfinite(v).all() for v in result.params.values())
  commits = [e for e in result.events["syncer-0"] if e.kind in ("commit", "abandoned")]
  reasons = [reason for e in commits for reason in e.rejected.values()]
  assert any("not finite" in reason for reason in reasons)
  assert np.isfinite(islands[1].params["scale"]).all(), "it took the global value back"
