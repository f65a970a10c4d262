"""A value comes back from a learner just as its shard sent it, or not at all."""

from __future__ import annotations

import time

import numpy as np
import pytest

from ddiloco.checkpoint.buddy import Sealer
from ddiloco.core import codec
from ddiloco.core.delta import new_fragment
from ddiloco.protocol.actions import Tick
from ddiloco.protocol.messages import Publish, RequestValue, Value
from ddiloco.protocol.values import replace
from ddiloco.runtime import drive
from tests import says
from tests.roles.test_syncer import Shard, deltas

SECRET = b"of syncer-0"


class Sealing(Shard):
  """A shard with a key."""

  sealer = Sealer(SECRET, "run", "plan")


def seal(secret: bytes, run: str, plan: str, of: Value, value: np.ndarray) -> str:
  sealer = Sealer(secret, run, plan)
  return sealer.seal(of, codec.digest(value).hex())


def published(shard: Shard) -> dict[int, Publish]:
  """Of each fragment, what learner 0 was sent last."""
  found = {}
  send = shard.outbox.send

  def keep(to, message) -> int:
    if isinstance(message, Publish):
      found[message.fragment] = message
    return send(to, message)

  shard.outbox.send = keep
  shard.round(deltas(shard.plan, shard.learners, seed=1))
  return found


def value_of(publish: Publish, held: np.ndarray, learner: int = 0, **changes) -> Value:
  """What an honest learner returns, but for the changes."""
  header = replace(publish, payload=None, **changes)
  return Value(learner, 0, header, 0, 0, codec.encode(held, "f32"))


def reborn(shard: Shard) -> Shard:
  """The shard after it and all copies of its fragments are gone."""
  store = {f.index: new_fragment(f, np.zeros(f.size, np.float32)) for f in shard.plan.fragments}
  again = Sealing(len(shard.learners), store=store, incarnation=1)
  again.outbox.sent.clear()
  return again


@pytest.fixture
def lost():
  """(a reborn shard that has asked learner 0 for fragment 0, its publish, what learner 0 holds)."""
  before = Sealing(2)
  sent = published(before)[0]
  held = before.held[0][0][1]
  again = reborn(before)
  again.hear(says.report(0, 0, 9, 0.1, (sent.version, 0), (1, 1), rounds=(sent.round, -1)))
  assert [m.fragment for _, m in again.outbox.take(RequestValue)] == [0]
  return again, sent, held


def test_what_the_shard_has_made_is_taken_back_bit_by_bit(lost):
  again, sent, held = lost
  again.hear(value_of(sent, held))
  assert again.store[0].value.tobytes() == held.tobytes()
  assert again.store[0].state.last_round == sent.round


@pytest.mark.parametrize(
  "changes",
  [
    {"version": 99},
    {"merged_tokens": 10**12},
    {"merged_rounds": {0: 0}},
    {"seal": ""},
    {"seal": "00" * 32},
  ],
  ids=str,
)
def test_nothing_else_that_is_said_of_it_is_believed(lost, changes):
  again, sent, held = lost
  again.hear(value_of(sent, held, **changes))
  assert again.store[0].state.version == 0
  [ignored] = [e for e in again.events if e.kind == "ignored"]
  assert ignored.reason == "is no value of this shard: its seal does not fit"
  again.hear(value_of(sent, held))
  assert again.store[0].state.version == sent.version, "the true one still counts"


def test_a_value_that_is_too_short_is_refused_before_its_seal_is_read(lost):
  again, sent, held = lost
  again.hear(value_of(sent, held[:-1]))
  [ignored] = [e for e in again.events if e.kind == "ignored"]
  assert "must be uint8" in ignored.reason and again.store[0].state.version == 0


def test_a_shard_without_a_key_believes_a_value_without_a_seal(lost):
  again, sent, held = lost
  again.syncer._sealer = None
  again.hear(value_of(sent, held, seal=""))
  assert again.store[0].state.version == sent.version


def test_weights_of_a_learners_choice_are_refused(lost):
  again, sent, held = lost
  changed = held.copy()
  changed[-1] = np.nextafter(changed[-1], 2)  # by one bit
  again.hear(value_of(sent, changed))
  assert again.store[0].state.version == 0


def test_a_value_that_another_key_has_sealed_is_refused(lost):
  again, sent, held = lost
  again.hear(value_of(sent, held, seal=seal(b"mine", "run", "plan", sent, held)))
  assert again.store[0].state.version == 0


def test_a_seal_is_of_one_run_and_one_fragment():
  value = np.arange(6, dtype=np.float32)
  of = says.publish(0, 0, 0, 0, 7, 3, -1, 9, 90, (0, 7), "")
  one = seal(SECRET, "run", "plan", of, value)
  assert one == seal(SECRET, "run", "plan", of, value.copy())
  others = [
    seal(SECRET, "another", "plan", of, value),
    seal(SECRET, "run", "another", of, value),
    seal(SECRET, "run", "plan", replace(of, fragment=1), value),
    seal(SECRET, "run", "plan", replace(of, round=8), value),
    seal(SECRET, "run", "plan", of, -value),
  ]
  assert len({one, *others}) == 6


def test_without_keys_nothing_is_sealed():
  assert {p.seal for p in published(Shard(2)).values()} == {""}


def test_a_flood_of_what_is_ignored_is_a_line_a_second(monkeypatch):
  shard, now = Shard(1), 1_000.0
  monkeypatch.setattr(time, "monotonic", lambda: now)
  for _ in range(500):
    now += 0.01
    drive(shard.syncer.take(says.report(0, 0, 9, 0.1, (), ()), now), shard.outbox, 0.0)
  shard.handle(Tick(now))
  said = [e for e in shard.events if e.kind == "ignored"]
  assert 4 <= len(said) <= 6
  assert sum(e.times for e in said) >= 400
