"""What a commit says of its pushes: how long the merged one is, and where it points."""

import math

import numpy as np
import pytest

from ddiloco.config import from_dict
from ddiloco.core import codec, delta, outer, passes
from ddiloco.core.delta import Committed, Deltas, Merger
from ddiloco.protocol import rules
from ddiloco.protocol.messages import MADE, NOTHING, FragmentState, Push
from ddiloco.protocol.values import replace
from tests import says
from tests.core.test_outer_merge import exact, fragment_of, randoms
from tests.made_events import made

SIZE = 9000
CONFIG = from_dict({"sync": {"num_fragments": 1, "num_shards": 1}})


def push_of(m, round, gradient):
  return Push(m, 0, 0, round, round, 1, 1, 0, round, "f32", exact(gradient).payload)


def merged(merger, round, pushes, progress=0.0):
  """What the commit of these outer gradients says."""
  for m, each in enumerate(pushes):
    merger.take_in(push_of(m, round, each), 0.0)
  count = len(pushes)
  ones = (1,) * count
  what = made(
    0.0,
    "syncer-0",
    "commit",
    round=round,
    version=round + 1,
    learners=tuple(range(count)),
    steps=ones,
    tokens=ones,
    step_tokens=ones,
    progress=progress,
  )
  return merger.commit(what, FragmentState(0, round + 1, last_round=round))


@pytest.fixture
def merger():
  fragment = fragment_of(SIZE - 100, 100, average=[1])
  store = {0: delta.new_fragment(fragment, np.zeros(fragment.size, np.float32))}
  return Merger({0: fragment}, store, CONFIG)


@pytest.mark.parametrize("name", codec.CODECS)
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("rate, share", [(1e3, 1.0), (1e-6, 1e-6)])
def test_no_outer_step_on_what_the_screen_accepts_leaves_the_range_of_f32(
  name, nesterov, rate, share
):
  """So a commit needs no check of its result. By hand: a merged value is at most as long as the
  longest push, so momentum is at most MOST_NORM / (1 - mu), and a step rate times that: of the
  longest steps that the config allows, 1e18 do not overflow."""
  outer = {"learning_rate": rate, "momentum": 0.99, "final_share": share, "nesterov": nesterov}
  sync = {"num_fragments": 1, "num_shards": 1, "publish_codec": name}
  fragment = fragment_of(300, 300, average=[1])
  store = {0: delta.new_fragment(fragment, np.zeros(fragment.size, np.float32))}
  merger = Merger({0: fragment}, store, from_dict({"sync": sync, "outer": outer}))
  pushes = np.zeros((2, fragment.size), np.float32)
  pushes[:, [0, 300]] = 0.7 * rules.MOST_NORM  # in a directed piece, and in an averaged one
  pushes[1, 1] = 1e-30
  longest = rate * share * rules.MOST_NORM / (1 - 0.99)
  for n in range(30):
    merged(merger, n, list(pushes), progress=1.0)
    now = merger.committed[0]
    for vector in (now.value, now.published_value, now.momentum):
      assert np.isfinite(vector).all()
    assert np.abs(now.value).max() <= 2 * (n + 1) * longest < 1e38 / 1e12


def cosine(a, b):
  return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


def test_length_and_rho_are_those_of_the_merged_gradients(merger):
  """Of equally long pushes RDA's direction is the average's; so both are found by hand."""
  first, second = randoms(4, SIZE, seed=1), randoms(4, SIZE, seed=2)
  second[0] = first[0].copy()  # something in common with the commit before
  for norm, pushes in ((1, first), (3, second)):
    for each in pushes:
      each[:-100] *= norm / np.linalg.norm(each[:-100])
      each[-100:] = 0
  found = [merged(merger, n, pushes) for n, pushes in enumerate((first, second))]
  np.testing.assert_allclose(found[0].weights, 0.25)
  assert [each.length for each in found] == pytest.approx([1, 1], abs=1e-5)
  assert found[0].rho is None, "there is none before it"
  directions = [sum(pushes)[:-100].astype(float) for pushes in (first, second)]
  assert found[1].rho == pytest.approx(cosine(*directions), abs=1e-5)


