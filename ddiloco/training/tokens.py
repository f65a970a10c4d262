"""Tokenizers, and the sources of tokens, each of which becomes token arrays ("parts").

By default the tokens of a text are its bytes; else a SentencePiece or Hugging Face file defines
them. Text is tokenized into memory, every document followed by the tokenizer's end token. Token
files stay on disk: each .bin file is one part, of which only what is asked for is read.
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import importlib.util
import itertools
import json
import os
import stat
import sysconfig
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ddiloco.checks import Unanswered, kind_of, refusal, require
from ddiloco.config import DataConfig
from ddiloco.environment import raise_limit

# --- tokenizers -----------------------------------------------------------------------------------

# Names under which tokenizer files keep their end-of-text token. The first that a file has is it:
# Gemma's, <eos>, stands before </s>, which is the end of struck-out text in its HTML.
END_TOKENS = (
  *("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>", "[EOS]", "[SEP]"),
  "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek's
)


def token_dtype(vocab_size: int) -> np.dtype:
  """The smallest unsigned type that holds every id below `vocab_size`."""
  return np.min_scalar_type(vocab_size - 1)


@dataclasses.dataclass(frozen=True)
class Tokenizer:
  """What the data and the sampler need of a tokenizer. Ids lie in [0, vocab_size)."""

  vocab_size: int
  end_token: int  # follows every document; also stands for an empty prompt
  to_ids: Callable[[str], Any]  # a sequence of ids, without any special token
  to_text: Callable[[list[int]], str]

  def encode(self, text: str) -> np.ndarray:
    """Token ids of `text`, without any special token, in the smallest fitting unsigned type."""
    return np.asarray(self.to_ids(text), token_dtype(self.vocab_size))

  def decode(self, ids: Iterable[int]) -> str:
    """The text of `ids`, never an error; ids of a model's padded vocabulary have no text."""
    return self.to_text([i for i in map(int, ids) if 0 <= i < self.vocab_size])


# UTF-8 bytes are the tokens; byte 0, which text never contains, ends a document.
BYTES = Tokenizer(
  vocab_size=256,
  end_token=0,
  to_ids=lambda text: np.frombuffer(text.encode("utf-8"), np.uint8),
  to_text=lambda ids: bytes(ids).decode("utf-8", "replace"),
)


def _split(setting: str) -> tuple[str, str]:
  """(kind, file) of a tokenizer's setting; bytes have no file."""
  kind, _, file = setting.partition(":")
  return kind, os.path.expanduser(file)


def load_tokenizer(setting: str) -> Tokenizer:
  """The tokenizer that `data.tokenizer` names: bytes, sentencepiece:FILE or huggingface:FILE.

  Raises:
    ConfigError: it is another setting, the optional package is not installed, or the file is
      missing or corrupt. An Unanswered: it cannot be read now.
  """
  DataConfig(tokenizer=setting)  # refuses others
  kind, file = _split(setting)
  if not file:
    return BYTES
  package, load = _PACKAGES[kind]
  try:
    Path(file).read_bytes()  # its error has a number; those of the packages have none
    return load(importlib.import_module(package), file)
  except Exception as error:  # `tokenizers` raises plain Exception and nothing finer
    rule = f"cannot be loaded ({type(error).__name__}: {str(error).strip()})"
    fix = f"check the file; package {package!r} reads it: pip install 'ddiloco[tokenizers]'"
    raise refusal("data.tokenizer", setting, rule, fix, kind_of(error)) from error


def _sentencepiece(package: Any, file: str) -> Tokenizer:
  """A SentencePiece .model file."""
  model = package.SentencePieceProcessor(model_file=file)
  end = model.eos_id() if model.eos_id() >= 0 else model.bos_id()
  if end < 0:
    raise ValueError("no end or begin token separates documents: train it with eos_id >= 0")
  return Tokenizer(int(model.vocab_size()), end, model.encode, model.decode)


