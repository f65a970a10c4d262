"""The four sources, and what bad files get."""

from __future__ import annotations

import bz2
import errno
import gzip
import lzma
import os
import pathlib
import subprocess
import sys
import sysconfig

import numpy as np
import pytest

from ddiloco.checks import Unanswered
from ddiloco.config import DataConfig
from ddiloco.training import data as data_lib
from ddiloco.training import tokens as tokens_lib
from tests.training.test_data import error_of, text_data


def test_text_files_are_documents_separated_by_byte_zero(tmp_path):
  (tmp_path / "deep").mkdir()
  (tmp_path / "folder.txt").mkdir()
  (tmp_path / "b.txt").write_bytes(b"second \xff\xfe")  # not UTF-8: bytes are read all the same
  (tmp_path / "a.txt").write_bytes(b"first")
  (tmp_path / "deep" / "c.txt").write_bytes(b"third" * 200)
  (tmp_path / "empty.txt").write_bytes(b"")
  data = DataConfig(
    source="text",
    path=str(tmp_path / "**" / "*.txt"),
    sequence_length=4,
    heldout_sequences=1,
    heldout_share=0.1,
  )
  corpus = data_lib.open_corpus(data)
  text = corpus.parts[0].tobytes()
  assert text == b"first\0second \xff\xfe\0" + b"third" * 200 + b"\0"


def test_stdlib_corpus_is_large_and_deterministic():
  documents = tokens_lib.stdlib_documents()
  assert sum(len(content) for _, content in documents) > 5_000_000
  names = [name for name, _ in documents]
  assert names == sorted(names) and "dataclasses.py" in names
  assert not [n for n in names if "site-packages" in n or n.startswith(("test/", "_sysconfigdata"))]
  data = DataConfig()
  one, other = data_lib.open_corpus(data), data_lib.open_corpus(data)
  np.testing.assert_array_equal(one.parts[0], other.parts[0])
  assert b"class " in one.parts[0].tobytes()


def test_stdlib_documents_are_the_librarys_own_modules_in_order_of_path(tmp_path, monkeypatch):
  kept = ["a.py", "pkg/b.py", "pkg/deep/config.py", "z.py"]
  for name in (
    *kept,
    *("pkg/test/c.py", "site-packages/d.py", "config-3.11/e.py"),
    *("_sysconfigdata_linux.py", "read_by_root.py", "note.txt"),
  ):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(name)
  monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
  monkeypatch.setattr(os, "access", lambda file, _: "read_by_root" not in file)
  found = tokens_lib.stdlib_documents.__wrapped__()
  assert found == tuple((name, name.encode()) for name in kept)


MANY = """
import resource, sys
from ddiloco.config import DataConfig
from ddiloco.training import tokens
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 300))
print(len(tokens.read_parts(DataConfig(source="tokens", path=sys.argv[1]), tokens.BYTES)))
"""


def test_token_files_may_be_more_than_a_process_can_open_at_first(tmp_path):
  for number in range(100):
    (tmp_path / f"{number}.bin").write_bytes(bytes(2))
  program = [sys.executable, "-c", MANY, str(tmp_path / "*.bin")]
  assert subprocess.check_output(program) == b"100\n"


def test_synthetic_is_deterministic_and_learnable():
  data = DataConfig(source="synthetic")
  (tokens,) = data_lib.open_corpus(data).parts
  tokens_lib.synthetic_documents.cache_clear()
  np.testing.assert_array_equal(tokens, data_lib.open_corpus(data).parts[0])
  assert len(tokens) == 2048 * 1024 and (tokens[1023::1024] == 0).all()

  def entropy(*columns: np.ndarray) -> float:
    code = np.zeros(len(columns[0]), np.int64)
    for column in columns:
      code = code * 256 + column
    share = np.unique(code, return_counts=True)[1] / len(code)
    return float(-(share * np.log(share)).sum())

  text = tokens.reshape(2048, 1024)[:, :-1]
  a, b, c = (text[:, i : i + 1000].ravel() for i in (0, 1, 2))
  assert entropy(c) > 3.0
  assert 0.7 < entropy(a, b, c) - entropy(a, b) < 0.95
  assert entropy(b, c) - entropy(b) > 2.0, "one symbol of context must not be enough"


def test_no_file_matches(tmp_path):
  text = error_of(data_lib.open_corpus, text_data(tmp_path / "*.md"))
  assert "data.path" in text and "*.md" in text and "no file matches" in text
  text = error_of(data_lib.open_corpus, text_data(tmp_path))
  assert "no file matches" in text and "not their folder" in text


