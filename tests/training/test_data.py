"""Windows, the held-out split, disjoint streams, restoring, and every error."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import math
import os
import pathlib
import re
import tempfile
import threading
import time
import tracemalloc

import grain
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ddiloco.checks import lasts
from ddiloco.config import Config, ConfigError, DataConfig, IslandsConfig, ModelConfig
from ddiloco.training import data as data_lib
from ddiloco.training.tokens import TokenFile


def make_config(tmp_path, *, length=8, learners=3, batch_size=2, seed=0, **overrides) -> Config:
  """A config whose corpus is the numbers 0, 1, 2, ..., so that a token is its own address."""
  num_tokens = overrides.pop("num_tokens", 5_000)
  data = DataConfig(
    source="tokens",
    path=str(tmp_path / "*.bin"),
    token_dtype=overrides.pop("token_dtype", "uint16"),
    sequence_length=length,
    heldout_sequences=overrides.pop("heldout_sequences", 4),
    heldout_share=overrides.pop("heldout_share", 0.1),
  )
  if not list(tmp_path.glob("*.bin")):
    np.arange(num_tokens, dtype=data.token_dtype).tofile(tmp_path / "a.bin")
  return Config(
    seed=seed,
    data=data,
    model=ModelConfig(vocab_size=overrides.pop("vocab_size", 70_000)),
    islands=IslandsConfig(num_learners=learners, batch_size=batch_size, **overrides),
  )


def open_streams(config: Config, *learners: int) -> list[data_lib.Stream]:
  corpus = data_lib.open_corpus(config.data)
  return [data_lib.Stream(corpus, config, m) for m in learners]


def epoch_starts(
  config: Config, corpus: data_lib.Corpus, learner: int, epoch: int = 0
) -> list[int]:
  """First tokens (= addresses) of all windows one learner reads in one epoch, in order."""
  config = dataclasses.replace(
    config, islands=dataclasses.replace(config.islands, batch_size=1, overrides={})
  )
  stream = data_lib.Stream(corpus, config, learner)
  size = len(
    range(learner % config.islands.num_learners, len(corpus.train), config.islands.num_learners)
  )
  return [int(stream.batch(epoch * size + i)[0, 0]) for i in range(size)]


def test_windows_by_hand(tmp_path):
  # 81 tokens, T = 2: 40 windows; 0.1 of them is 4, so blocks have the minimum of 4 windows and
  # there are 10; floor(0.1 b) first grows at the last one, whose outer windows are guards.
  config = make_config(tmp_path, length=2, num_tokens=81, heldout_sequences=2)
  corpus = data_lib.open_corpus(config.data)
  assert len(corpus.parts[0]) == 81
  assert len(corpus.train) == 36 and len(corpus.heldout) == 2
  np.testing.assert_array_equal(corpus.train.read([0, 1, 35]), [[0, 1, 2], [2, 3, 4], [70, 71, 72]])
  np.testing.assert_array_equal(corpus.heldout.read([0, 1]), [[74, 75, 76], [76, 77, 78]])
  assert corpus.train.read([0]).dtype == np.int32


@settings(max_examples=60)
@given(
  lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=4),
  length=st.integers(1, 20),
  share=st.floats(0.02, 0.95),
)
def test_heldout_tokens_are_never_trained_on(lengths, length, share):
  """Token-exact, for any files, T and share, by giving every token its own number."""
  edges = np.cumsum([0, *lengths])
  parts = tuple(np.arange(a, b, dtype=np.uint32) for a, b in itertools.pairwise(edges))
  data = DataConfig(
    source="tokens", path="x", sequence_length=length, heldout_share=share, heldout_sequences=1
  )
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(data_lib, "read_parts", lambda *_: parts)
    try:
      corpus = data_lib.open_corpus(data)
    except ConfigError:
      num_windows = sum((n - 1) // length for n in lengths)
      blocks = num_windows // data_lib._MIN_BLOCK_WINDOWS
      assert math.floor(blocks * share) == 0 or blocks <= math.floor(blocks * share)
      return
  train = corpus.train.read(range(len(corpus.train)))
  heldout = corpus.heldout.read(range(len(corpus.heldout)))
  assert not set(train.ravel().tolist()) & set(heldout.ravel().tolist())
  for windows in (train, heldout):
    assert (np.diff(windows, axis=1) == 1).all(), "a window must be contiguous"
    assert len(set(windows[:, 0].tolist())) == len(windows), "no window twice"
    owner = np.searchsorted(edges, windows, side="right")
    assert (owner == owner[:, :1]).all(), "a window never spans two files"


def listed_blocks(num_blocks: int, share: float) -> list[list[int]]:
  """The blocks held out, and the others with the unfinished one: the rule, block by block."""
  held = [math.floor((b + 1) * share) > math.floor(b * share) for b in range(num_blocks)]
  kept = [*(b for b in range(num_blocks) if not held[b]), num_blocks]
  return [[b for b in range(num_blocks) if held[b]], kept]


@given(st.integers(0, 300), st.floats(0.001, 0.99))
@example(300, 0.05)
def test_blocks_are_those_of_the_list(num_blocks, share):
  held = math.floor(num_blocks * share)
  for held_out, count in ((True, held), (False, num_blocks - held + 1)):
    of_corpus = (), np.zeros(1, int), 2, 16, num_blocks, share
    windows = data_lib.Windows(*of_corpus, held_out, range(count), 0)
    found = windows._in_corpus(np.arange(len(windows.blocks)))
    assert found.tolist() == listed_blocks(num_blocks, share)[not held_out]


class Endless:
  """A part of so many tokens that no machine holds them: token i is i mod 251."""

  dtype = np.dtype(np.uint16)

  def __init__(self, length):
    self.length = length

  def __len__(self):
    return self.length

  def __getitem__(self, at):
    return (np.arange(*at.indices(self.length)) % 251).astype(self.dtype)


def test_a_corpus_of_trillions_of_tokens_takes_no_memory(monkeypatch):
  """With T = 128 a list of the blocks of two trillion tokens had 8 GB, in each process."""
  monkeypatch.setattr(data_lib, "read_parts", lambda *_: (Endless(2 * 10**12),))
  tracemalloc.start()
  corpus = data_lib.open_corpus(DataConfig(source="tokens", path="x", heldout_share=0.001))
  last = corpus.train.read([len(corpus.train) - 1])[0]
  held = np.concatenate(corpus.heldout_batches(8))
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert peak < 1 << 20
  windows = (2 * 10**12 - 1) // 128
  assert last[0] == (windows - 1) * 128 % 251, "its last window"
  assert len(held) == 64 and len(corpus.heldout) == windows // 16 // 1000 * 14


def test_heldout_split_is_spread_and_of_the_wanted_size(tmp_path):
  config = make_config(tmp_path, num_tokens=60_000, heldout_share=0.05)
  corpus = data_lib.open_corpus(config.data)
  starts = corpus.heldout.read(range(len(corpus.heldout)))[:, 0]
  for quarter in range(4):  # within a third of the even share everywhere
    inside = ((starts >= quarter * 15_000) & (starts < (quarter + 1) * 15_000)).sum()
    assert inside == pytest.approx(len(starts) / 4, rel=1 / 3)
  windows = 59_999 // 8
  assert len(corpus.train) / windows == pytest.approx(0.95, abs=0.01)
  assert len(corpus.heldout) / windows == pytest.approx(0.05 * 14 / 16, abs=0.005)


@pytest.mark.parametrize(
  ("count", "batch_size", "shape"),
  [(12, 8, (2, 6)), (12, 4, (3, 4)), (7, 4, (7, 1)), (6, 64, (1, 6))],
)
def test_heldout_batches_are_whole_and_independent_of_batch_size(
  tmp_path, count, batch_size, shape
):
  config = make_config(tmp_path, heldout_sequences=count)
  corpus = data_lib.open_corpus(config.data)
  batches = corpus.heldout_batches(batch_size)
  assert np.shape(batches) == (*shape, 9)
  everything = corpus.heldout_batches(1)
  np.testing.assert_array_equal(np.concatenate(batches), np.concatenate(everything))
  starts = np.concatenate(batches)[:, 0]
  assert len(set(starts.tolist())) == count
  assert starts[-1] - starts[0] > 5_000 * 0.6, "spread over the corpus"


@pytest.mark.parametrize("epoch", [0, 1, 3])
def test_streams_of_an_epoch_partition_the_training_windows(tmp_path, epoch):
  config = make_config(tmp_path, learners=4, num_tokens=3_000)
  corpus = data_lib.open_corpus(config.data)
  streams = [epoch_starts(config, corpus, m, epoch) for m in range(4)]
  together = [start for stream in streams for start in stream]
  assert len(together) == len(set(together)), "no window twice in one epoch"
  expected = corpus.train.read(range(len(corpus.train)))[:, 0]
  assert sorted(together) == sorted(expected.tolist())
  assert max(map(len, streams)) - min(map(len, streams)) <= 1


@settings(max_examples=25)
@given(
  lengths=st.lists(st.integers(1, 900), min_size=2, max_size=5),
  dtype=st.sampled_from(["uint16", "uint32"]),
  batches=st.lists(st.integers(1, 6), min_size=1, max_size=4),
  length=st.integers(1, 7),
)
def test_islands_of_any_batches_read_every_window_of_an_epoch_once(lengths, dtype, batches, length):
  """Of files of any length. With other batches some windows were read twice, and some not at all,
  by the time that the planned learners had made as many steps as an epoch has."""
  with tempfile.TemporaryDirectory() as folder:
    edges = np.cumsum([0, *lengths])
    for number, (begin, end) in enumerate(itertools.pairwise(edges)):
      np.arange(begin, end, dtype=dtype).tofile(f"{folder}/{number}.bin")
    config = make_config(
      pathlib.Path(folder),
      length=length,
      learners=len(batches),
      token_dtype=dtype,
      heldout_sequences=1,
      overrides={str(m): {"batch_size": size} for m, size in enumerate(batches)},
    )
    try:
      corpus = data_lib.open_corpus(config.data)
      streams = [data_lib.Stream(corpus, config, m) for m in range(len(batches))]
    except ConfigError:
      return  # too small
    steps, rest = divmod(len(corpus.train), sum(batches))
    read = [int(row[0]) for s in streams for step in range(steps) for row in s.batch(step)]
    every = corpus.train.read(range(len(corpus.train)))[:, 0].tolist()
    assert len(set(read)) == len(read) == len(every) - rest and set(read) <= set(every)
    more = [int(row[0]) for stream in streams for row in stream.batch(steps)]
    assert set(read) | set(more) == set(every), "the next step reads the rest"


def test_learners_beyond_the_number_have_batches_of_their_own(tmp_path):
  sizes = {"0": {"batch_size": 4}, "3": {"batch_size": 3}}
  config = make_config(tmp_path, learners=2, overrides=sizes)
  streams = open_streams(config, 0, 1, 2, 3)
  assert [len(stream.batch(0)) for stream in streams] == [4, 2, 2, 3]
  read = [int(row[0]) for stream in streams for step in range(30) for row in stream.batch(step)]
  assert len(set(read)) == len(read), "each began in another place"


def test_order_is_that_of_the_plain_grain_pipeline(tmp_path):
  """Batches must be exactly those of Grain's own shuffle -> slice -> batch."""
  config = make_config(tmp_path, learners=3, batch_size=2, num_tokens=2_000, seed=11)
  corpus = data_lib.open_corpus(config.data)
  for learner in range(3):
    stream = data_lib.Stream(corpus, config, learner)
    seed = data_lib._shuffle_seed(11, 0)
    plain = grain.MapDataset.range(len(corpus.train)).shuffle(seed)[learner::3].batch(2)
    for position in range(len(plain) - 1):
      expected = corpus.train.read(plain[position])
      np.testing.assert_array_equal(stream.batch(position), expected)


