"""Batches of the user's own: what a learner reads is a function of the position alone."""

import dataclasses
import sys
import threading
import time
import types
from contextlib import closing, suppress

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from flax import nnx

from ddiloco.checks import lasts
from ddiloco.cli import main
from ddiloco.config import Config, ConfigError, from_dict
from ddiloco.engines import session
from ddiloco.environment import LOST
from ddiloco.models.model import NnxModel
from ddiloco.training import data, evaluate

NAME = "own_parts_of_test_data_custom"


class Mean(NnxModel):
  """Learns the mean of numbers."""

  def __init__(self):
    super().__init__(lambda rngs: nnx.Linear(1, 1, rngs=rngs))

  def inputs(self, batch_size, sequence_length):
    return {"x": jax.ShapeDtypeStruct((batch_size, 1), jnp.float32)}

  def loss(self, params, batch, execution=None):
    loss = jnp.mean((self.module(params)(batch["x"]) - batch["x"]) ** 2)
    return loss, {"loss": loss}

  def evaluate(self, params, batch):
    return self.loss(params, batch)[1]


def rows(learner: int, position: int) -> dict[str, np.ndarray]:
  return {"x": np.full((2, 1), 1000 * learner + position, np.float32)}


class Numbers:
  """A source whose batches say whose they are and which; `kind` is what gives them."""

  def __init__(self, kind: str):
    self.kind = kind

  def batches(self, config, learner):
    if self.kind == "no folder":
      raise FileNotFoundError("wine/")
    if self.kind == "away":
      raise ConnectionError("the storage is away")
    numbers = grain.MapDataset.range(50).map(lambda i: rows(learner, i))
    if self.kind == "map":
      return numbers.repeat(2)
    if self.kind in ("ending", "ends"):
      return numbers.to_iter_dataset() if self.kind == "ending" else [rows(learner, 0)] * 50
    if self.kind == "iter":
      return numbers.to_iter_dataset()
    if self.kind == "ahead":  # by a thread of its own
      return grain.experimental.ThreadPrefetchIterDataset(
        numbers.to_iter_dataset(), prefetch_buffer_size=2
      )
    if self.kind == "filter":  # Grain cannot jump in it
      return numbers.to_iter_dataset().filter(lambda batch: batch["x"][0, 0] % 2 == 0)
    if self.kind in ("sparse", "one worker"):  # where it would jump to a wrong place
      even = numbers.filter(lambda batch: batch["x"][0, 0] % 2 == 0).to_iter_dataset()
      parts = [even]  # as `mp_prefetch` of one worker has them
      inside = grain.experimental.InterleaveIterDataset(parts, cycle_length=1)
      return even.map(lambda batch: batch) if self.kind == "sparse" else inside
    if self.kind == "flaky":
      return numbers.to_iter_dataset().map(FailsOnce(1003)).filter(lambda batch: True)
    return types.SimpleNamespace(**ODD) if self.kind == "odd" else Indexed(self.kind, learner)

  def heldout_batches(self, batch_size):
    if self.kind == "no part":
      raise KeyError("test")
    if self.kind == "filled":
      return self.refilled()
    if self.kind == "index":  # it has any position, as what `batches` gives
      return Indexed(self.kind, 9)
    if self.kind == "away":
      raise ConnectionError("the storage is away")
    held = [{"y": rows(9, 0)["x"]}] if self.kind == "unlike" else [rows(9, 0)]
    return iter(held if self.kind != "none" else [])

  def refilled(self):
    batch = rows(9, 0)
    for number in range(3):
      batch["x"][:] = number
      yield batch


class Indexed:
  def __init__(self, kind: str, learner: int):
    self.kind, self.learner, self.reads = kind, learner, 0
    self.own = rows(0, 0)["x"]

  def __getitem__(self, position):
    self.reads += 1
    if self.kind == "no file":
      raise FileNotFoundError("wine/0")
    if self.kind == "mute":
      raise TimeoutError("the storage is away")
    if self.kind == "filled":
      self.own[:] = rows(self.learner, position)["x"]
      return {"x": self.own}
    if self.kind == "wrong":
      return [0][position + 1]
    batch = rows(self.learner, position + (self.reads if self.kind == "moving" else 0))
    if self.kind == "missing":
      batch["x"][0] = np.nan
    if self.kind == "ragged" and position == 7:
      return {"x": batch["x"][:1]}
    return {"wide": batch["x"]} if self.kind == "named" else batch


class FailsOnce:
  """Passes batches on, but raises when it first sees this number."""

  def __init__(self, number: int):
    self.numbers = [number]

  def __call__(self, batch):
    if number(batch) in self.numbers:
      self.numbers.clear()
      raise OSError("the storage does not answer")
    return batch


ODD = {"no": "positions"}


@pytest.fixture(autouse=True)
def parts(monkeypatch):
  """The parts in a module of their own, as a user's are."""
  module = types.ModuleType(NAME)
  module.model = lambda config: Mean()
  module.data = lambda config: Numbers(config.options["kind"])
  monkeypatch.setitem(sys.modules, NAME, module)