def test_a_commit_of_zeros_has_no_direction(merger):
  zeros = [np.zeros(SIZE, np.float32)] * 2
  some = list(randoms(2, SIZE, seed=3))
  assert merged(merger, 0, zeros).length is None
  assert merged(merger, 1, some).rho is None
  assert merged(merger, 2, zeros).rho is None
  half = merged(merger, 3, [zeros[0], some[0]])
  assert half.length == pytest.approx(1), "as long as the mean of the two"


class Median(passes.Sum):
  """In place of a sum: of each value the median over the pushes."""

  def __init__(self, fragment, pushes):
    super().__init__(fragment, [], np.empty((0, len(fragment.pieces)), np.float32))
    self._pushes = pushes

  def read(self, chunk, total, scratch):
    rows = np.empty((len(self._pushes), total.size), np.float32)
    for push, row in zip(self._pushes, rows):
      codec.decode_chunk(push, self.fragment.size, chunk.start, row)
    np.median(rows, axis=0, out=total)


def test_a_merge_rule_need_not_be_a_weighted_sum(merger, monkeypatch):
  def combine(fragment, pushes, weights, share=map):
    total = Median(fragment, [each.push for each in pushes])
    return total, math.sqrt(passes.squares(total, share).sum())

  monkeypatch.setattr(delta, "combine", combine)
  pushes, zeros = randoms(3, SIZE), np.zeros(SIZE, np.float32)
  found, median = merged(merger, 0, pushes), np.median(pushes, axis=0)
  expected = outer.update(zeros, zeros, median, CONFIG.outer)
  np.testing.assert_array_equal(merger.committed[0].value, expected)
  mean_norm = np.mean([np.linalg.norm(each) for each in pushes])
  assert found.length == pytest.approx(np.linalg.norm(median) / mean_norm, rel=1e-5)


@pytest.mark.parametrize("size, compared", [(4095, set()), (4096, {0, 1})])
def test_directions_of_few_values_are_compared_with_none(size, compared):
  fragment, pushes = fragment_of(size), randoms(2, size)
  store = {0: delta.new_fragment(fragment, np.zeros(size, np.float32))}
  merger = Merger({0: fragment}, store, CONFIG)
  merged(merger, 0, pushes)
  first, second = (merger.take_in(push_of(m, 1, each), 0.0) for m, each in enumerate(pushes))
  assert first.products.keys() == compared - {1} and second.products.keys() == compared
  for m, product in second.products.items():
    assert product == pytest.approx(pushes[m] @ pushes[1], abs=1e-3)
  assert (merged(merger, 1, pushes).rho is None) == (not compared)


def test_a_commit_goes_on_from_the_momentum_of_the_one_before():
  fragment, outside = fragment_of(SIZE), {"learning_rate": 0.5, "momentum": 0.9}
  sync = {"num_fragments": 1, "num_shards": 1, "publish_codec": "f32"}
  config = from_dict({"sync": sync, "outer": outside})
  value = momentum = np.zeros(SIZE, np.float32)
  merger = Merger({0: fragment}, {0: delta.new_fragment(fragment, value)}, config)
  for n, gradient in enumerate(randoms(3, SIZE)):
    merged(merger, n, [gradient])
    before, value = value, outer.update(value, momentum, gradient, config.outer)
    momentum = outer.followed(momentum, before, value, config.outer)
    now = merger.committed[0]
    np.testing.assert_array_equal(now.value, value)
    np.testing.assert_array_equal(now.momentum, momentum)
    assert now.momentum_round == n


def test_a_push_is_compared_with_those_of_its_own_round(merger):
  pushes = randoms(2, SIZE)
  for m, (round, compared) in enumerate([(0, {0}), (1, {1})]):
    done = merger.take_in(push_of(m, round, pushes[m]), 0.0)
    assert done.products.keys() == compared and merger.arrivals[0][0] == round