def _huggingface(package: Any, file: str) -> Tokenizer:
  """A tokenizer.json file."""
  model = package.Tokenizer.from_file(file)
  # Truncation and padding settings stored in the file would silently cut documents.
  model.no_truncation()
  model.no_padding()
  ids = model.get_vocab(with_added_tokens=True)
  end = next((ids[name] for name in END_TOKENS if name in ids), None)
  if end is None:
    raise ValueError(f"a special token must be one of the end-of-text tokens {END_TOKENS}")
  return Tokenizer(
    vocab_size=max(ids.values()) + 1,  # ids may have gaps
    end_token=end,
    to_ids=lambda text: model.encode(text, add_special_tokens=False).ids,
    to_text=functools.partial(model.decode, skip_special_tokens=True),
  )


# Kind of tokenizer -> the optional package that reads its file, and how.
_PACKAGES = {
  "sentencepiece": ("sentencepiece", _sentencepiece),
  "huggingface": ("tokenizers", _huggingface),
}


def shared_files(setting: str) -> dict[str, bytes]:
  """Files from which Hugging Face's `AutoTokenizer` makes the same tokenizer, content by name.

  For bytes: every byte is a token with the byte as its id, written as a BPE without merges. Of
  SentencePiece the file alone: its normalisation has no equivalent in all of their classes.

  Args:
    setting: of a tokenizer that `load_tokenizer` has loaded.

  Raises:
    OSError: its file cannot be read.
  """
  kind, file = _split(setting)
  if kind == "sentencepiece":
    return {"tokenizer.model": Path(file).read_bytes()}
  about = {"tokenizer_config.json": b'{"tokenizer_class": "PreTrainedTokenizerFast"}'}
  if kind == "huggingface":
    return {"tokenizer.json": Path(file).read_bytes()} | about
  # The characters that stand for bytes there: printable ones for themselves, others from 256 on.
  printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
  others = itertools.count(256)
  vocabulary = {chr(b if b in printable else next(others)): b for b in range(256)}
  level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
  whole = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": level,
    "decoder": level,
    "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
  }
  return {"tokenizer.json": json.dumps(whole, indent=2).encode()} | about


# --- token files ----------------------------------------------------------------------------------


class TokenFile:
  """A .bin file of little-endian ids. A slice of it is read when it is asked for.

  Not a memory map: of a map every page is fetched with its neighbours, or waited for by itself, and
  a storage that fails ends the process (SIGBUS). Several threads may read.

  Attributes:
    name: the path.
    dtype: of the ids.

  Raises:
    OSError: the file cannot be opened.
    ConfigError: it is empty, or not a whole number of ids long.
  """

  def __init__(self, name: str, dtype_name: str):
    self.name, self.dtype = name, np.dtype(dtype_name).newbyteorder("<")
    self._descriptor = os.open(name, os.O_RDONLY)
    weakref.finalize(self, os.close, self._descriptor)
    num_bytes = os.fstat(self._descriptor).st_size
    self._length, rest = divmod(num_bytes, self.dtype.itemsize)
    rule = f"has {num_bytes} bytes, which are no whole number of {dtype_name} ids, or none"
    fix = "check data.token_dtype; if the file was cut off, copy it again, or remove it"
    require(num_bytes > 0 and not rest, "data.path", name, rule, fix)

  def __len__(self) -> int:
    return self._length

  def __getitem__(self, tokens: slice) -> np.ndarray:
    """The ids, freshly read.

    Raises:
      Unanswered: the storage fails.
      ConfigError: the file has become shorter.
    """
    first, end, _ = tokens.indices(self._length)
    ids = np.empty(max(0, end - first), self.dtype)
    left, at = ids.view(np.uint8), first * self.dtype.itemsize
    while len(left):
      try:
        read = os.preadv(self._descriptor, [left], at)  # may be less than was asked for
      except OSError as error:
        rule = f"cannot be read ({error.strerror or error})"
        fix = "start again when its storage answers"
        raise refusal("data.path", self.name, rule, fix, Unanswered) from error
      rule = f"had {self._length} tokens when it was opened, and is shorter now"
      fix = "bring the old file back: data must stay as they are while a run lasts"
      require(read > 0, "data.path", self.name, rule, fix)
      left, at = left[read:], at + read
    return ids


