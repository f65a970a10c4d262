"""Grain data: a corpus split into windows, a fixed held-out split, one disjoint stream per learner.

Everything is addressed by index. Window i of a part (one token array) covers its tokens
[i T, i T + T]: T inputs and, shifted by one, T targets. A learner's batch is a pure function of
(config, learner, position), so the state of a stream is one integer: how many batches were read.

A user's own data (`data.custom`) are a `Source` too: batches of any arrays, by position.

Grain prefetches, restores and shuffles (its index shuffle gives the order). One Grain element is a
whole batch, because Grain's bookkeeping per element costs more than gathering the batch.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import hashlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import grain
import jax
import numpy as np
from absl import flags
from grain import experimental as grain_experimental

from ddiloco import custom
from ddiloco.checks import refusal, require
from ddiloco.config import Config, DataConfig
from ddiloco.models.model import Batch
from ddiloco.training.tokens import Part, Tokenizer, is_here, load_tokenizer, read_parts

_MAX_BLOCK_WINDOWS = 16
_MIN_BLOCK_WINDOWS = 4  # two of these are guards
_QUICK_BYTES = 8 << 20  # of text, which any tokenizer reads in seconds
_CHECKED_TOKENS = 65_536  # at either end of each part, when a stream is opened
_WIDTH_TOKENS = 1000  # enough of them tell ids of another width
_NPY = b"\x93NUMPY"
_READERS = 8  # threads that read token files: a bucket takes a tenth of a second for a window
_READ_OPTIONS = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
_FILE_OPTIONS = grain.ReadOptions(num_threads=_READERS, prefetch_buffer_size=_READERS)


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

  Each of its blocks is `block_windows` windows of the corpus, without a guard at either end if the
  set is the held-out one. The corpus numbers the windows of all parts one after the other.
  """

  parts: tuple[Part, ...]
  first_window: np.ndarray  # of each part
  sequence_length: int  # T
  block_windows: int
  num_blocks: int  # whole blocks of the corpus; of any first n of them floor(n share) are held out
  share: float
  held_out: bool  # which of them the set has
  blocks: range  # of the set
  length: int

  def __len__(self) -> int:
    return self.length

  @property
  def per_block(self) -> int:
    """Windows of the set in a block."""
    return self.block_windows - 2 * self.held_out

  def _before(self, ends_N: np.ndarray) -> np.ndarray:
    """How many of the corpus's blocks before each of these are in the set."""
    held_N = np.floor(ends_N * self.share).astype(int)
    return held_N if self.held_out else ends_N - held_N

  def _in_corpus(self, blocks_N: np.ndarray) -> np.ndarray:
    """These blocks' numbers in the corpus. A list of them would have gigabytes where T is small."""
    nth_N, rate = self.blocks.start + blocks_N, self.share if self.held_out else 1 - self.share
    # The last block before which there are no more than n: a few steps from a bound above.
    found_N = np.minimum(self.num_blocks, ((nth_N + 1) / rate).astype(int) + 2)
    while (late_N := self._before(found_N) > nth_N).any():
      found_N -= late_N
    return found_N

  def _places(self, indices: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each window its part, and its first token there."""
    block, within = np.divmod(np.asarray(indices, int), self.per_block)
    window = self._in_corpus(block) * self.block_windows + self.held_out + within
    part = np.searchsorted(self.first_window, window, side="right") - 1
    return part, (window - self.first_window[part]) * self.sequence_length

  def read(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
    """[len(indices), T + 1] int32, freshly copied. An id of 2**31 or more is negative there."""
    tokens_NxT1 = np.empty((len(indices), self.sequence_length + 1), np.int32)
    for row, (p, first) in enumerate(zip(*self._places(indices))):
      tokens_NxT1[row] = self.parts[p][first : first + self.sequence_length + 1]
    return tokens_NxT1

  def checked(self, indices: Sequence[int], vocab_size: int, batch: int) -> np.ndarray:
    """`read`, where every id must be below `vocab_size`; `batch` is for the error."""
    tokens_NxT1 = self.read(indices)
    highest_N = tokens_NxT1.view(np.uint32).max(1)
    row = highest_N.argmax()
    [p], [first] = self._places(indices[row : row + 1])
    named = getattr(self.parts[p], "name", "the text")
    check_token_ids(highest_N, vocab_size, f"{named}, from token {first} on (batch {batch})")
    return tokens_NxT1


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
  """A tokenized corpus. Share it: it is read-only and costs nothing per learner."""

  data: DataConfig
  tokenizer: Tokenizer
  parts: tuple[Part, ...]
  train: Windows
  heldout: Windows

  def _ends(self) -> Iterator[tuple[Part, np.ndarray, np.ndarray]]:
    """Every part, and its first and last tokens; some are read side by side."""
    with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
      for begin in range(0, len(self.parts), _READERS):
        parts = self.parts[begin : begin + _READERS]
        firsts = pool.map(lambda part: part[:_CHECKED_TOKENS], parts)
        lasts = pool.map(lambda part: part[-_CHECKED_TOKENS:], parts)
        yield from zip(parts, firsts, lasts)

  @functools.cached_property
  def digest(self) -> str:
    """Of the length and both ends of each part: other files hardly have the same."""
    found = hashlib.sha256(str([(len(part), str(part.dtype)) for part in self.parts]).encode())
    for _, first, last in self._ends():
      found.update(first.tobytes() + last.tobytes())
    return found.hexdigest()[:16]

  @functools.cached_property
  def _highest(self) -> list[np.ndarray]:
    """Of each part the greatest id at either end."""
    highest = []
    for part, first, last in self._ends():
      self._refuse_other_kinds(getattr(part, "name", self.data.path), first)
      highest.append(np.array([first.max(), last.max()]))
    return highest

  def _refuse_other_kinds(self, name: str, first: np.ndarray) -> None:
    """Refuses files that show in their first tokens that they are no plain ids of this width."""
    rule = "has the header of a NumPy file, which would be read as tokens"
    fix = f"write plain ids: numpy.load(FILE).astype({self.data.token_dtype!r}).tofile(NEW)"
    require(not first.tobytes().startswith(_NPY), "data.path", name, rule, fix)
    wide = len(first) >= _WIDTH_TOKENS and first[::2].any() and not first[1::2].any()
    rule = f"every second id in {name} is 0 then: its ids have twice this width, or more"
    fix = "set uint32, or write the ids of other types anew, as uint16 or uint32"
    require(not wide, "data.token_dtype", self.data.token_dtype, rule, fix)

  def batches(
    self,
    config: Config,
    learner: int,
    batch_size: int = 0,
    rows: Sequence[int] | np.ndarray | None = None,
  ) -> grain.MapDataset[np.ndarray]:
    """See `Source`, and `Stream` for the windows of each learner.

    Args:
      config: the run's.
      learner: number of the learner.
      batch_size: rows of a batch; 0: those of the island.
      rows: those that are read, the others are zeros; None: all.

    Raises:
      ConfigError: the corpus is too small for all learners, or the model lacks its tokens.
    """
    vocab_size, known = config.model.vocab_size, self.tokenizer.vocab_size
    if self.data.source == "tokens":
      for part, highest in zip(self.parts, self._highest):
        check_token_ids(highest, vocab_size, getattr(part, "name", self.data.path))
    else:
      rule = f"must be at least the tokenizer's {known} ({self.data.tokenizer})"
      require(known <= vocab_size, "model.vocab_size", vocab_size, rule, f"set {known} or more")
    size = batch_size or config.islands.island(learner).batch_size
    order = reading_order(len(self.train), config, learner, size)
    wanted = np.arange(size) if rows is None else np.asarray(rows)

    def read(position: int) -> np.ndarray:
      windows = [order(position * size + row) for row in wanted.tolist()]
      tokens_BxT1 = np.zeros((size, self.train.sequence_length + 1), np.int32)
      tokens_BxT1[wanted] = self.train.checked(windows, vocab_size, position)
      return tokens_BxT1

    return by_position(read)

  def heldout_batches(self, batch_size: int) -> list[np.ndarray]:
    """The fixed evaluation set: data.heldout_sequences windows, spread over the held-out split.

    The set does not depend on `batch_size`, which is an upper bound: all batches are [B, T + 1]
    with B the largest divisor of heldout_sequences that fits, so one compiled shape serves them all
    and nothing is padded or dropped.
    """
    count = self.data.heldout_sequences
    size = max(b for b in range(1, min(batch_size, count) + 1) if count % b == 0)
    chosen = np.arange(count) * len(self.heldout) // count
    return [self.heldout.read(rows) for rows in chosen.reshape(-1, size)]


def open_data(data: DataConfig) -> Source:
  """The corpus, or the source that `data.custom` names.

  Raises:
    ConfigError: a custom source cannot be made, or is no `Source`; and as `open_corpus`.
  """
  if not data.custom:
    return open_corpus(data)
  return custom.make(data, ("batches", "heldout_batches"), "ddiloco.training.data.Source")


def digest(source: Source) -> str:
  """`Corpus.digest`; "" for a user's own data, of which nothing is known."""
  return source.digest if isinstance(source, Corpus) else ""


def check_here(config: Config) -> Corpus | None:
  """Refuses data that learners would refuse, for commands that train elsewhere or later.

  Not looked at are a source of the user's own, data or a tokenizer that are not on this machine,
  and text of more than `_QUICK_BYTES`, which takes long to read.

  Returns:
    The corpus; None if it was not looked at.

  Raises:
    ConfigError: as `open_corpus`; or the corpus is too small for all learners, or the model lacks
      its tokens.
  """
  if config.data.custom or not is_here(config.data, _QUICK_BYTES):
    return None
  corpus = open_corpus(config.data)
  by_size = {config.islands.island(m).batch_size: m for m in range(config.num_islands())}
  for m in by_size.values():  # the others are alike
    Stream(corpus, config, m)
  return corpus


def open_corpus(data: DataConfig) -> Corpus:
  """Opens the token files, or reads and tokenizes the text, and splits the corpus.

  Split: windows form blocks of `block_windows` (16, fewer in a small corpus); a share of the
  blocks, spread evenly over the corpus, is held out. Neighbouring windows share one token, so the
  first and last window of a held-out block are guards that are never read: no held-out token is
  ever trained on. The split depends on the corpus, T and heldout_share, not on seed or learners.

  Raises:
    ConfigError: see tokens.read_parts; the corpus is too small for T or for the held-out split; or
      the tokenizer cannot be loaded.
  """
  tokenizer = load_tokenizer(data.tokenizer)
  parts = read_parts(data, tokenizer)
  length, share = data.sequence_length, data.heldout_share
  windows_of_part = [max(0, len(part) - 1) // length for part in parts]
  num_windows, num_tokens = sum(windows_of_part), sum(map(len, parts))
  wanted_blocks = int(num_windows * share) // 8  # spread over at least about 8 places
  block_windows = min(_MAX_BLOCK_WINDOWS, max(_MIN_BLOCK_WINDOWS, wanted_blocks))
  num_blocks, remainder = divmod(num_windows, block_windows)
  held = math.floor(num_blocks * share)
  firsts = np.cumsum([0, *windows_of_part[:-1]])
  of_corpus = (parts, firsts, length, block_windows, num_blocks, share)
  # The windows of the last, unfinished block are trained on.
  train_length = (num_blocks - held) * block_windows + remainder
  train = Windows(*of_corpus, False, range(num_blocks - held + 1), train_length)
  heldout = Windows(*of_corpus, True, range(held), held * (block_windows - 2))
  count = data.heldout_sequences
  rule = (
    f"data.heldout_share = {share} of {num_tokens} tokens gives only {len(heldout)} held-out"
    f" sequences of {length} tokens"
  )
  fix = "give more text, lower it or data.sequence_length, or raise data.heldout_share"
  require(len(heldout) >= count, "data.heldout_sequences", count, rule, fix)
  return Corpus(data, tokenizer, parts, train, heldout)


@functools.lru_cache(maxsize=256)
def _shuffle_seed(seed: int, epoch: int) -> int:
  """32 bits from two numbers; unlike a sum, no two epochs of nearby seeds coincide."""
  return int(np.random.SeedSequence([seed, 0, epoch]).generate_state(1, np.uint32)[0])


def _bisection(lap: int) -> float:
  """0, 1/2, 1/4, 3/4, 1/8, 5/8, ...: each value halves the widest gap between earlier values.

  The van der Corput sequence: the bits of `lap`, mirrored at the binary point.
  """
  bits = f"{lap:b}"
  return int(bits[::-1], 2) / 2 ** len(bits)


def reading_order(count: int, config: Config, learner: int, each: int) -> Callable[[int], int]:
  """A learner's endless sequence out of `count` things, by place: each epoch is a new permutation.

  In its epoch, learner m of M reads places m, m + M, m + 2M, ... of the permutation of all things:
  the order of shuffle(seed)[m::M].repeat(). Where batches differ, a learner with twice the batch
  has two of M + 1 places, and so on: learners that make the same steps end an epoch together. A
  batch has `each` of the things.

  Raises:
    ConfigError: there are too few for a batch of every learner.
  """
  num_streams = config.islands.num_learners
  lap, stream = divmod(learner, num_streams)
  sizes = [config.tokens_per_step(m) for m in range(num_streams)]
  shares = np.array(sizes) // math.gcd(*sizes)
  mine, turn = int(shares[stream]), int(shares.sum())  # places of every so many
  before = int(shares[:stream].sum())
  needed, batch_size = -(-each // mine) * turn, config.islands.island(learner).batch_size
  rule = (
    f"{num_streams} learners that read {each} rows a batch need {needed} an epoch, and the data"
    f" have {count} to train on"
  )
  fix = "give more data, or lower it, islands.num_learners or data.sequence_length"
  require(needed <= count, "islands.batch_size", batch_size, rule, fix)
  rule = f"gives {count} rows to train on, and Grain's shuffle takes at most 2**32"
  length, fix = config.data.sequence_length, "raise it, or give fewer data"
  require(count <= 2**32, "data.sequence_length", length, rule, fix)
  whole_turns, rest = divmod(count, turn)
  epoch_size = whole_turns * mine + min(max(rest - before, 0), mine)
  first_place = int(_bisection(lap) * epoch_size)

  def thing(place: int) -> int:
    epoch, within = divmod(first_place + place, epoch_size)
    seed = _shuffle_seed(config.seed, epoch)
    number, nth = divmod(within, mine)
    index = number * turn + before + nth
    return grain_experimental.index_shuffle(index, max_index=count - 1, seed=seed, rounds=4)

  return thing


def by_position(read: Callable[[int], Batch]) -> grain.MapDataset[Batch]:
  """Endless batches from a function position -> batch."""
  return grain.MapDataset.range(sys.maxsize).map(read)


def check_token_ids(tokens: np.ndarray, vocab_size: int, where: str) -> None:
  """Raises ConfigError if a token has no row in the model's embedding."""
  highest = int(tokens.max())
  rule = f"must exceed every token id, and there is a {highest} in {where}"
  fix = f"set at least {highest + 1}, or check data.token_dtype and data.tokenizer"
  require(highest < vocab_size, "model.vocab_size", vocab_size, rule, fix)


class Stream:
  """One learner's endless, deterministic sequence of batches.

  Within an epoch the streams of learners 0 to M - 1 share no window. islands.num_learners (M) is a
  hint: a learner m >= M reads stream m % M from another place of the epoch on (half way, a quarter,
  three quarters, ... by its lap m // M). So the windows that learner m reads are unread, until one
  of the two learners of a stream reaches the place where the other began.

  The model must take every batch, of a corpus also every token. Opening a stream also checks the
  tokenizer or, for token files, both ends of each file, so that most mistakes show at once; and the
  first batch must be the same arrays when it is read again.

  Args:
    source: the run's data.
    config: the run's.
    learner: number of the learner.
    rows: of each batch, the rows that this process needs (`Island.rows`): others may be zeros.
  """

  def __init__(self, source: Source, config: Config, learner: int, rows: np.ndarray | None = None):
    data, batch_size = config.data, config.islands.island(learner).batch_size
    inputs = custom.load_model(config.model).inputs(batch_size, data.sequence_length)
    mine = {"rows": rows} if isinstance(source, Corpus) else {}
    batches = custom.called(data, "batches()", lambda: source.batches(config, learner, **mine))
    from_files = isinstance(source, Corpus) and data.source == "tokens"
    self._options = _FILE_OPTIONS if from_files else _READ_OPTIONS
    # Of a corpus it is checked before (`Windows.checked`); a custom model knows its own.
    vocab_size = config.model.vocab_size if data.custom and not config.model.custom else 0
    self._open = lambda: _checked(batches, data, inputs, vocab_size)
    # Opened for each: what a user's pipeline starts for a batch ends with it.
    twice = (custom.called(data, "reading batch 0", lambda: self._open()[0]) for _ in range(2))
    equal = jax.tree.map(functools.partial(np.array_equal, equal_nan=True), *twice)
    rule = f"batch 0 is another one when it is read again ({learner=})"
    fix = "give batches that are a function of the learner's number and the position alone"
    require(all(jax.tree.leaves(equal)), "data.custom", data.custom, rule, fix)
    self._batches = self._open()

  def batch(self, position: int) -> Batch:
    """Batch `position` (from 0), of tokens int32 [batch_size, T + 1]; read in this thread."""
    return self._batches[position]

  def iterate(self, position: int = 0) -> grain.DatasetIterator[Batch]:
    """Batches from `position` on, prefetched by background threads, which `close()` ends."""
    # Iterators that read ahead share no state.
    iterator = iter(self._open().to_iter_dataset(self._options))
    grain_experimental.set_next_index(iterator, position)
    iterator.start_prefetch()
    return iterator


# --- The batches of any source by position, each checked


class _Reader:
  """Batches of a Grain IterDataset by position; reading the next position is cheap."""

  def __init__(self, dataset: grain.IterDataset[Batch]):
    self._dataset, self._iterator, self._next = dataset, iter(dataset), 0

  def __getitem__(self, position: int) -> Batch:
    at, self._next = self._next, -1  # unknown, if the dataset raises now
    if position != at and not self._jumped(position):
      self._iterator = iter(self._dataset)  # a part of the old one may have jumped
      for _ in range(position):
        next(self._iterator)
    batch = next(self._iterator)
    self._next = position + 1
    return batch

  def _jumped(self, position: int) -> bool:
    if not _counts(self._dataset):
      return False
    try:
      grain_experimental.set_next_index(self._iterator, position)
    except (NotImplementedError, ValueError):  # packing and filters cannot jump
      return False
    return True


# Where Grain jumps to a wrong place: it counts also the elements that a MapDataset has left out.
# The last of these, of which `mp_prefetch` is made, has parts that are not among its parents.
_MISCOUNTED = (
  type(grain.MapDataset.range(1).filter(bool)),
  grain_experimental.FlatMapMapDataset,
  grain_experimental.InterleaveIterDataset,
)


def _counts(dataset: Any) -> bool:
  """Whether the index that Grain jumps to is the number of batches before it."""
  counted = not isinstance(dataset, _MISCOUNTED)
  return counted and all(map(_counts, getattr(dataset, "parents", ())))


def _checked(
  batches: Any, data: DataConfig, inputs: Batch, vocab_size: int = 0
) -> grain.MapDataset[Batch]:
  """A source's batches, each of which the model must take; with a `vocab_size` also its tokens."""
  if isinstance(batches, grain.IterDataset):
    flags.FLAGS.mark_as_parsed()  # Grain looks at its own before it starts a process
    batches = _Reader(batches)
  if isinstance(batches, jax.Array):
    batches = np.asarray(batches)  # JAX gives its last batch for each later position
  rule = f"batches() gives a {type(batches).__name__}, which has no batches by position"
  fix = "give an object with __getitem__(position), or a Grain MapDataset or IterDataset"
  require(hasattr(batches, "__getitem__"), "data.custom", data.custom, rule, fix)
  takes = jax.tree.map(_kind, inputs)

  def read(position: int) -> Batch:
    try:
      batch = jax.tree.map(np.array, batches[position])  # the source may fill its arrays again
    except (IndexError, StopIteration) as error:
      rule = f"batches() ends before position {position} ({error!r})"
      raise refusal("data.custom", data.custom, rule, "make it endless") from error
    has = jax.tree.map(_kind, batch)
    rule = f"batch {position} has {has}, the model takes {takes}"
    fix = "give every batch the arrays of the model's inputs()"
    same = jax.tree.flatten(has) == jax.tree.flatten(takes)
    require(same, "data.custom", data.custom, rule, fix)
    if vocab_size:  # in rows with an image -1 is no token
      tokens = batch["tokens"] if isinstance(batch, dict) else batch.view(np.uint32)
      check_token_ids(tokens, vocab_size, f"batch {position} of {data.custom}")
    return batch

  return by_position(read)


def _kind(leaf: Any) -> str:
  return f"{leaf.dtype} {leaf.shape}"