def config_of(kind: str) -> Config:
  return from_dict(
    {
      "model": {"custom": f"{NAME}:model"},
      "data": {"custom": f"{NAME}:data", "options": {"kind": kind}, "sequence_length": 1},
      "islands": {"num_learners": 2, "batch_size": 2},
    }
  )


def stream(kind: str, learner: int = 1) -> data.Stream:
  config = config_of(kind)
  return data.Stream(data.open_data(config.data), config, learner)


def number(batch) -> int:
  return int(batch["x"][0, 0])


@pytest.mark.parametrize(
  ("kind", "step"),
  [("index", 1), ("map", 1), ("iter", 1), ("filter", 2), ("sparse", 2), ("one worker", 2)],
)
def test_every_position_gives_its_batch_however_it_is_come_to(kind, step):
  one = stream(kind, learner=1)
  first = 1000
  for position in (0, 1, 2, 7, 3):
    assert number(one.batch(position)) == first + step * position
  with closing(one.iterate(4)) as ahead, closing(one.iterate(2)) as behind:
    read = [(number(next(ahead)), number(next(behind))) for _ in range(3)]
  assert read == [(first + step * (4 + i), first + step * (2 + i)) for i in range(3)]
  for position in range(5):
    with closing(one.iterate(position)) as restored:
      assert number(next(restored)) == first + step * position


def test_grain_may_start_processes_in_a_program_without_flags_of_absl():
  """It refused `mp_prefetch`: it looks at flags of its own, which such a program never parses."""
  flags.FLAGS.unparse_flags()
  try:
    stream("iter")
    assert flags.FLAGS.is_parsed()
  finally:
    flags.FLAGS.mark_as_parsed()


def test_what_a_pipeline_starts_ends_with_its_reader():
  """The thread or the processes that read batch 0 for the check lived as long as the run."""
  before = set(threading.enumerate())

  def nothing_is_left() -> bool:
    started = set(threading.enumerate()) - before
    for thread in started:
      thread.join(10)
    return not any(thread.is_alive() for thread in started)

  one = stream("ahead")
  assert nothing_is_left()
  for _ in range(2):
    with closing(one.iterate(3)) as ahead:
      assert number(next(ahead)) == 1003
      assert any("grain-thread-prefetch" in thread.name for thread in threading.enumerate())
    del ahead
    assert nothing_is_left()


def test_a_source_may_fill_the_same_arrays_again():
  """Batches that are read ahead keep their values."""
  one = stream("filled", learner=1)
  with closing(one.iterate()) as ahead:
    first = next(ahead)
    time.sleep(0.2)  # the queue of those ahead is full by now
    assert [number(first), *(number(next(ahead)) for _ in range(5))] == list(range(1000, 1006))


def test_a_source_is_read_by_one_thread_also_where_token_files_are_named():
  """Token files are read by several."""
  readers = set()

  class Seen(Indexed):
    def __getitem__(self, position):
      readers.add(threading.get_ident())
      return super().__getitem__(position)

  source = types.SimpleNamespace(batches=lambda config, learner: Seen("index", learner))
  config = config_of("index")
  named = dataclasses.replace(config.data, source="tokens", path="*.bin")
  one = data.Stream(source, dataclasses.replace(config, data=named), 1)
  readers.clear()
  with closing(one.iterate()) as ahead:
    assert [number(next(ahead)) for _ in range(20)] == [*range(1000, 1020)]
  assert len(readers) == 1


@pytest.mark.parametrize("kind", ["ending", "ends"])
def test_batches_that_end_are_refused_where_they_do(kind):
  one = stream(kind)
  with closing(one.iterate(49)) as ahead:
    next(ahead)
    with pytest.raises(ConfigError, match=r"data.custom = .*position 50 \(.*\). Fix: make it"):
      next(ahead)
  with pytest.raises(ConfigError, match="ends before position 90"):
    one.batch(90)


@pytest.mark.parametrize(("odd", "found"), [(256, 256), (-1, 2**32 - 1)])
def test_every_token_of_an_own_source_is_in_the_vocabulary_of_the_package_s_model(odd, found):
  """The loss was NaN from then on, and nothing said why."""
  batches = [np.zeros((2, 9), np.int32), np.full((2, 9), odd, np.int32)]
  config = config_of("index")
  section = dataclasses.replace(config.data, sequence_length=8)
  config = dataclasses.replace(config, data=section, model=Config().model)
  one = data.Stream(types.SimpleNamespace(batches=lambda config, learner: batches), config, 0)
  with pytest.raises(ConfigError, match=f"model.vocab_size = 256: .* a {found} in batch 1 of "):
    one.batch(1)


def test_an_array_of_jax_ends_too():
  """JAX gave its last batch for every later position, and the run trained on that alone."""
  batches, takes = jnp.arange(3.0).reshape(3, 1, 1), jax.ShapeDtypeStruct((1, 1), jnp.float32)
  checked = data._checked(batches, config_of("index").data, takes)
  assert checked[2] == 2
  with pytest.raises(ConfigError, match="ends before position 3"):
    checked[3]