def test_shuffles_differ_by_epoch_and_seed(tmp_path):
  config = make_config(tmp_path, learners=2, num_tokens=3_000)
  corpus = data_lib.open_corpus(config.data)
  orders = [epoch_starts(config, corpus, 0, epoch) for epoch in range(3)]
  orders += [
    epoch_starts(dataclasses.replace(config, seed=seed), corpus, 0, epoch)
    for seed in (1, 2)
    for epoch in range(3)
  ]
  length = min(map(len, orders))
  assert len({tuple(order[:length]) for order in orders}) == len(orders)
  assert sorted(orders[0]) != orders[0]


def test_learners_beyond_the_number_read_what_nobody_has_read(tmp_path):
  """Eight learners where two were planned: together they cover an eighth of an epoch each, once."""
  config = make_config(tmp_path, learners=2, num_tokens=6_000)
  corpus = data_lib.open_corpus(config.data)
  orders = [epoch_starts(config, corpus, m) for m in range(8)]
  share = min(map(len, orders)) // 4
  read = [start for order in orders for start in order[:share]]
  assert share > 50 and len(set(read)) == len(read)
  for m in range(2, 8):
    first = orders[m % 2].index(orders[m][0])
    assert first == int(len(orders[m % 2]) * [0, 1 / 2, 1 / 4, 3 / 4][m // 2])
    assert orders[m][: len(orders[m]) - first] == orders[m % 2][first:], "the same stream, later"
  assert [data_lib._bisection(lap) for lap in range(7)] == [0, 0.5, 0.25, 0.75, 0.125, 0.625, 0.375]


def test_batches_are_deterministic_and_independent_of_access_order(tmp_path):
  config = make_config(tmp_path)
  (one,) = open_streams(config, 1)
  (other,) = open_streams(config, 1)
  forward = [one.batch(i) for i in range(20)]
  for i in np.random.default_rng(0).permutation(20):
    np.testing.assert_array_equal(other.batch(int(i)), forward[i])
  assert forward[0].shape == (2, 9) and forward[0].dtype == np.int32
  forward[0][:] = -1  # a batch belongs to its reader
  assert one.batch(0).min() >= 0


def test_restore_from_every_position(tmp_path):
  config = make_config(tmp_path, num_tokens=700, learners=2)  # about 1.5 epochs in 30 batches
  (stream,) = open_streams(config, 1)
  batches = [stream.batch(i) for i in range(30)]
  (fresh,) = open_streams(config, 1)
  for i in range(30):
    with contextlib.closing(fresh.iterate(i)) as iterator:
      rest = [next(iterator) for _ in range(30 - i)]
    np.testing.assert_array_equal(rest, batches[i:])


def test_streams_do_not_depend_on_each_other_or_on_timing(tmp_path):
  config = make_config(tmp_path)
  streams = open_streams(config, 0, 1, 2)
  expected = [[s.batch(i) for i in range(12)] for s in streams]
  iterators = [s.iterate() for s in streams]
  got: list[list[np.ndarray]] = [[], [], []]
  order = np.random.default_rng(1).permutation(np.repeat([0, 1, 2], 12))
  for m in order:  # learners interleave as they like
    got[m].append(next(iterators[m]))
  np.testing.assert_array_equal(got, expected)
  for iterator in iterators:
    iterator.close()


def test_close_stops_the_thread_and_the_iterator(tmp_path):
  config = make_config(tmp_path)
  (stream,) = open_streams(config, 0)
  before = set(threading.enumerate())
  iterator = stream.iterate()
  next(iterator)
  started = set(threading.enumerate()) - before
  assert started, "prefetches in the background"
  iterator.close()
  for thread in started:
    thread.join(timeout=10)
    assert not thread.is_alive()
  with pytest.raises(ValueError):
    next(iterator)
  iterator.close()  # twice is fine


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_token_files_stay_on_disk_and_windows_stay_inside_one(tmp_path, dtype):
  np.arange(0, 1000, dtype=dtype).tofile(tmp_path / "a.bin")
  np.arange(2000, 2005, dtype=dtype).tofile(tmp_path / "b.bin")  # too short for a window
  np.arange(3000, 4000, dtype=dtype).tofile(tmp_path / "c.bin")
  config = make_config(tmp_path, token_dtype=dtype)
  corpus = data_lib.open_corpus(config.data)
  assert sum(map(len, corpus.parts)) == 2005
  assert all(isinstance(part, TokenFile) for part in corpus.parts), "nothing is in memory"
  windows = corpus.train.read(range(len(corpus.train)))
  assert (np.diff(windows, axis=1) == 1).all()
  assert {int(w[0]) // 1000 for w in windows} == {0, 3}


def test_uint32_ids_survive(tmp_path):
  np.full(5_000, 69_999, np.uint32).tofile(tmp_path / "a.bin")
  (stream,) = open_streams(make_config(tmp_path, token_dtype="uint32"), 0)
  assert (stream.batch(0) == 69_999).all()


def test_as_many_windows_as_all_learners_read_at_once_are_enough(tmp_path):
  config = make_config(tmp_path, learners=3, batch_size=5)
  orders = [data_lib.reading_order(15, config, m, 5) for m in range(3)]
  for epoch in range(2):
    read = [order(5 * epoch + row) for order in orders for row in range(5)]
    assert sorted(read) == list(range(15))
  with pytest.raises(ConfigError, match="need 15 an epoch, and the data have 14"):
    data_lib.reading_order(14, config, 0, 5)


def test_of_too_many_windows_it_is_said_what_to_change(tmp_path):
  """10**13 tokens in rows of 2048: it was said to give more data."""
  np.full(5_000, 1, np.uint16).tofile(tmp_path / "a.bin")
  config = make_config(tmp_path)
  data_lib.reading_order(2**32, config, 0, 1)
  with pytest.raises(ConfigError, match=r"data.sequence_length = .*2\*\*32.*Fix: raise it"):
    data_lib.reading_order(2**32 + 1, config, 0, 1)


def test_more_than_2_to_the_32_tokens(tmp_path):
  """A sparse file: what was never written reads as zeros."""
  count, last = 2**32 + 12_345, np.arange(1, 9_000, dtype=np.uint16)
  with (tmp_path / "a.bin").open("wb") as file:
    file.seek(2 * (count - len(last)))
    file.write(last.tobytes())
  last.tofile(tmp_path / "b.bin")
  config = make_config(tmp_path, length=1024, heldout_share=0.001)
  corpus = data_lib.open_corpus(config.data)
  assert sum(map(len, corpus.parts)) == count + len(last)
  of_a, of_b = (count - 1) // 1024, (len(last) - 1) // 1024
  read = corpus.train.read(range(len(corpus.train) - of_b - 3, len(corpus.train)))
  first = count - len(last)
  for row, window in enumerate(range(of_a - 3, of_a)):
    begin = window * 1024 - first
    np.testing.assert_array_equal(read[row], last[begin : begin + 1025])
  np.testing.assert_array_equal(read[3:, 0], last[: of_b * 1024 : 1024])
  assert data_lib.Stream(corpus, config, 0).batch(10**6).shape == (2, 1025)


def test_windows_of_files_are_read_side_by_side(tmp_path, monkeypatch):
  """One after the other they are too slow where each takes a bucket's tenth of a second."""
  (stream,) = open_streams(make_config(tmp_path), 0)
  together, read = threading.Barrier(data_lib._READERS), TokenFile.__getitem__

  def meets(part, tokens):
    if threading.current_thread() is not threading.main_thread() and not together.broken:
      together.wait(30)
    return read(part, tokens)

  expected = [stream.batch(position) for position in range(3)]
  monkeypatch.setattr(TokenFile, "__getitem__", meets)
  with contextlib.closing(stream.iterate()) as ahead:
    found = [next(ahead) for _ in range(3)]
    assert not together.broken
    together.abort()
  np.testing.assert_array_equal(found, expected)


def test_a_host_reads_its_own_rows_alone(tmp_path, monkeypatch):
  config = make_config(tmp_path, batch_size=6)
  corpus, read = data_lib.open_corpus(config.data), []
  whole = data_lib.Stream(corpus, config, 1).batch(5)
  mine = data_lib.Stream(corpus, config, 1, rows=np.array([2, 3]))
  slices = TokenFile.__getitem__
  monkeypatch.setattr(
    TokenFile, "__getitem__", lambda part, tokens: read.append(tokens) or slices(part, tokens)
  )
  found = mine.batch(5)
  np.testing.assert_array_equal(found[2:4], whole[2:4])
  assert found.shape == whole.shape and not found[[0, 1, 4, 5]].any() and len(read) == 2


def test_fetching_is_cheap():
  config = Config()
  (stream,) = open_streams(config, 0)
  with contextlib.closing(stream.iterate()) as iterator:
    next(iterator)
    start = time.process_time()  # of all threads of this process: others may keep the machine busy
    for _ in range(300):
      next(iterator)
    usual_seconds = (time.process_time() - start) / 300
  print(f"{usual_seconds * 1e6:.0f} us a batch of 8 x 129 tokens")
  assert usual_seconds < 0.01  # measured 0.1 to 0.2 ms


# Errors: each names the field, the value, the rule and the fix.


def error_of(call, *args) -> str:
  with pytest.raises(ConfigError) as caught:
    call(*args)
  assert "Fix:" in str(caught.value)
  return str(caught.value)


def text_data(path, **fields) -> DataConfig:
  return DataConfig(source="text", path=str(path), **fields)


def test_empty_torn_and_unreadable_token_files(tmp_path):
  config = make_config(tmp_path)
  bad = tmp_path / "b.bin"
  bad.touch()
  text = error_of(data_lib.open_corpus, config.data)
  assert "b.bin" in text and "has 0 bytes" in text
  bad.write_bytes(b"abc")
  text = error_of(data_lib.open_corpus, config.data)
  assert "b.bin" in text and "3 bytes" in text and "data.token_dtype" in text
  bad.unlink()
  bad.symlink_to(tmp_path / "nowhere")
  text = error_of(data_lib.open_corpus, config.data)
  assert "b.bin" in text and "cannot be read" in text


def test_ids_of_another_width_and_files_with_a_header(tmp_path):
  """They were trained on: every second token was 0."""
  ids, config = np.arange(1, 5_000), make_config(tmp_path)
  for dtype in ("uint32", "int64"):
    ids.astype(dtype).tofile(tmp_path / "a.bin")
    text = error_of(open_streams, config, 0)
    assert "data.token_dtype = 'uint16'" in text and "a.bin is 0" in text
  with (tmp_path / "a.bin").open("wb") as file:
    np.save(file, ids.astype(np.uint16))
  text = error_of(open_streams, config, 0)
  assert "data.path = " in text and "a.bin" in text and "the header of a NumPy file" in text
  ids[1:100:2] = 0  # an id like others
  ids.astype(np.uint16).tofile(tmp_path / "a.bin")
  open_streams(config, 0)


def test_a_file_that_becomes_shorter_or_fails_is_named(tmp_path, monkeypatch):
  """A memory map ended the process (SIGBUS)."""
  (stream,) = open_streams(make_config(tmp_path), 0)
  with monkeypatch.context() as patch:
    patch.setattr(os, "preadv", fails)
    text = error_of(stream.batch, 3)
    assert "a.bin" in text and "Input/output error" in text
    with pytest.raises(ConfigError) as caught:
      stream.batch(3)
    assert not lasts(caught.value), "it may be read the next time"
  expected = stream.batch(3)
  monkeypatch.setattr(os, "preadv", few)
  np.testing.assert_array_equal(stream.batch(3), expected)
  os.truncate(tmp_path / "a.bin", 100)
  text = error_of(stream.batch, 3)
  assert "a.bin" in text and "is shorter now" in text


def fails(*_):
  raise OSError(errno.EIO, "Input/output error")


def few(descriptor, buffers, offset, preadv=os.preadv):
  """A read may give less than it was asked for."""
  return preadv(descriptor, [buffers[0][:3]], offset)


def test_corpus_too_small(tmp_path):
  (tmp_path / "a.txt").write_bytes(b"x" * 100)
  text = error_of(data_lib.open_corpus, text_data(tmp_path / "*.txt", sequence_length=101))
  assert "data.heldout_sequences = 64" in text and "101 tokens" in text
  text = error_of(data_lib.open_corpus, text_data(tmp_path / "*.txt", sequence_length=4))
  assert "data.heldout_sequences = 64" in text and "gives only 0 held-out" in text


def test_corpus_too_small_for_the_learners(tmp_path):
  config = make_config(tmp_path, learners=30, batch_size=20)
  text = error_of(open_streams, config, 0)
  assert "islands.batch_size = 20" in text and "need 600 an epoch" in text


def test_token_beyond_the_vocabulary_at_open(tmp_path, monkeypatch):
  monkeypatch.setattr(data_lib, "_CHECKED_TOKENS", 5)
  config = make_config(tmp_path, vocab_size=4_999)
  text = error_of(open_streams, config, 0)
  assert "model.vocab_size = 4999" in text and "4999 in" in text and "at least 5000" in text
  assert "a.bin" in text


def test_a_token_too_large_for_int32_in_a_batch(tmp_path, monkeypatch):
  """In int32 it is negative, and the model would look up a row from the table's end."""
  monkeypatch.setattr(data_lib, "_CHECKED_TOKENS", 5)
  tokens = np.zeros(5_000, np.uint32)
  tokens[5:-5] = 2**32 - 7
  tokens.tofile(tmp_path / "a.bin")
  text = error_of(open_streams, make_config(tmp_path, token_dtype="uint32"), 0)
  assert "a 4294967289 in" in text and "(batch 0)" in text


def test_token_beyond_the_vocabulary_in_a_batch(tmp_path, monkeypatch):
  monkeypatch.setattr(data_lib, "_CHECKED_TOKENS", 5)
  config, tokens = make_config(tmp_path, vocab_size=50_000), np.arange(5_000, dtype=np.uint16)
  (stream,) = open_streams(config, 0)
  tokens[stream.batch(3)[0, 4]] = 60_000
  tokens.tofile(tmp_path / "a.bin")
  (stream,) = open_streams(config, 0)
  text = error_of(stream.batch, 3)
  assert "a 60000 in" in text
  [first] = re.findall(r"a\.bin, from token (\d+) on \(batch 3\)", text)
  assert 60_000 in tokens[int(first) : int(first) + 9]
  with contextlib.closing(stream.iterate(3)) as iterator:  # also out of the background thread
    assert "batch 3" in error_of(next, iterator)


def test_tokenizer_larger_than_the_model(tmp_path):
  (tmp_path / "a.txt").write_bytes(b"x" * 10_000)
  data = text_data(tmp_path / "*.txt", sequence_length=4, heldout_sequences=2)
  config = Config(data=data, model=ModelConfig(vocab_size=200))
  text = error_of(open_streams, config, 0)
  assert "model.vocab_size = 200" in text and "256" in text
