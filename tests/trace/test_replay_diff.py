"""What a replay compares: losses of steps, and the result with the ends that a run may have."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from ddiloco.config import from_dict
from ddiloco.core.delta import Committed
from ddiloco.protocol import events
from ddiloco.protocol.messages import FragmentState
from ddiloco.protocol.values import replace
from ddiloco.roles import initial
from ddiloco.trace import replay
from ddiloco.trace.operations import Entry, Trace

MODEL = {"num_layers": 2, "model_dim": 8, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4}
CONFIG = from_dict(
  {
    "data": {"source": "synthetic"},
    "model": {**MODEL, "mlp_dim": 8, "vocab_size": 16},
    "sync": {"num_fragments": 2, "num_shards": 1},
  }
)


@pytest.mark.parametrize(
  ("said", "made", "same"),
  [(1.5, 1.5, True), (1.5, 1.25, False), (math.nan, math.nan, True), (1.5, math.nan, False)]
  + [(math.nan, 1.5, False), (None, 1.5, None)],
)
def test_a_loss_is_the_same_or_not_a_number_either_time(said, made, same):
  diff = replay.ReplayDiff(Trace({}))
  step = events.Step(
    role="learner-0", time=7.0, step=3, global_step=3, position=2, tokens=1, seconds=0.1,
    gap_seconds=0.1, loss=said,
  )  # fmt: skip
  diff.step(Entry(9, step), {"loss": made})
  diff.step(Entry(9, step), None)
  assert diff.compared["losses"] == (said is not None)
  found = f"learner-0, incarnation 0, line 9: the loss of step 3 is {made!r}, it was {said!r}"
  assert diff.differences == ([(7.0, "losses", found)] if same is False else [])


@pytest.fixture
def ended():
  """A replay at its end: shards have both fragments, the evaluator has an older one of the second.

  Returns:
    (The replay, and a function: from a number of each fragment, a result that has only these.)
  """
  found = object.__new__(replay.Replay)
  found.diff, found._plan = replay.ReplayDiff(Trace({})), initial.make_plan(CONFIG)
  shard = replay.ShardArrays(CONFIG, found._plan, found.diff)
  found._shards, found._evaluator = [shard], replay.EvaluatorArrays()

  def full(p, number):
    return np.full(found._plan.fragments[p].size, number, np.float32)

  for p in range(2):
    state = FragmentState(p, 2, merged_tokens=100 + p, last_round=5)
    shard.newest[p] = Committed(state, full(p, 4), full(p, 3), None)
  older = FragmentState(1, 1, merged_tokens=90, last_round=4)
  for p, each in enumerate((shard.newest[0], Committed(older, full(1, 2), full(1, 1), None))):
    staged = found._evaluator.stage(None, SimpleNamespace(content=each), None)
    found._evaluator.apply(p, staged, "overwrite")
  values = lambda *each: {p: full(p, number) for p, number in enumerate(each)}
  return found, lambda *each: initial.Assembled(found._plan, CONFIG, values(*each))


def test_a_result_has_the_values_of_the_shards_or_those_that_the_evaluator_received(ended):
  found, result = ended
  assert found.merged_tokens == {100, 90}
  for numbers in ((4, 4), (3, 3), (3, 1)):
    found.compare_result(result(*numbers))
  assert (found.diff.compared["values"], found.diff.differences) == (6, [])
  for p, numbers in enumerate(((1, 4), (4, 2))):
    found.compare_result(result(*numbers))
    text = f"fragment {p} of the result is another than the replay's"
    assert found.diff.differences[p:] == [(math.inf, "values", text)]


def test_of_an_evaluator_without_the_whole_model_there_is_no_result(ended):
  found, _ = ended
  del found._evaluator.newest[0]
  assert found.merged_tokens == {100}


@pytest.mark.parametrize(
  ("exact", "momentum_round", "older", "value", "momentum"),
  [(True, 5, None, 4, 9), (False, 5, None, 3, 9), (True, 2, 7, 3, 7), (True, -1, None, 3, None)],
)
def test_a_value_that_was_given_back_is_the_published_one_with_an_older_momentum(
  ended, exact, momentum_round, older, value, momentum
):
  shard = ended[0]._shards[0]
  content = shard.newest[0] = replace(shard.newest[0], momentum=np.float32(9))
  before = SimpleNamespace(content=replace(content, momentum=older)) if older else None
  op = events.Owns(fragment=1, version=2, round=5, momentum_round=momentum_round, exact=exact)
  found = shard.own(op, SimpleNamespace(content=content), before)
  assert (found.value[0], found.published_value[0], found.momentum) == (value, 3, momentum)
  assert shard.newest[1] is found


def test_a_result_without_shards_is_the_model_of_one_island(ended):
  found, _ = ended
  models = {"a": np.zeros(2), "b": np.zeros(1)}, {"a": np.ones(2), "b": np.zeros(1)}
  islands = [SimpleNamespace(params_on_host=lambda model=model: model) for model in models]
  found._shards, found._config = [], CONFIG
  found._learners = [SimpleNamespace(island=i, steps=n) for n, i in enumerate([None, *islands])]
  assert found.merged_tokens == {2 * CONFIG.planned_tokens_per_step}
  for model in models:
    found.compare_result(model)
  assert (found.diff.compared["values"], found.diff.differences) == (2, [])
  for other in ({"a": np.ones(2), "b": np.ones(1)}, {"a": np.zeros(3), "b": np.zeros(1)}):
    found.compare_result(other)
  assert found.diff.differences == [(math.inf, "values", "the result is no island's")] * 2