def test_a_source_that_raised_is_asked_again_for_the_same_batch():
  """The batches that it had passed before it raised were counted twice."""
  one = stream("flaky", learner=1)
  with pytest.raises(OSError, match="does not answer"):
    one.batch(5)
  assert [number(one.batch(position)) for position in (5, 6, 2)] == [1005, 1006, 1002]


@pytest.mark.parametrize("error", [OSError("away"), NotImplementedError()])
def test_a_jump_that_fails_half_way_leaves_no_wrong_batch(monkeypatch, error):
  reader = data._Reader(grain.MapDataset.range(50).to_iter_dataset())
  jump = data.grain_experimental.set_next_index

  def half_way(iterator, position):
    jump(iterator, position + 7)
    raise error

  with monkeypatch.context() as patch:
    patch.setattr(data.grain_experimental, "set_next_index", half_way)
    with suppress(OSError):
      assert reader[20] == 20
  assert [reader[position] for position in (0, 21, 3)] == [0, 21, 3]


def test_missing_values_are_the_same_when_they_are_read_again():
  """A batch with NaN was refused as one that is no function of the position."""
  assert np.isnan(stream("missing").batch(0)["x"][0, 0])


def test_an_error_of_the_source_itself_is_named():
  with pytest.raises(ConfigError, match=r"position 0 .*IndexError.*list index out of range"):
    stream("wrong")


def test_learners_read_their_own():
  assert [number(stream("index", m).batch(3)) for m in range(4)] == [3, 1003, 2003, 3003]


@pytest.mark.parametrize(
  ("kind", "rule"),
  [
    ("odd", "batches() gives a SimpleNamespace, which has no batches by position"),
    ("named", "batch 0 has {'wide': 'float32 (2, 1)'}, the model takes {'x': 'float32 (2, 1)'}"),
    ("no folder", f"batches() fails at {__file__}, line "),
    ("no file", f"reading batch 0 fails at {__file__}, line "),
    ("moving", "batch 0 is another one when it is read again (learner=1)"),
  ],
)
def test_what_does_not_fit_is_refused_when_it_is_opened(kind, rule):
  with pytest.raises(ConfigError) as caught:
    stream(kind)
  said = str(caught.value)
  assert said.startswith(f"data.custom = '{NAME}:data': ") and rule in said
  assert said.count("Fix: ") == 1


def test_every_batch_must_fit_the_model():
  with closing(stream("ragged").iterate(6)) as ahead:
    next(ahead)
    with pytest.raises(ConfigError, match=r"batch 7 has .*\(1, 1\).*the model takes .*\(2, 1\)"):
      next(ahead)


def test_a_storage_that_does_not_answer_is_no_error_of_the_config():
  """A learner that was started again just then was given up for good."""
  config = config_of("away")
  reading = (
    lambda: stream("away"),
    lambda: stream("mute"),
    lambda: session.evaluator(config, data.open_data(config.data)),
  )
  for read in reading:
    with pytest.raises(ConfigError, match=r"data.custom = .*is away.*Fix: .*start again") as caught:
      read()
    assert not lasts(caught.value)


def test_a_storage_that_does_not_answer_is_said_in_words(tmp_path, capsys):
  """A traceback was all that `ddiloco train` said."""
  (tmp_path / "config.json").write_text(config_of("mute").to_json())
  flags = ["--workdir", str(tmp_path / "run"), "--cpu", "--config.sync.num_fragments=2"]
  assert main(["train", f"--config={tmp_path / 'config.json'}", *flags]) == LOST
  assert "data.custom = " in capsys.readouterr().err


@pytest.mark.parametrize(
  ("kind", "rule"),
  [
    ("none", "heldout_batches() = []: there must be at least one batch"),
    ("no part", f"heldout_batches() fails at {__file__}, line "),
    ("unlike", "the model's evaluate() of what heldout_batches() gives fails at"),
  ],
)
def test_held_out_batches_that_the_model_does_not_take_are_refused_before_the_run(kind, rule):
  config = config_of(kind)
  with pytest.raises(ConfigError) as caught:
    session.evaluator(config, data.open_data(config.data))
  said = str(caught.value)
  assert said.startswith((f"data.custom = '{NAME}:data': ", "heldout_batches()"))
  assert rule in said and "Fix: " in said


def test_held_out_batches_without_an_end_are_refused(monkeypatch):
  """They were read until the memory was full."""
  monkeypatch.setattr(evaluate, "_MOST_BATCHES", 50)
  config = config_of("index")
  with pytest.raises(ConfigError, match=r"more than 50 batches.*Fix: end it"):
    session.evaluator(config, data.open_data(config.data))


def test_a_source_may_fill_the_same_held_out_arrays_again():
  """All batches were the last one."""
  config = config_of("filled")
  found = evaluate.read_heldout(config, data.open_data(config.data), 2)
  assert [number(batch) for batch in found] == [0, 1, 2]


def test_held_out_batches_may_come_from_an_iterator():
  config = config_of("map")
  params = {"kernel": np.ones((1, 1), np.float32), "bias": np.zeros(1, np.float32)}
  assert session.evaluator(config, data.open_data(config.data)).loss(params) == 0.0