Part: TypeAlias = np.ndarray | TokenFile  # of a corpus: 1-D, of unsigned ids


# --- sources --------------------------------------------------------------------------------------

# How files begin that are no text as they are. No text begins so.
_NO_TEXT = {
  b"\x1f\x8b": "gzip",
  b"BZh91AY&SY": "bzip2",
  b"\xfd7zXZ\x00": "xz",
  b"\x28\xb5\x2f\xfd": "zstd",
  b"PK\x03\x04": "zip",
  b"PAR1\x15": "Parquet",
  b"\xff\xfe": "UTF-16",
  b"\xfe\xff": "UTF-16",
}
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_GENERATED = ("_sysconfigdata", "config-")  # files and folders made for one machine
_SYNTHETIC_SEED = 20_260_421  # fixed: the corpus is the same for every run and learner
_SYNTHETIC_DOCUMENTS = 2048
_SYNTHETIC_LENGTH = 1023  # bytes a document; with its end token 2 Mi tokens in all
_SYNTHETIC_ALPHABET = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz ,.:;\n", np.uint8)


def read_parts(data: DataConfig, tokenizer: Tokenizer) -> tuple[Part, ...]:
  """The source's tokens, the same in every call.

  Raises:
    ConfigError: no file matches the glob, or a file is unreadable, empty, not UTF-8 (unless
      tokens are bytes) or not a whole number of tokens long.
  """
  end = np.array([tokenizer.end_token], token_dtype(tokenizer.vocab_size))
  pieces: list[np.ndarray] = []
  try:
    if data.source == "tokens":
      return _open_files(matches(data.path), data.token_dtype)
    documents: Iterable[tuple[str, bytes]]
    if data.source == "text":  # one after the other: all of them may take more memory than tokens
      documents = ((file, Path(file).read_bytes()) for file in matches(data.path))
    else:
      documents = stdlib_documents() if data.source == "stdlib" else synthetic_documents()
    for name, content in documents:
      kind = next((kind for first, kind in _NO_TEXT.items() if content.startswith(first)), "")
      fix = "write it as UTF-8 text, or make token files of it (scripts/make_tokens.py)"
      require(not kind, "data.path", name, f"is {kind}, and no text", fix)
      if content:
        pieces += [_encode(name, content, tokenizer), end]
  except OSError as error:
    rule = f"cannot be read ({error.strerror or error})"
    fix = "check the permissions of the file; if its storage did not answer, start again"
    path = error.filename or data.path
    raise refusal("data.path", path, rule, fix, kind_of(error)) from error
  rule = "every matching file is empty"
  require(bool(pieces), "data.path", data.path, rule, "give files with text")
  return (np.concatenate(pieces),)


def is_here(data: DataConfig, most_bytes: int) -> bool:
  """Whether all that tokenizing takes is on this machine, and is at most so many bytes of text."""
  kind, file = _split(data.tokenizer)
  if file and not (Path(file).is_file() and importlib.util.find_spec(_PACKAGES[kind][0])):
    return False
  if data.source == "stdlib":
    return not file  # bytes are tokens as they are
  files = [*filter(os.path.isfile, _found(data.path))]  # a link may lead to what others have
  if data.path and not files:  # reading it says that a folder, or a pipe, is no file
    return os.path.exists(os.path.expanduser(data.path))
  return data.source != "text" or sum(map(os.path.getsize, files)) <= most_bytes


