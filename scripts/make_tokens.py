"""Makes token files from documents, and a tokenizer if you have none, for configs/dense.py:100m on.

    python scripts/make_tokens.py --to=data [--text='corpus/**/*.jsonl.gz'] [--field=text]
      [--tokenizer=huggingface:FILE] [--vocab_size=32768] [--workers=8]

Of a .jsonl file each line is an object that has a document in --field; any other file is one
document, in UTF-8. Both may be gzipped (.gz). Without --text: the Python standard library. Without
--tokenizer a byte-level BPE is trained on up to half a gigabyte, and written to DIR/tokenizer.json.

DIR/00000.bin and so on have the tokens of all documents, each followed by the end token; --workers
processes make a file each. A file has its name once it is whole, and stays: after an error, which
names file and line, or a kill, the same command goes on. Needs `pip install -e '.[tokenizers]'`.

Not done here: cleaning, deduplication and mixing; shuffling (a run shuffles); other formats, such
as Parquet (write JSON lines first). One file is one worker's work, so give several.

It prints the flags with which a run reads them. Last line: {"vocab_size", "tokens",
"bytes_per_token"}, the last of the documents that this call has read (null: none).
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import glob
import gzip
import hashlib
import itertools
import json
import multiprocessing
import os
import shlex
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import common
import numpy as np

from ddiloco.checks import ConfigError, refusal, require
from ddiloco.training.tokens import (
  END_TOKENS,
  load_tokenizer,
  matches,
  shared_files,
  stdlib_documents,
)

MOST_WITH_UINT16 = 1 << 16
SLICE = 1 << 20  # characters that the trainer is given at a time
SAMPLE_BYTES = 500 << 20  # that a tokenizer is trained on
JOB_BYTES = 256 << 20  # of files that go into one token file; a larger file has its own
ABOUT = "made_of.txt"  # a digest of what the folder's token files are made of


# --- Documents


def documents(files: Sequence[str], field: str) -> Iterator[str]:
  """Every document of these files, or of the standard library.

  Raises:
    ConfigError: names the file, and the line, that cannot be read.
  """
  for name in files:
    opened = gzip.open if name.endswith(".gz") else open
    try:
      with opened(name, "rb") as file:
        if name.removesuffix(".gz").endswith(".jsonl"):
          lines = enumerate(file, 1)
          yield from (
            of_line(f"{name}, line {n}", line, field) for n, line in lines if line.strip()
          )
        else:
          yield file.read().decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
      rule = f"cannot be read as UTF-8 text ({error})"
      raise refusal("--text", name, rule, "correct or remove it, or narrow the glob") from error
  if not files:
    yield from (content.decode("utf-8") for _, content in stdlib_documents())


def of_line(where: str, line: bytes, field: str) -> str:
  """The document in a line of JSON."""
  try:
    found = json.loads(line)[field]
    if not isinstance(found, str):
      raise TypeError(f"it is a {type(found).__name__}")
  except (ValueError, KeyError, TypeError) as error:
    rule = f"is no object with a text in {field!r} ({type(error).__name__}: {error})"
    raise refusal("--text", where, rule, "correct or remove the line, or give --field") from error
  return found.encode("utf-8", "replace").decode("utf-8")  # JSON may have halves of a character


def sample(files: Sequence[str], field: str) -> Iterator[str]:
  """Text to train a tokenizer on: all, or of each file an even share from its beginning."""
  whole = sum(map(os.path.getsize, files)) <= SAMPLE_BYTES
  groups: list[tuple[str, ...]] = [(name,) for name in files]
  for group in groups or [()]:
    left = sys.maxsize if whole else SAMPLE_BYTES // len(files)
    for text in documents(group, field):
      for begin in range(0, min(len(text), left), SLICE):
        yield text[begin : min(begin + SLICE, left)]
      left -= len(text)
      if left <= 0:
        break


def train_bpe(slices: Iterator[str], vocab_size: int, to: Path) -> None:
  """Writes a byte-level BPE of `vocab_size` tokens, the first of which ends a document."""
  from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

  tokenizer = Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=vocab_size,
    special_tokens=[END_TOKENS[0]],
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # so that any text has tokens
  )
  tokenizer.train_from_iterator(slices, trainer)
  tokenizer.save(str(to))


# --- Token files


@dataclasses.dataclass(frozen=True)
class Job:
  """Files whose tokens become the file `to`; no files: the standard library."""

  files: tuple[str, ...]
  to: Path


def jobs(files: Sequence[str], folder: Path) -> list[Job]:
  """All files in order, small ones together."""
  ends = itertools.accumulate(map(os.path.getsize, files))
  begins = (end - os.path.getsize(name) for name, end in zip(files, ends))
  place = dict(zip(files, (begin // JOB_BYTES for begin in begins)))
  groups = [tuple(group) for _, group in itertools.groupby(files, place.__getitem__)] or [()]
  return [Job(group, folder / f"{number:05}.bin") for number, group in enumerate(groups)]


load = functools.cache(load_tokenizer)  # once in a process


def file_dtype(vocab_size: int) -> np.dtype:
  """The type of ids in the files."""
  return np.dtype("<u2" if vocab_size <= MOST_WITH_UINT16 else "<u4")


def write(job: Job, setting: str, field: str) -> tuple[int, int]:
  """Makes one token file; returns the bytes of text, and the tokens."""
  tokenizer, part, num_bytes = load(setting), job.to.with_suffix(".part"), 0
  dtype = file_dtype(tokenizer.vocab_size)
  end = np.array([tokenizer.end_token], dtype).tobytes()
  with part.open("wb") as out:
    for text in filter(None, documents(job.files, field)):
      out.write(tokenizer.encode(text).astype(dtype).tobytes() + end)
      num_bytes += len(text.encode("utf-8"))
    out.flush()
    os.fsync(out.fileno())
    num_tokens = out.tell() // dtype.itemsize
  require(num_tokens > 0, "--text", job.files, "have no text", "remove them, or narrow the glob")
  part.replace(job.to)
  return num_bytes, num_tokens


def write_all(todo: Sequence[Job], setting: str, field: str, workers: int) -> tuple[int, int]:
  """`write` of all, side by side; says on stderr how far it is."""
  began, done = time.monotonic(), np.zeros(2, int)
  method = multiprocessing.get_context("spawn")  # tokenizers has threads, which no fork survives
  with concurrent.futures.ProcessPoolExecutor(workers, method) as pool:
    made = [pool.submit(write, job, setting, field) for job in todo]
    try:
      for number, each in enumerate(concurrent.futures.as_completed(made), 1):
        done += each.result()
        rate = done[0] / (time.monotonic() - began) / 1e6
        said = f"{number} of {len(todo)} files, {done[1]:,} tokens, {rate:.1f} MB of text a second"
        print(said, file=sys.stderr, flush=True)
    except BaseException:
      pool.shutdown(cancel_futures=True)
      raise
  return int(done[0]), int(done[1])


def claim(folder: Path, *made_of: object) -> None:
  """Begins a folder, or goes on with one that was begun for the same."""
  file, digest = folder / ABOUT, hashlib.sha256(repr(made_of).encode()).hexdigest()
  began = file.exists() and (folder / "tokenizer.json").exists()
  if began or any(folder.glob("*.bin")):  # else files may have been corrected since
    same = file.exists() and file.read_text() == digest
    rule = "has tokens of other files, or of another tokenizer, field or vocabulary size"
    require(same, "--to", str(folder), rule, "choose another folder, or remove it")
  folder.mkdir(parents=True, exist_ok=True)
  file.write_text(digest)


def make(to: Path, pattern: str, field: str, setting: str, size: int, workers: int) -> None:
  """Makes all that is missing in the folder `to`."""
  require(size >= 300, "--vocab_size", size, "each byte has a token", "give 300 or more")
  files = matches(pattern) if pattern else []
  sizes = [(name, os.path.getsize(name)) for name in files]
  if setting:
    load(setting)  # refused here if it cannot be
  claim(to, sizes, field, shared_files(setting) if setting else size)
  if not setting:
    file = to / "tokenizer.json"
    if not file.exists():
      train_bpe(sample(files, field), size, file.with_suffix(".part"))
      file.with_suffix(".part").replace(file)
    setting = f"huggingface:{file}"
  tokenizer = load(setting)
  todo = [job for job in jobs(files, to) if not job.to.exists()]
  num_bytes, num_tokens = write_all(todo, setting, field, workers) if todo else (0, 0)
  dtype = file_dtype(tokenizer.vocab_size)
  path, setting = map(shlex.quote, (f"{glob.escape(str(to))}/*.bin", setting))
  print(
    f"--config.data.source=tokens --config.data.path={path} "
    f"--config.data.token_dtype={dtype.name} "
    f"--config.data.tokenizer={setting} --config.model.vocab_size={tokenizer.vocab_size}"
  )
  whole = sum(map(os.path.getsize, to.glob("*.bin"))) // dtype.itemsize
  each = round(num_bytes / num_tokens, 2) if num_tokens else None
  figures = {"vocab_size": tokenizer.vocab_size, "tokens": whole, "bytes_per_token": each}
  print(json.dumps(figures))


def main() -> None:
  options = common.options(
    __doc__,
    to={"type": Path, "required": True, "help": "is made if needed"},
    text=("", "glob of files; ** spans folders"),
    field=("text", "of an object in a .jsonl file: the document"),
    tokenizer=("", "bytes, huggingface:FILE or sentencepiece:FILE; else one is trained"),
    vocab_size=(32_768, "of a tokenizer that is trained"),
    workers=(os.cpu_count() or 1, "processes"),
  )
  try:
    text = options.text, options.field
    make(options.to, *text, options.tokenizer, options.vocab_size, options.workers)
  except BrokenProcessPool as error:
    fix = "give fewer, and the command again: the system may have ended one for its memory"
    raise refusal("--workers", options.workers, f"one has ended ({error})", fix) from error
  except (ImportError, OSError) as error:
    raise ConfigError(str(error)) from error


if __name__ == "__main__":
  common.run_script(main)