def test_what_is_committed_next_is_written_first():
  """Until it is written a commit needs new vectors beside the old ones, of all at worst."""
  store = {}
  for p, at in ((0, 30), (1, 10), (2, 20)):
    new = delta.new_fragment(fragment_of(SIZE), np.zeros(SIZE, np.float32))
    store[p] = replace(new, state=replace(new.state, index=p, global_step=at))
  merger = Merger(dict.fromkeys(store, fragment_of(SIZE)), store, CONFIG)
  assert [*merger.arrays()] == ["1/value", "2/value", "0/value"]


@pytest.mark.parametrize("name", codec.CODECS)
def test_a_commit_in_place_changes_no_bit(name):
  fragment, vectors = fragment_of(SIZE), {"0/value", "0/momentum"}
  config = from_dict({"sync": {"num_fragments": 1, "num_shards": 1, "publish_codec": name}})
  found = []
  for in_place in (False, True):
    store = {0: delta.new_fragment(fragment, np.ones(SIZE, np.float32))}
    merger = Merger({0: fragment}, store, config, in_place)
    for n in range(2):
      before = merger.committed[0]
      merged(merger, n, list(randoms(2, SIZE, seed=n)))
      assert (merger.committed[0].published_value is before.published_value) == in_place
      assert (merger.committed[0].value is before.value) == in_place or not n
    found.append(merger.arrays())
    assert found[-1].keys() == vectors | (set() if name == "f32" else {"0/published_value"})
    np.testing.assert_array_equal(found[-1]["0/momentum"], merger.committed[0].momentum)
    assert Merger({0: fragment}, store, config).arrays().keys() == {"0/value"}
  for key, value in found[0].items():
    np.testing.assert_array_equal(found[1][key], value, err_msg=key)


def test_a_push_of_stale_work_weighs_what_its_counted_steps_and_tokens_weigh():
  config = from_dict({"sync": {"sync_period": 10}})
  what = made(0.0, "syncer-0", "commit", learners=(0, 1, 2), step_tokens=(10, 10, 10))
  what = replace(what, steps=(60, 30, 30), tokens=(600, 300, 150))
  # 60 steps count as 15, with 150 tokens: 150 * 10 against 300 * 10 and 150 * 5. Half is the most.
  np.testing.assert_allclose(delta.learner_weights(what, config), [1 / 3, 1 / 2, 1 / 6], rtol=1e-15)


@pytest.mark.parametrize("name", ["f32", "int8"])
def test_receivers_get_the_update_of_the_newest_commit_or_the_whole_value(name):
  fragment = fragment_of(SIZE)
  store = {0: delta.new_fragment(fragment, np.ones(SIZE, np.float32))}
  sync = {"num_fragments": 1, "num_shards": 1, "publish_codec": name}
  merger = Merger({0: fragment}, store, from_dict({"sync": sync}))
  assert merger.change(0).codec == "f32"
  merged(merger, 0, list(randoms(2, SIZE)))
  change, value = merger.change(0), merger.committed[0].published_value
  assert (change.codec, len(change.payload)) == (name, codec.payload_bytes(SIZE, name))
  found = codec.decode(change.payload, SIZE, name)
  np.testing.assert_array_equal(found if name == "f32" else 1 + found, value)
  update = says.publish(0, 0, 0, 0, 0, 1, 0, 1, 2, (0, 0, 1, 0), "")
  base_round = NOTHING if name == "f32" else update.base_round
  assert merger.with_payload(update).base_round == base_round, "f32 costs as much whole"
  for_newcomers = merger.with_payload(replace(update, base_round=NOTHING))
  np.testing.assert_array_equal(codec.finite(for_newcomers.payload, SIZE), value)
  assert (for_newcomers.codec, for_newcomers.base_round) == ("f32", NOTHING)


def test_a_value_that_is_given_back_goes_out_whole_and_the_round_under_way_is_forgotten():
  """Receivers of the older update would have had another value than the shard."""
  fragment, (value, gradient) = fragment_of(SIZE), randoms(2, SIZE)
  store = {0: delta.new_fragment(fragment, np.ones(SIZE, np.float32))}
  sync = {"num_fragments": 1, "num_shards": 1, "publish_codec": "int8"}
  merger = Merger({0: fragment}, store, from_dict({"sync": sync}))
  merged(merger, 0, [gradient])
  merger.take_in(push_of(0, 1, gradient), 0.0)
  before, state = merger.committed[0], FragmentState(0, 9, last_round=8)
  merger.install(value, state)
  now = merger.committed[0]
  assert now.value is now.published_value is value and now.state is state
  assert now.momentum is before.momentum and now.momentum_round == before.momentum_round == 0
  assert not merger.arrivals and merger.change(0).codec == "f32"
  sent = merger.with_payload(says.publish(0, 0, 0, 0, 8, 9, 1, 0, 0, (), ""))
  assert sent.base_round == NOTHING
  np.testing.assert_array_equal(codec.finite(sent.payload, SIZE), value)


