"""Grain data: a corpus split into windows, a fixed held-out split, one disjoint stream per learner.

Everything is addressed by index. Window i of a part (one token array) covers its tokens
[i T, i T + T]: T inputs and, shifted by one, T targets. A learner's batch is a pure function of
(config, learner, position), so the state of a stream is one integer, {"position": batches so far}.

A user's own data (`data.custom`) are a `Source` too: batches of any arrays, by position.

Grain prefetches, restores and shuffles (its index shuffle gives the order). One Grain element is a
whole batch, because Grain's bookkeeping per element costs more than gathering the batch.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import grain
import jax
import numpy as np
from grain import experimental as grain_experimental

from ddiloco import custom
from ddiloco.config import Config, DataConfig
from ddiloco.models.model import Batch
from ddiloco.training.devices import refuse_misfit
from ddiloco.training.tokens import DataError, Tokenizer, load_tokenizer, read_parts

_MAX_BLOCK_WINDOWS = 16
_MIN_BLOCK_WINDOWS = 4  # two of these are guards
_CHECKED_TOKENS = 65_536  # at either end of each part, when a stream is opened
_READ_OPTIONS = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)


class Source(Protocol):
  """The data that islands train on and the evaluator measures with. A process opens it once."""

  def batches(self, config: Config, learner: int) -> Any:
    """One learner's endless sequence of batches, a pure function of the arguments.

    The result is one of two kinds. Either `result[position]` is a batch of
    `config.islands.island(learner).batch_size` examples, as in a Grain MapDataset. Or it is a Grain
    IterDataset, which is restored to a position by a jump, or by reading up to there where Grain
    cannot jump. Learners come and go: `learner` may be any number, also above
    config.islands.num_learners. Batches are trees of NumPy arrays, as the model's `inputs`.
    """

  def heldout_batches(self, batch_size: int) -> Sequence[Batch]:
    """The fixed evaluation set, in batches of one shape, of at most `batch_size` examples."""


@dataclasses.dataclass(frozen=True, eq=False)
class Windows:
  """A random-access set of windows of T + 1 tokens, found by arithmetic for any corpus size.

  Window k of the set is window `blocks[k // per_block] * block_windows + offset + k % per_block`
  of the corpus, which numbers the windows of all parts one after the other.
  """

  parts: tuple[np.ndarray, ...]
  first_window: np.ndarray  # of each part
  sequence_length: int  # T
  blocks: np.ndarray
  block_windows: int
  per_block: int
  offset: int
  length: int

  def __len__(self) -> int:
    return self.length

  def locate(self, index: int) -> tuple[int, int]:
    """(part, first token in it) of one window of the set."""
    block, within = divmod(index, self.per_block)
    window = int(self.blocks[block]) * self.block_windows + self.offset + within
    part = 0
    if len(self.parts) > 1:
      part = int(np.searchsorted(self.first_window, window, side="right")) - 1
    return part, (window - int(self.first_window[part])) * self.sequence_length

  def read(self, indices: Sequence[int]) -> np.ndarray:
    """[len(indices), T + 1] int32, freshly copied."""
    width = self.sequence_length + 1
    tokens_NxT1 = np.empty((len(indices), width), np.int32)
    for row, index in enumerate(indices):
      part, start = self.locate(int(index))
      tokens_NxT1[row] = self.parts[part][start : start + width]
    return tokens_NxT1


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
  """A tokenized corpus. Share it: it is read-only and costs nothing per learner."""

  data: DataConfig
  tokenizer: Tokenizer
  parts: tuple[np.ndarray, ...]
  train: Windows
  heldout: Windows

  @property
  def num_tokens(self) -> int:
    return sum(len(part) for part in self.parts)

  @functools.cached_property
  def digest(self) -> str:
    """Of the length and both ends of each part: other files hardly have the same."""
    found = hashlib.sha256(str([(len(part), str(part.dtype)) for part in self.parts]).encode())
    for part in self.parts:
      found.update(part[:_CHECKED_TOKENS].tobytes() + part[-_CHECKED_TOKENS:].tobytes())
    return found.hexdigest()[:16]

  def batches(
    self, config: Config, learner: int, batch_size: int = 0
  ) -> grain.MapDataset[np.ndarray]:
    """See `Source`, and `Stream` for the windows of each learner. `batch_size` 0: the island's."""
    _check_stream(self, config, learner)
    return _Batches(self, config, learner, batch_size)

  def heldout_batches(self, batch_size: int) -> list[np.ndarray]:
    """See the function `heldout_batches`."""
    return heldout_batches(self, self.data, batch_size)


