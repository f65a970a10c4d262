"""What a commit says of its pushes: how long the merged one is, and where it points."""

import math

import numpy as np
import pytest

from ddiloco.config import from_dict
from ddiloco.core import codec, delta, outer, passes
from ddiloco.core.delta import Committed, Merger
from ddiloco.protocol import rules
from ddiloco.protocol.messages import NOTHING, FragmentState, Push
from tests import says
from tests.core.test_outer_merge import exact, fragment_of, randoms
from tests.made_events import made

SIZE = 9000
CONFIG = from_dict({"sync": {"num_fragments": 1, "num_shards": 1}})


def merged(merger, round, pushes, progress=0.0):
  """What the commit of these outer gradients says."""
  for m, each in enumerate(pushes):
    push = Push(m, 0, 0, round, round, 1, 1, round, 0, round, "f32", exact(each).payload)
    merger.take_in(push, 0.0)
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
  second[0] = first[0]  # something in common with the commit before
  for pushes in (first, second):
    for each in pushes:
      each[:-100] /= np.linalg.norm(each[:-100])
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
    norm = math.sqrt(passes.squares(total, share).sum())
    return total, np.ones(len(fragment.pieces), np.float32), norm

  monkeypatch.setattr(delta, "combine", combine)
  pushes, zeros = randoms(3, SIZE), np.zeros(SIZE, np.float32)
  found, median = merged(merger, 0, pushes), np.median(pushes, axis=0)
  expected = outer.update(zeros, zeros, median, CONFIG.outer)
  np.testing.assert_array_equal(merger.committed[0].value, expected)
  mean_norm = np.mean([np.linalg.norm(each) for each in pushes])
  assert found.length == pytest.approx(np.linalg.norm(median) / mean_norm, rel=1e-5)


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
  push = Push(0, 0, 0, 0, 0, 1, 1, 0, 0, 0, "f32", exact(bad).payload)
  assert not np.isfinite(merger.take_in(push, 0.0).norm)