def test_a_value_is_inexact_only_if_it_was_given_back_with_a_codecs_rounding():
  value, rounded = np.ones(3, np.float32), np.zeros(3, np.float32)
  for version, published_value, expected in [
    (0, value, True),
    (1, value, False),
    (1, rounded, True),
  ]:
    committed = Committed(FragmentState(0, version=version), value, published_value, None)
    assert committed.exact("int4") == expected and committed.exact("f32")


@pytest.mark.filterwarnings("error")
def test_a_push_that_is_not_finite_is_measured_in_silence(merger):
  bad = np.zeros(SIZE, np.float32)
  bad.view(np.uint32)[:2] = 0x7F800001, 0x7F800000  # a signalling NaN, and infinity
  push = Push(0, 0, 0, 0, 0, 1, 1, 0, 0, "f32", exact(bad).payload)
  assert not np.isfinite(merger.take_in(push, 0.0).norm)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("factor", [1.0, 2.0, 0.5, -1.0, 1e30, math.nan])
def test_a_planned_fault_poisons_a_push_and_nothing_else(factor):
  deltas, (base, local) = Deltas(CONFIG.sync), randoms(2, SIZE)
  base[0] = 1e30
  deltas.base[0] = base
  sent = codec.decode(deltas.push(0, local, factor), SIZE, CONFIG.sync.push_codec)
  with np.errstate(over="ignore"):
    np.testing.assert_array_equal(sent, (base - local) * np.float32(factor))
  assert deltas.base[0] is base and np.isfinite(base).all()


def test_a_learner_keeps_no_rounding_errors_unless_it_feeds_them_back():
  base, local, new = randoms(3, SIZE)
  for error_feedback, kept in ((False, {"base/0"}), (True, {"base/0", "residual/0"})):
    sync = {"push_codec": "int8", "apply": "mix", "error_feedback": error_feedback}
    deltas = Deltas(from_dict({"sync": sync}).sync)
    deltas.base[0] = base
    deltas.push(0, local, 1.0)
    outstanding = {name.replace("residual", "rounding") for name in kept} | {"sent/0"}
    assert deltas.arrays().keys() == outstanding
    deltas.stage(0, new, "mix", included=True)
    assert deltas.arrays().keys() == kept


@pytest.mark.parametrize(
  "size, rounds, is_made", [(SIZE, 0, True), (SIZE, 1, False), (9, 0, False)]
)
def test_a_large_initial_value_goes_out_as_its_digest(monkeypatch, size, rounds, is_made):
  monkeypatch.setattr(delta, "MADE_FROM", SIZE)
  fragment, (value, other) = fragment_of(size), randoms(2, size)
  store = {0: delta.new_fragment(fragment, value)}
  merger, deltas = Merger({0: fragment}, store, CONFIG), Deltas(CONFIG.sync)
  for n in range(rounds):
    merged(merger, n, [other])
  assert merger.prepare(0) == ""
  sent = merger.with_payload(says.publish(0, 0, 0, 0, -1, 0, NOTHING, 0, 0, (), MADE))
  if not is_made:
    assert sent.codec == "f32" and len(sent.payload) == 4 * size
    return
  assert (sent.codec, bytes(sent.payload)) == (MADE, codec.digest(value))
  assert merger.with_payload(replace(sent, codec="")).codec == "f32", "who cannot make it asks"
  assert deltas.made(sent, other) is None, "other bits were made"
  made_here = deltas.made(sent, value)
  np.testing.assert_array_equal(codec.finite(made_here.payload, size), value)
  assert made_here.codec == "f32"