def open_data(data: DataConfig) -> Source:
  """The corpus, or the source that `data.custom` names.

  Raises:
    ConfigError: a custom source cannot be made, or is no `Source`; and as `open_corpus`.
  """
  if not data.custom:
    return open_corpus(data)
  source = custom.make("data", data)
  wanted = ("batches", "heldout_batches")
  custom.refuse_missing("data", data.custom, source, wanted, "ddiloco.training.data.Source")
  return source


def open_corpus(data: DataConfig) -> Corpus:
  """Reads and tokenizes the corpus (token files are memory-mapped), and splits it.

  Split: windows form blocks of `block_windows` (16, fewer in a small corpus); a share of the
  blocks, spread evenly over the corpus, is held out. Neighbouring windows share one token, so the
  first and last window of a held-out block are guards that are never read: no held-out token is
  ever trained on. The split depends on the corpus, T and heldout_share, not on seed or learners.

  Raises:
    DataError: see tokens.read_parts; or the corpus is too small for T or for the held-out split.
    TokenizerError: the tokenizer cannot be loaded.
  """
  tokenizer = load_tokenizer(data.tokenizer)
  parts = read_parts(data, tokenizer)
  length = data.sequence_length
  windows_of_part = [max(0, len(part) - 1) // length for part in parts]
  num_windows = sum(windows_of_part)
  num_tokens = sum(len(part) for part in parts)
  if not num_windows:
    raise DataError(
      "data.sequence_length",
      length,
      f"the corpus has {num_tokens} tokens in {len(parts)} part(s); none holds the"
      f" {length + 1} of one window",
      "give more text, or lower data.sequence_length",
    )
  wanted_blocks = int(num_windows * data.heldout_share) // 8  # spread over at least about 8 places
  block_windows = min(_MAX_BLOCK_WINDOWS, max(_MIN_BLOCK_WINDOWS, wanted_blocks))
  train_blocks, heldout_blocks = _split_blocks(num_windows // block_windows, data.heldout_share)
  whole = len(train_blocks) * block_windows
  remainder = num_windows % block_windows  # windows of the last, unfinished block are trained on
  common = (parts, np.cumsum([0, *windows_of_part[:-1]]), length)
  last = np.array([num_windows // block_windows])
  train = Windows(
    *common,
    blocks=np.concatenate([train_blocks, last]),
    block_windows=block_windows,
    per_block=block_windows,
    offset=0,
    length=whole + remainder,
  )
  heldout = Windows(
    *common,
    blocks=heldout_blocks,
    block_windows=block_windows,
    per_block=block_windows - 2,
    offset=1,
    length=len(heldout_blocks) * (block_windows - 2),
  )
  _check_sizes(data, train, heldout, num_tokens)
  return Corpus(data, tokenizer, parts, train, heldout)


def _split_blocks(num_blocks: int, heldout_share: float) -> tuple[np.ndarray, np.ndarray]:
  """(train, held-out) block numbers; of every prefix the share is held out, rounded down."""
  held_so_far = np.floor(np.arange(num_blocks + 1) * heldout_share)
  held = np.diff(held_so_far) > 0
  return np.flatnonzero(~held), np.flatnonzero(held)


def _check_sizes(data: DataConfig, train: Windows, heldout: Windows, num_tokens: int) -> None:
  if len(heldout) < data.heldout_sequences:
    raise DataError(
      "data.heldout_sequences",
      data.heldout_sequences,
      f"data.heldout_share = {data.heldout_share} of {num_tokens} tokens gives only"
      f" {len(heldout)} held-out sequences of {data.sequence_length} tokens",
      "give more text, lower data.heldout_sequences or data.sequence_length,"
      " or raise data.heldout_share",
    )
  if not 0 < len(train) <= 2**32:  # Grain's index shuffle counts in 32 bits
    raise DataError(
      "data.heldout_share",
      data.heldout_share,
      f"leaves {len(train)} windows to train on; there must be at least 1 and at most 2**32",
      "give more text or lower data.heldout_share; beyond 2**32 raise data.sequence_length",
    )


def heldout_batches(corpus: Corpus, data: DataConfig, batch_size: int) -> list[np.ndarray]:
  """The fixed evaluation set: data.heldout_sequences windows, spread over the held-out split.

  The set does not depend on `batch_size`, which is an upper bound: all batches are [B, T + 1] with
  B the largest divisor of heldout_sequences that fits, so one compiled shape serves them all and
  nothing is padded or dropped.
  """
  count = data.heldout_sequences
  size = max(b for b in range(1, max(1, min(batch_size, count)) + 1) if count % b == 0)
  chosen = [k * len(corpus.heldout) // count for k in range(count)]
  return [corpus.heldout.read(chosen[start : start + size]) for start in range(0, count, size)]


@functools.lru_cache(maxsize=256)
def _shuffle_seed(seed: int, epoch: int) -> int:
  """32 bits from two numbers; unlike a sum, no two epochs of nearby seeds coincide."""
  entropy = [seed % 2**64, 0, epoch]
  return int(np.random.SeedSequence(entropy).generate_state(1, np.uint32)[0])


def _bisection(lap: int) -> float:
  """0, 1/2, 1/4, 3/4, 1/8, 5/8, ...: each value halves the widest gap between earlier values.

  The van der Corput sequence: the bits of `lap`, mirrored at the binary point.
  """
  bits = f"{lap:b}"
  return int(bits[::-1], 2) / 2 ** len(bits)


class ReadingOrder:
  """A learner's endless sequence out of `count` things: each epoch is a new permutation.

  In its epoch, learner m of M reads places m, m + M, m + 2M, ... of the permutation of all things:
  the order of shuffle(seed)[m::M].repeat().
  """

  def __init__(self, count: int, config: Config, learner: int):
    self._count, self._seed = count, config.seed
    self._num_streams = config.islands.num_learners
    lap, self._stream = divmod(learner, self._num_streams)
    self._epoch = len(range(self._stream, count, self._num_streams))
    self._first_place = int(_bisection(lap) * self._epoch)

  def __getitem__(self, place: int) -> int:
    """The thing at a place of this learner's endless sequence."""
    epoch, within = divmod(self._first_place + place, self._epoch)
    return grain_experimental.index_shuffle(
      self._stream + within * self._num_streams,
      max_index=self._count - 1,
      seed=_shuffle_seed(self._seed, epoch),
      rounds=4,
    )


class _Batches(grain.MapDataset[np.ndarray]):
  """Batch number -> tokens [B, T + 1] of the training windows, in the learner's `ReadingOrder`."""

  def __init__(self, corpus: Corpus, config: Config, learner: int, batch_size: int):
    super().__init__()
    self._windows = corpus.train
    self._path = corpus.data.path or corpus.data.source
    self._vocab_size = config.model.vocab_size
    self._batch_size = batch_size or config.islands.island(learner).batch_size
    self._order = ReadingOrder(len(self._windows), config, learner)

  def __len__(self) -> int:
    return sys.maxsize // self._batch_size

  def __getitem__(self, index):
    if isinstance(index, slice):
      return self.slice(index)
    if index < 0:
      raise IndexError(f"position {index}: must not be negative")
    first = int(index) * self._batch_size
    indices = [self._order[place] for place in range(first, first + self._batch_size)]
    tokens_BxT1 = self._windows.read(indices)
    # As the file has them: an id of 2**31 or more is negative in int32.
    check_token_ids(tokens_BxT1.view(np.uint32), self._vocab_size, f"{self._path} (batch {index})")
    return tokens_BxT1


def check_token_ids(tokens: np.ndarray, vocab_size: int, where: str) -> None:
  """Raises DataError if a token has no row in the model's embedding."""
  highest = int(tokens.max())
  if highest >= vocab_size:
    raise DataError(
      "model.vocab_size",
      vocab_size,
      f"must exceed every token id, and there is a {highest} in {where}",
      f"set at least {highest + 1}, or check data.token_dtype and data.tokenizer",
    )


class Stream:
  """One learner's endless, deterministic sequence of batches.

  Within an epoch the streams of learners 0 to M - 1 share no window. islands.num_learners (M) is a
  hint: a learner m >= M reads stream m % M from another place of the epoch on (half way, a quarter,
  three quarters, ... by its lap m // M). So the windows that learner m reads are unread, until one
  of the two learners of a stream reaches the place where the other began. The first M learners have
  then read half the corpus, if no other learner joined.

  Every batch is checked against model.vocab_size as it is read. Opening a stream also checks the
  tokenizer or, for token files, both ends of each file, so that most mistakes show at once. Of a
  custom source the first batch is checked: the model must take it, and a second reading must give
  the same arrays.
  """

  def __init__(self, source: Source, config: Config, learner: int):
    batches = source.batches(config, learner)
    self._open = lambda: _own_batches(batches, config) if config.data.custom else batches
    self._batches = self._open()
    if config.data.custom:
      _check_first(self, config, learner)

  def batch(self, position: int) -> Batch:
    """Batch `position` (from 0), of tokens int32 [batch_size, T + 1]; read in this thread."""
    return self._batches[position]

  def iterate(self, position: int = 0) -> BatchIterator:
    """Batches from `position` on, prefetched by a background thread; restore with **state."""
    return BatchIterator(self._open(), position)  # iterators that read ahead share no state


class BatchIterator(Iterator[Batch]):
  """Prefetches a few batches ahead. Used by one thread; close it, or use it as a context."""

  def __init__(self, batches: grain.MapDataset[Batch], position: int):
    if position < 0:
      raise IndexError(f"position {position}: must not be negative")
    self._iterator = iter(batches.to_iter_dataset(_READ_OPTIONS))
    grain_experimental.set_next_index(self._iterator, int(position))
    self._iterator.start_prefetch()

  def __next__(self) -> Batch:
    return next(self._iterator)

  @property
  def state(self) -> dict[str, int]:
    """{"position": n}: the next batch is number n; prefetched batches do not count."""
    return {"position": int(grain_experimental.get_next_index(self._iterator))}

  def close(self) -> None:
    """Stops the background thread; the iterator cannot be used afterwards."""
    self._iterator.close()

  def __enter__(self) -> BatchIterator:
    return self

  def __exit__(self, *_) -> None:
    self.close()


# --- A user's own batches, endless and by position, as the streams of a corpus are


class _Endless(grain.MapDataset[Batch]):
  """Batches by position, from a function position -> batch, which may fill the same arrays again.

  Several batches wait in the queue of those that are read ahead, so each is a copy.
  """

  def __init__(self, read: Callable[[int], Batch]):
    super().__init__()
    self._read = read

  def __len__(self) -> int:
    return sys.maxsize

  def __getitem__(self, index):
    if isinstance(index, slice):
      return self.slice(index)
    return jax.tree.map(_kept, self._read(int(index)))


def _kept(leaf: Any) -> Any:
  return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


class _Reader:
  """Batches of a Grain IterDataset by position; reading the next position is cheap."""

  def __init__(self, dataset: grain.IterDataset[Batch]):
    self._dataset, self._iterator, self._next = dataset, iter(dataset), 0

  def __call__(self, position: int) -> Batch:
    if position != self._next:
      self._move(position)
    self._next += 1
    return next(self._iterator)

  def _move(self, position: int) -> None:
    try:
      grain_experimental.set_next_index(self._iterator, position)
    except (NotImplementedError, ValueError):  # packing and filters cannot jump
      if position < self._next:
        self._iterator, self._next = iter(self._dataset), 0
      for _ in range(position - self._next):
        next(self._iterator)
    self._next = position


def _own_batches(batches: Any, config: Config) -> grain.MapDataset[Batch]:
  if isinstance(batches, grain.IterDataset):
    return _Endless(_Reader(batches))
  if not hasattr(batches, "__getitem__"):
    raise DataError(
      "data.custom",
      config.data.custom,
      f"batches() gives a {type(batches).__name__}, which has no batches by position",
      "return what batches[position] works on, or a Grain dataset",
    )
  return _Endless(batches.__getitem__)


def _check_first(stream: Stream, config: Config, learner: int) -> None:
  """Refuses batches that the model does not take, or that are no function of the position."""
  batch_size = config.islands.island(learner).batch_size
  inputs = custom.load_model(config.model).inputs(batch_size, config.data.sequence_length)
  first, again = stream.batch(0), stream.batch(0)
  try:
    refuse_misfit(first, inputs, "the model")
    rule = "" if _same(first, again) else "batch 0 is another one when it is read again"
  except ValueError as error:
    rule = str(error)
  if rule:
    raise DataError(
      "data.custom",
      config.data.custom,
      f"{rule} ({learner=})",
      "a learner's batches are a function of its number and the position, as model.inputs() says",
    )


def _same(a: Batch, b: Batch) -> bool:
  return all(jax.tree.leaves(jax.tree.map(np.array_equal, a, b)))


def _check_stream(corpus: Corpus, config: Config, learner: int) -> None:
  if learner < 0:
    raise DataError("learner", learner, "must not be negative", "learners count from 0")
  learners, batch_size = config.islands.num_learners, config.islands.island(learner).batch_size
  if len(corpus.train) < learners * batch_size:
    raise DataError(
      "islands.batch_size",
      batch_size,
      f"{learners} learners with such batches need {learners * batch_size} windows an epoch, and"
      f" the corpus has {len(corpus.train)} of {corpus.data.sequence_length} tokens to train on",
      "give more text, or lower islands.batch_size, islands.num_learners or data.sequence_length",
    )
  vocab_size = config.model.vocab_size
  if corpus.data.source == "tokens":
    for number, part in enumerate(corpus.parts):
      where = f"{corpus.data.path} (file {number} in order of name)"
      check_token_ids(part[:_CHECKED_TOKENS], vocab_size, where)
      check_token_ids(part[-_CHECKED_TOKENS:], vocab_size, where)
  elif corpus.tokenizer.vocab_size > vocab_size:
    raise DataError(
      "model.vocab_size",
      vocab_size,
      f"must be at least the tokenizer's {corpus.tokenizer.vocab_size} ({corpus.data.tokenizer})",
      f"set {corpus.tokenizer.vocab_size} or more",
    )
