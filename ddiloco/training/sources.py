"""Where tokens come from: each source becomes one or more token arrays ("parts").

Text is tokenized into memory, every document followed by the tokenizer's end token. Token files
stay on disk: each .bin file is one memory-mapped part and only the pages that are read are loaded.
"""

from __future__ import annotations

import functools
import glob
import os
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ddiloco.config import ConfigError, DataConfig
from ddiloco.training.tokenizers import ByteTokenizer, Tokenizer, token_dtype

Document = tuple[str, bytes]  # where it is from (for errors), its content

_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_SYNTHETIC_SEED = 20_260_421  # fixed: the corpus is the same for every run and learner
_SYNTHETIC_DOCUMENTS = 2048
_SYNTHETIC_LENGTH = 1023  # bytes a document; with its end token 2 Mi tokens in all
_SYNTHETIC_ALPHABET = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz ,.:;\n", np.uint8)


class DataError(ConfigError):
  """Data break their rule. The text names field or file, the value, the rule and the fix."""

  def __init__(self, field: str, value: Any, rule: str, fix: str):
    super().__init__(f"{field} = {value!r}: {rule}. Fix: {fix}.")


def read_parts(data: DataConfig, tokenizer: Tokenizer) -> tuple[np.ndarray, ...]:
  """The source's tokens as 1-D unsigned arrays, the same for every call.

  Raises:
    DataError: nothing matches the glob, or a file is unreadable, empty, not UTF-8 (unless
      tokens are bytes) or not a whole number of tokens long.
  """
  if data.source == "tokens":
    return tuple(_map_file(file, data.token_dtype) for file in _matches(data.path))
  if data.source == "text":
    documents: Iterable[Document] = ((file, _read(file)) for file in _matches(data.path))
  elif data.source == "stdlib":
    documents = stdlib_documents()
  else:
    documents = synthetic_documents()
  tokens = _tokenize(documents, tokenizer)
  if not len(tokens):
    raise DataError("data.path", data.path, "every matching file is empty", "give files with text")
  return (tokens,)


def _tokenize(documents: Iterable[Document], tokenizer: Tokenizer) -> np.ndarray:
  end = np.array([tokenizer.end_token], token_dtype(tokenizer.vocab_size))
  pieces = []
  for name, content in documents:
    if content:
      pieces += [_encode(name, content, tokenizer), end]
  return np.concatenate(pieces) if pieces else end[:0]


def _encode(name: str, content: bytes, tokenizer: Tokenizer) -> np.ndarray:
  if isinstance(tokenizer, ByteTokenizer):
    return np.frombuffer(content, np.uint8)
  try:
    return tokenizer.encode(content.decode("utf-8"))
  except UnicodeDecodeError as error:
    raise DataError(
      "data.path",
      name,
      f"this tokenizer needs UTF-8 text, and byte {error.start} is not ({error.reason})",
      "narrow the glob, convert the file, or use data.tokenizer = 'bytes', which reads any file",
    ) from error


def _matches(pattern: str) -> list[str]:
  """Files matching a glob (** spans folders), sorted, so that the order is always the same."""
  found = glob.glob(os.path.expanduser(pattern), recursive=True)
  files = sorted(file for file in found if not os.path.isdir(file))
  if not files:
    raise DataError("data.path", pattern, "no file matches this glob", "check the path")
  return files


def _unreadable(file: str, error: OSError) -> DataError:
  rule = f"this file cannot be read ({error.strerror or error})"
  return DataError("data.path", file, rule, "check its permissions or narrow the glob")


def _read(file: str) -> bytes:
  try:
    return Path(file).read_bytes()
  except OSError as error:
    raise _unreadable(file, error) from error


def _map_file(file: str, dtype_name: str) -> np.ndarray:
  """A .bin file of little-endian ids as a read-only memory-mapped array."""
  dtype = np.dtype(dtype_name).newbyteorder("<")
  try:
    num_bytes = os.stat(file).st_size
    if not num_bytes:
      raise DataError("data.path", file, "this token file is empty", "remove it or write it again")
    if num_bytes % dtype.itemsize:
      raise DataError(
        "data.path",
        file,
        f"its {num_bytes} bytes are no multiple of {dtype.itemsize}, the size of a {dtype_name}",
        "check data.token_dtype, or copy the file again if it was cut off",
      )
    # A plain view of the map: slicing the memmap subclass itself costs much more per window.
    return np.memmap(file, dtype, mode="r").view(np.ndarray)
  except OSError as error:
    raise _unreadable(file, error) from error


@functools.lru_cache(maxsize=1)
def stdlib_documents() -> tuple[Document, ...]:
  """Every .py file of the running Python's own library, in order of path; about 12 MB.

  The same for one Python version: tests, installed packages, what is generated for one machine
  (_sysconfigdata, config-*) and files this user may not read are left out.
  """
  root = sysconfig.get_path("stdlib")
  return tuple((name, _read(f"{root}/{name}")) for name in sorted(_stdlib_files(root)))


def _stdlib_files(root: str) -> Iterator[str]:
  for folder, folders, files in os.walk(root):
    folders[:] = [each for each in folders if each not in _SKIPPED_FOLDERS and not _generated(each)]
    for name in files:
      file = f"{folder}/{name}"
      if name.endswith(".py") and not _generated(name) and os.access(file, os.R_OK):
        yield file[len(root) + 1 :].replace(os.sep, "/")


def _generated(name: str) -> bool:
  """Whether a file or folder is made for one machine."""
  return name.startswith(("_sysconfigdata", "config-"))


@functools.lru_cache(maxsize=1)
def synthetic_documents() -> tuple[Document, ...]:
  """Order-2 Markov text over 32 symbols: two symbols predict the next up to about 0.8 nats.

  Each pair of symbols has four likely successors (70, 20, 7 and 3 %), drawn once with a fixed
  seed; knowing no context costs about 3.4 nats, so there is something to learn.
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
