"""The evaluator at work: what it measures and when, and that it saves the final model only."""

from __future__ import annotations

import itertools
import threading
import weakref

import numpy as np
import pytest

from ddiloco.config import from_dict
from ddiloco.core import codec
from ddiloco.protocol.messages import Goodbye, Report
from ddiloco.roles import initial
from ddiloco.roles.evaluator import Evaluator
from ddiloco.runtime import Runtime
from tests import says
from tests.roles import toy
from tests.roles.test_learner_exchange import Wire
from tests.waits import PATIENCE_SECONDS, wait_for

TOKENS = 100


class Watched:
  """An evaluator of a run of `TOKENS` tokens, with the messages a shard would send it."""

  def __init__(self, measure=lambda params: {"loss": 0.5}, save=None, evaluations=2):
    sync = {"num_shards": 1, "num_fragments": 2}
    run = {"total_tokens": TOKENS, "evaluations": evaluations}
    self.config = from_dict({"sync": sync, "model": {"num_layers": 1}, "run": run})
    self.plan, self.wire = initial.make_plan(self.config), Wire()
    self.events, self.saved = [], []
    runtime = Runtime(self.config, self.plan, self.wire, toy.ListRecorder(self.events))
    save = save or (lambda params, tokens: self.saved.append(tokens))
    self.role = Evaluator(measure, runtime, save=save)
    self.wire.inbox.append(says.welcome(0, 0, 0, 0, (0, 1)))

  def publish(self, version: int, merged_tokens: int, *fragments) -> None:
    for f in fragments or self.plan.fragments:
      payload = codec.encode(np.full(f.size, version, np.float32), "f32")
      tokens = 9, merged_tokens, ()
      which = f.index, version - 1, version, -1
      self.wire.inbox.append(says.publish(0, 0, 0, *which, *tokens, "f32", payload))

  def of(self, kind: str) -> list:
    return [e for e in self.events if e.kind == kind]


def test_the_end_is_saved_before_it_is_measured():
  order = []

  def measure(params):
    order.append(("measured", float(params["embedding"].max())))
    return {"loss": 0.5, "other": 2.0}

  watched = Watched(measure, save=lambda params, tokens: order.append("saved"))
  watched.publish(0, 0)
  watched.publish(1, TOKENS)
  watched.role.run(lambda: False)
  assert order[-2:] == ["saved", ("measured", 1.0)] and order.count("saved") == 1
  assert watched.role.saved and watched.role.final_loss == 0.5
  last = watched.of("evaluation")[-1]
  assert (last.merged_tokens, last.loss, last.measures) == (TOKENS, 0.5, {"other": 2.0})
  assert not watched.of("unevaluated"), "nothing is measured before the whole model is here"


@pytest.mark.parametrize(
  "evaluations, at", [(0, []), (1, [0, 100]), (2, [0, 60, 100]), (4, [0, 40, 60, 100])]
)
def test_it_measures_as_often_as_it_is_to_and_the_end_after_what_is_under_way(evaluations, at):
  begun, running = [], lambda: [t for t in threading.enumerate() if t.name.startswith("measur")]

  def measure(params):
    begun.append(params["embedding"].max())
    if begun[-1] == 2.0:  # the version of 60 tokens
      wait_for(lambda: watched.saved)
    return {"loss": 0.5}

  watched = Watched(measure, evaluations=evaluations)
  versions = lambda: {f.version for f in watched.role.exchange.state.fragments}
  run = threading.Thread(target=watched.role.run, args=(lambda: False,), daemon=True)
  run.start()
  for version, tokens in enumerate((0, 40, 60, 70, TOKENS)):
    watched.publish(version, tokens)
    wait_for(lambda n=version: versions() == {n})
    wait_for(lambda n=tokens: len(begun) >= sum(each <= n for each in at[:-1]))
    wait_for(lambda n=version: n >= 2 or not running())
  run.join(60)
  assert watched.saved == [TOKENS] and [e.merged_tokens for e in watched.of("evaluation")] == at


def test_a_part_of_the_run_is_measured_once():
  """Ten tokens of 100 begin the fourth of 30 parts, of which three are longer in floating point."""
  watched, turns = Watched(evaluations=30), itertools.count()
  watched.publish(0, 10)

  def stopped():
    for thread in threading.enumerate():
      if thread.name.startswith("measur"):
        thread.join(60)
    return watched.of("evaluation") and next(turns) == 3

  watched.role.run(stopped)
  assert [e.merged_tokens for e in watched.of("evaluation")] == [10]


def test_it_reports_while_it_saves_the_end_and_leaves_when_that_is_saved():
  """Its shards ended before it had the result on disk: if that failed, no role had the model."""
  seen = []

  def save(params, tokens):
    wire, before = watched.wire, len(watched.wire.sent)
    wait_for(lambda: len(wire.sent) >= before + 2)
    seen.extend(wire.sent)

  watched = Watched(save=save)
  watched.publish(0, 0)
  watched.publish(1, TOKENS)
  watched.role.run(lambda: False)
  assert watched.role.saved and len(seen) >= 2 and isinstance(seen[-1], Report)
  assert not any(isinstance(m, Goodbye) for m in seen)
  assert any(isinstance(m, Goodbye) for m in watched.wire.sent)
  assert [e.reason for e in watched.of("stopped")] == [f"{TOKENS} tokens are merged"]