def _encode(name: str, content: bytes, tokenizer: Tokenizer) -> np.ndarray:
  if tokenizer is BYTES:
    return np.frombuffer(content, np.uint8)
  try:
    return tokenizer.encode(content.decode("utf-8"))
  except UnicodeDecodeError as error:
    rule = f"this tokenizer needs UTF-8 text, and byte {error.start} is not ({error.reason})"
    fix = "narrow the glob, convert the file, or use data.tokenizer = 'bytes', which reads any file"
    raise refusal("data.path", name, rule, fix) from error


def matches(pattern: str) -> list[str]:
  """Files matching a glob (** spans folders), sorted, so that the order is always the same.

  Raises:
    ConfigError: there are none, or one is a pipe or a device, which every process would wait for.
    OSError: nothing can be known of one.
  """
  files = sorted(file for file in _found(pattern) if not os.path.isdir(file))
  fix = "name files, not their folder, and check that its storage is mounted on this host"
  require(bool(files), "data.path", pattern, "no file matches this glob", fix)
  for file in files:
    rule = "is no regular file: every process of the run reads it, some of it again and again"
    fix = "write what it gives into a file, and name that"
    require(stat.S_ISREG(os.stat(file).st_mode), "data.path", file, rule, fix)
  return files


def _found(pattern: str) -> list[str]:
  """What matches a glob; the path itself where something of that name is, as of `part[1].txt`."""
  path = os.path.expanduser(pattern)
  return [path] if os.path.lexists(path) else glob.glob(path, recursive=True)


def _open_files(files: Sequence[str], dtype_name: str) -> tuple[TokenFile, ...]:
  raise_limit()  # every file stays open
  return tuple(TokenFile(file, dtype_name) for file in files)


@functools.lru_cache(maxsize=1)
def stdlib_documents() -> tuple[tuple[str, bytes], ...]:
  """(name, content) of every .py file of the running Python's library, by path; about 12 MB.

  The result is the same on all machines with one Python version: tests, installed packages, files
  generated for one machine (_sysconfigdata, config-*) and files this user may not read are left
  out.
  """
  root, names = sysconfig.get_path("stdlib"), list[str]()
  for folder, folders, files in os.walk(root):
    folders[:] = [f for f in folders if f not in _SKIPPED and not f.startswith(_GENERATED)]
    for name in files:
      file = f"{folder}/{name}"
      if name.endswith(".py") and not name.startswith(_GENERATED) and os.access(file, os.R_OK):
        names.append(file[len(root) + 1 :].replace(os.sep, "/"))
  return tuple((name, Path(root, name).read_bytes()) for name in sorted(names))


@functools.lru_cache(maxsize=1)
def synthetic_documents() -> tuple[tuple[str, bytes], ...]:
  """Order-2 Markov text over 32 symbols: given two symbols, the next costs about 0.8 nats.

  Each pair of symbols has four successors (70, 20, 7 and 3 %), drawn once with a fixed seed.
  Without context a symbol costs about 3.4 nats, so there is something to learn.
  """
  rng = np.random.Generator(np.random.PCG64(_SYNTHETIC_SEED))
  symbols = len(_SYNTHETIC_ALPHABET)
  successors_SxSx4 = rng.integers(symbols, size=(symbols, symbols, 4))
  shape = (_SYNTHETIC_LENGTH, _SYNTHETIC_DOCUMENTS)
  rank_TxN = np.searchsorted([0.7, 0.9, 0.97], rng.random(shape), side="right")
  text_TxN = np.empty(shape, np.int64)
  text_TxN[:2] = rng.integers(symbols, size=(2, _SYNTHETIC_DOCUMENTS))
  for t in range(2, _SYNTHETIC_LENGTH):  # all documents at once, one position after the other
    text_TxN[t] = successors_SxSx4[text_TxN[t - 2], text_TxN[t - 1], rank_TxN[t]]
  text_NxT = _SYNTHETIC_ALPHABET[text_TxN.T]
  return tuple((f"synthetic/{n}", row.tobytes()) for n, row in enumerate(text_NxT))