@pytest.mark.parametrize(
  "kind, content",
  [
    ("gzip", gzip.compress(b"text")),
    ("bzip2", bz2.compress(b"text")),
    ("xz", lzma.compress(b"text")),
    ("zstd", bytes.fromhex("28b52ffd0404")),
    ("zip", b"PK\x03\x04\x14"),
    ("Parquet", b"PAR1\x15\x04"),
    ("UTF-16", b"\xff\xfe" + "text".encode("utf-16-le")),
    ("UTF-16", b"\xfe\xff" + "text".encode("utf-16-be")),
  ],
)
def test_what_is_packed_or_of_another_encoding_is_no_text(tmp_path, kind, content):
  """Its bytes were trained on: noise, without a word."""
  (tmp_path / "a.txt").write_bytes(b"text")
  (tmp_path / "b.packed").write_bytes(content)
  text = error_of(data_lib.open_corpus, text_data(tmp_path / "*"))
  assert "b.packed" in text and f"is {kind}, and no text" in text


@pytest.mark.parametrize("source", ["text", "tokens"])
def test_a_pipe_is_refused_where_it_was_waited_for_without_end(tmp_path, source):
  """Such as that of a shell's <(zcat FILE): one process would read it, and the others nothing."""
  os.mkfifo(tmp_path / "pipe")
  data = DataConfig(source=source, path=str(tmp_path / "pipe"))
  assert tokens_lib.is_here(data, most_bytes=8), "the command that starts the run says so"
  text = error_of(data_lib.open_corpus, data)
  assert "pipe" in text and "no regular file" in text and "into a file" in text


def test_a_name_with_the_characters_of_a_glob_is_itself(tmp_path):
  for name in ("part[1].txt", "part1.txt"):
    (tmp_path / name).write_bytes(b"text")
    assert tokens_lib.matches(str(tmp_path / name)) == [str(tmp_path / name)]
  data = text_data(tmp_path / "part[1].txt")
  assert tokens_lib.is_here(data, most_bytes=4)
  (tmp_path / "part[1].txt").unlink()
  assert tokens_lib.matches(data.path) == [str(tmp_path / "part1.txt")], "else it is a glob"


def test_only_what_is_here_and_quickly_read_is_looked_at(tmp_path):
  def looked_at(**fields):
    return tokens_lib.is_here(DataConfig(**fields), most_bytes=8)

  (tmp_path / "deep").mkdir()
  (tmp_path / "deep" / "a.txt").write_bytes(b"8 bytes.")
  text = {"source": "text", "path": str(tmp_path / "**" / "*.txt")}
  assert looked_at(**text)
  (tmp_path / "b.txt").write_bytes(b"9")
  assert not looked_at(**text) and looked_at(**text | {"source": "tokens"})
  assert not looked_at(source="tokens", path=str(tmp_path / "*.bin"))
  assert looked_at(source="text", path=str(tmp_path)), "a folder, which is no file anywhere"
  assert looked_at() and looked_at(source="synthetic")
  assert not looked_at(tokenizer="huggingface:nowhere")


def test_all_files_empty(tmp_path):
  (tmp_path / "a.txt").touch()
  assert "empty" in error_of(data_lib.open_corpus, text_data(tmp_path / "*.txt"))


def test_unreadable_file(tmp_path):
  (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
  text = error_of(data_lib.open_corpus, text_data(tmp_path / "*.txt"))
  assert "gone.txt" in text and "cannot be read" in text


def test_a_file_that_cannot_be_read_to_its_end_is_named_by_the_glob(tmp_path, monkeypatch):
  """Such an error names no file. The files before it are read, and encoded, one by one."""
  for name in "ab":
    (tmp_path / f"{name}.txt").write_bytes(b"text")
  encoded = []

  def read_bytes(path):
    if path.name == "b.txt":
      raise OSError(errno.EIO, "Input/output error")
    return b"text"

  monkeypatch.setattr(pathlib.Path, "read_bytes", read_bytes)
  monkeypatch.setattr(tokens_lib, "_encode", lambda name, *_: encoded.append(name))
  with pytest.raises(Unanswered, match=r"\*\.txt.*Input/output error"):
    data_lib.open_corpus(text_data(tmp_path / "*.txt"))
  assert encoded == [str(tmp_path / "a.txt")]


def test_not_utf8_for_a_tokenizer_that_needs_text(tmp_path):
  class Words:
    vocab_size, end_token = 10, 0

    def encode(self, text):
      return np.ones(len(text.split()), np.uint8)

  (tmp_path / "a.txt").write_bytes(b"fine text")
  (tmp_path / "b.txt").write_bytes(b"no \xff text")
  text = error_of(tokens_lib.read_parts, text_data(tmp_path / "*.txt"), Words())
  assert "b.txt" in text and "byte 3" in text and "'bytes'" in text