@pytest.mark.parametrize("joins", [False, True])
def test_a_run_that_is_stopped_has_no_final_model_and_its_shards_keep_theirs(joins):
  """An evaluator that was ended said goodbye: if all was merged before it was back, its shards had
  left, and the model with them."""
  watched = Watched()
  if joins:
    watched.publish(0, 0)
    watched.publish(1, TOKENS - 1)
  state = lambda: watched.role.exchange.state
  watched.role.run(lambda: not watched.wire.inbox and state().joined == joins)
  assert state().joined == joins and not watched.role.finished
  assert not watched.saved and not watched.role.saved
  assert not any(isinstance(m, Goodbye) for m in watched.wire.sent)


def test_a_stopped_evaluator_waits_for_no_measurement_but_the_end_of_a_program_does():
  """JAX aborts a program that ends while a daemon computes: status 134."""
  begun, go_on = threading.Event(), threading.Event()

  def measure(params):
    begun.set()
    go_on.wait(60)
    return {"loss": 0.5}

  watched = Watched(measure)
  watched.publish(0, 0)
  run = threading.Thread(target=watched.role.run, args=(begun.is_set,), daemon=True)
  run.start()  # a daemon, as in the engines
  run.join(60)
  (thread,) = [each for each in threading.enumerate() if each.name.startswith("measur")]
  assert not thread.daemon and not watched.of("evaluation")
  go_on.set()
  thread.join(60)
  assert [each.loss for each in watched.of("evaluation")] == [0.5]


@pytest.mark.parametrize("slow", [0, 1])
def test_an_evaluator_that_is_stopped_while_it_measures_at_the_end_has_saved_it_and_ends(slow):
  """SIGTERM was not heard: systemd killed it after its 90 s, and the run had no report."""
  begun, go_on, stop = list[float](), threading.Event(), threading.Event()

  def measure(params):
    begun.append(params["embedding"].max())
    if begun[-1] == slow:
      go_on.wait(2 * PATIENCE_SECONDS)
    return {"loss": 0.5}

  watched = Watched(measure)
  run = threading.Thread(target=watched.role.run, args=(stop.is_set,), daemon=True)
  run.start()
  for version, tokens in enumerate((0, TOKENS)):
    watched.publish(version, tokens)
    wait_for(lambda n=min(version, slow): n in begun)
  wait_for(lambda: any(isinstance(m, Goodbye) for m in watched.wire.sent))
  stop.set()
  run.join(PATIENCE_SECONDS)
  assert not run.is_alive() and watched.saved == [TOKENS] and watched.role.final_loss is None
  go_on.set()
  for thread in threading.enumerate():
    if thread.name.startswith("measur"):
      thread.join(PATIENCE_SECONDS)
  assert begun == [0, 1][: slow + 1], "it has begun no further one"


def test_one_measurement_at_a_time():
  """Each has a model of its own in memory."""
  begun, go_on, losses = [], threading.Event(), iter((0.5, 0.4))

  def measure(params):
    begun.append(params)
    assert go_on.wait(60)
    return {"loss": next(losses)}

  watched = Watched(measure)
  watched.publish(0, 0)
  ended = lambda: len(watched.of("evaluation")) == 2
  versions = lambda: {f.version for f in watched.role.exchange.state.fragments}
  run = threading.Thread(target=watched.role.run, args=(ended,), daemon=True)
  run.start()
  wait_for(lambda: begun)
  for version in (1, 2):  # once the second one is here, it has looked at the first one
    watched.publish(version, 60)
    wait_for(lambda n=version: versions() == {n})
  assert len(begun) == 1
  go_on.set()
  run.join(60)
  seen = [(e.merged_tokens, e.global_step) for e in watched.of("evaluation")]
  assert seen == [(0, 0), (60, 9)], "no step is in the first one"
  assert watched.role.final_loss is None, "it never had the final model"


def test_a_measurement_keeps_no_values_that_newer_ones_have_replaced():
  """On a CPU one may last for many versions, and so long there was a second model in memory."""
  begun, go_on = threading.Event(), threading.Event()

  def measure(params):
    taken = dict(params)
    assert len(taken) == len(params) and all((each == 0).all() for each in taken.values())
    begun.set()
    go_on.wait(PATIENCE_SECONDS)
    return {"loss": 0.5}

  watched = Watched(measure)
  watched.publish(0, 0)
  run = threading.Thread(target=watched.role.run, args=(go_on.is_set,), daemon=True)
  run.start()
  wait_for(begun.is_set)
  old = [weakref.ref(each) for each in watched.role.store.values.values()]
  watched.publish(1, 60)
  wait_for(lambda: all((each == 1).all() for each in watched.role.store.values.values()))
  kept = sum(each() is not None for each in old)
  go_on.set()
  run.join(60)
  assert not kept


def test_a_model_that_is_trained_in_part_is_not_the_untrained_one():
  watched = Watched()
  first, last = watched.plan.fragments
  watched.publish(0, 0, first)
  watched.publish(1, 40, last)
  watched.role.run(lambda: watched.of("evaluation"))
  assert [e.global_step for e in watched.of("evaluation")] == [9]


def test_a_result_that_cannot_be_saved_or_measured_ends_nothing(capsys):
  def fails(params, tokens=0):
    raise OSError("no space left on device")

  watched = Watched(fails, save=fails)
  watched.publish(0, 0)
  watched.publish(1, TOKENS)
  watched.role.run(lambda: False)
  assert not watched.role.saved and not watched.of("evaluation")
  assert not any(isinstance(m, Goodbye) for m in watched.wire.sent), "the shards keep the model"
  assert watched.of("unevaluated")[-1].reason == "OSError: no space left on device"
  said = capsys.readouterr().err
  assert "the result is not saved before it is measured: no space left" in said
  assert f"the held-out loss at {TOKENS} merged tokens is missing: OSError: no space" in said
