"""Token files made from documents are what a run reads, and say what was written."""

from __future__ import annotations

import gzip
import json
import shlex
from pathlib import Path

import make_tokens
import numpy as np
import pytest

from ddiloco.config import DataConfig
from ddiloco.training.tokens import load_tokenizer, matches, read_parts
from tests.scripts import commands

TEXTS = ("def zero():\n  return 0\n" * 50, "Größe: 3 µm — ärgerlich\n" * 50)
SIZE = "--vocab_size=320"


@pytest.fixture
def inline(monkeypatch):
  """Workers are this process: what they do is the same."""

  class Pool(make_tokens.concurrent.futures.ThreadPoolExecutor):
    def __init__(self, workers, method):
      super().__init__(workers)

  monkeypatch.setattr(make_tokens.concurrent.futures, "ProcessPoolExecutor", Pool)


def run(monkeypatch, *arguments: str) -> int:
  return commands.status(make_tokens, monkeypatch, *arguments)


def read(data: Path) -> tuple[list[np.ndarray], list[str]]:
  """The tokens of each file, and all documents."""
  tokenizer = load_tokenizer(f"huggingface:{data}/tokenizer.json")
  parts = read_parts(DataConfig(source="tokens", path=f"{data}/*.bin"), tokenizer)
  parts = [part[:] for part in parts]
  tokens = np.concatenate(parts)
  ends = np.flatnonzero(tokens == tokenizer.end_token)
  assert ends[-1] == len(tokens) - 1, "every document ends"
  return parts, [tokenizer.decode(each) for each in np.split(tokens, ends[:-1] + 1)]


def test_a_run_reads_them_and_finds_the_text_again(tmp_path: Path, monkeypatch, capsys):
  for i, text in enumerate(TEXTS):
    (tmp_path / f"{i}.txt").write_text(text, encoding="utf-8")
  data = tmp_path / "data"
  arguments = (f"--to={data}", f"--text={tmp_path}/*.txt", SIZE)
  assert run(monkeypatch, *arguments) == 0
  flags, last = capsys.readouterr().out.splitlines()
  told = [word.removeprefix("--config.data.") for word in flags.split()]
  assert {"source=tokens", f"path='{data}/*.bin'", "token_dtype=uint16"} <= {*told}
  figures = json.loads(last)
  [tokens], found = read(data)
  assert found == list(TEXTS)
  tokenizer = load_tokenizer(f"huggingface:{data}/tokenizer.json")
  assert figures["vocab_size"] == tokenizer.vocab_size <= 320
  assert figures["tokens"] == len(tokens) < sum(map(len, TEXTS)) / 2
  num_bytes = sum(len(text.encode()) for text in TEXTS)
  assert figures["bytes_per_token"] == round(num_bytes / len(tokens), 2)


def test_lines_of_json_and_gzip_are_documents_too(tmp_path: Path, monkeypatch, inline):
  lines = [json.dumps({"id": 1, "body": text}) for text in (*TEXTS, "", "half \ud83d")]
  (tmp_path / "a.jsonl").write_text("\n".join(lines[:2]) + "\n\n")
  with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
    file.write("\n".join(lines[2:]))
  with gzip.open(tmp_path / "c.txt.gz", "wt") as file:
    file.write(TEXTS[0])
  arguments = f"--to={tmp_path / 'data'}", f"--text={tmp_path}/*.*", "--field=body", SIZE
  assert run(monkeypatch, *arguments) == 0
  _, found = read(tmp_path / "data")
  assert found == [*TEXTS, "half ?", TEXTS[0]]


def test_the_same_command_goes_on_and_another_one_is_refused(
  tmp_path: Path, monkeypatch, inline, capsys
):
  """Each file of documents larger than a job has a token file of its own."""
  monkeypatch.setattr(make_tokens, "JOB_BYTES", 100)
  for i, text in enumerate((*TEXTS, "more\n" * 50)):
    (tmp_path / f"{i}.txt").write_text(text, encoding="utf-8")
  data = tmp_path / "data"
  arguments = f"--to={data}", f"--text={tmp_path}/*.txt", SIZE
  written, write = [], make_tokens.write

  def killed(job, *more):
    if job.to.name == "00001.bin" and len(written) < 3:
      written.append("killed")
      raise OSError("the disk is full")
    written.append(job.to.name)
    return write(job, *more)

  monkeypatch.setattr(make_tokens, "write", killed)
  assert run(monkeypatch, *arguments, "--workers=1") == 2
  assert "the disk is full" in capsys.readouterr().err
  before = {file.name: file.stat().st_mtime_ns for file in data.glob("*.bin")}
  tokenizer = (data / "tokenizer.json").stat().st_mtime_ns
  assert "00000.bin" in before and "00001.bin" not in before
  written += ["from here on"] * 3
  assert run(monkeypatch, *arguments) == 0
  after = {file.name: file.stat().st_mtime_ns for file in data.glob("*.bin")}
  assert len(after) == 3 and before.items() <= after.items()
  assert (data / "tokenizer.json").stat().st_mtime_ns == tokenizer
  assert read(data)[1] == [*TEXTS, "more\n" * 50]
  capsys.readouterr()
  assert run(monkeypatch, *arguments) == 0, "nothing is left to do"
  assert json.loads(capsys.readouterr().out.splitlines()[-1])["bytes_per_token"] is None
  (tmp_path / "3.txt").write_text("a new file")
  assert run(monkeypatch, *arguments) == 2
  assert "has tokens of other files" in capsys.readouterr().err


def test_a_file_may_be_corrected_before_any_tokens_are_made(tmp_path: Path, monkeypatch, inline):
  """The folder, which had none, "has tokens of other files"."""
  file, data = tmp_path / "a.jsonl", tmp_path / "data"
  arguments = f"--to={data}", f"--text={file}", SIZE
  file.write_text('{"text": 3}\n')
  assert run(monkeypatch, *arguments) == 2
  file.write_text(json.dumps({"text": TEXTS[0]}))
  assert run(monkeypatch, *arguments) == 0
  assert read(data)[1] == [TEXTS[0]]


def test_the_flags_that_it_prints_are_words_of_a_shell(tmp_path: Path, monkeypatch, inline, capsys):
  (tmp_path / "0.txt").write_text(TEXTS[0])
  data = tmp_path / "my data [1]"
  assert run(monkeypatch, f"--to={data}", f"--text={tmp_path}/*.txt", SIZE) == 0
  words = shlex.split(capsys.readouterr().out.splitlines()[0])
  told = dict(word.removeprefix("--config.").split("=", 1) for word in words)
  assert len(words) == 5 and load_tokenizer(told["data.tokenizer"])
  assert matches(told["data.path"]) == [f"{data}/00000.bin"]


def test_a_tokenizer_of_yours(tmp_path: Path, monkeypatch, inline, capsys):
  (tmp_path / "0.txt").write_text(TEXTS[1], encoding="utf-8")
  text = f"--text={tmp_path}/*.txt"
  assert run(monkeypatch, f"--to={tmp_path}/first", text, SIZE) == 0
  own = f"huggingface:{tmp_path}/first/tokenizer.json"
  for to, setting in ((tmp_path / "same", own), (tmp_path / "bytes", "bytes")):
    assert run(monkeypatch, f"--to={to}", text, f"--tokenizer={setting}") == 0
    assert f"--config.data.tokenizer={setting}" in capsys.readouterr().out
    assert not (to / "tokenizer.json").exists()
  first, same = (np.fromfile(tmp_path / to / "00000.bin", "<u2") for to in ("first", "same"))
  np.testing.assert_array_equal(first, same)
  ids = np.fromfile(tmp_path / "bytes" / "00000.bin", "<u2")
  assert bytes(ids[:-1].astype(np.uint8)).decode() == TEXTS[1] and ids[-1] == 0
  assert run(monkeypatch, f"--to={tmp_path}/bytes", text, f"--tokenizer={own}") == 2
  assert "of another tokenizer" in capsys.readouterr().err


def test_a_tokenizer_is_trained_on_a_share_of_every_file(tmp_path: Path, monkeypatch):
  for i in range(3):
    (tmp_path / f"{i}.txt").write_text(str(i) * 1000)
  files = [str(tmp_path / f"{i}.txt") for i in range(3)]
  monkeypatch.setattr(make_tokens, "SLICE", 400)
  whole = list(make_tokens.sample(files, "text"))
  assert "".join(whole) == "0" * 1000 + "1" * 1000 + "2" * 1000
  assert max(map(len, whole)) == 400
  monkeypatch.setattr(make_tokens, "SAMPLE_BYTES", 1500)
  assert "".join(make_tokens.sample(files, "text")) == "0" * 500 + "1" * 500 + "2" * 500


@pytest.mark.parametrize(
  ("name", "content", "said"),
  [
    ("a.jsonl", b'{"text": "fine"}\n{"text": 3}\n', "a.jsonl, line 2"),
    ("a.jsonl", b'{"text": "fine"}\n\n{"body": "x"}\n', "a.jsonl, line 3"),
    ("a.jsonl", b'{"text": "cut o', "a.jsonl, line 1"),
    ("a.jsonl", b"[1]\n", "a.jsonl, line 1"),
    ("a.jsonl", b'{"text": "\xff"}\n', "a.jsonl, line 1"),
    ("a.txt", b"no \xff text", "a.txt"),
    # Without the time, which would be in the test's name: all processes of pytest must agree on it.
    ("a.jsonl.gz", gzip.compress(b'{"text": "fine"}\n', mtime=0)[:-9], "a.jsonl.gz"),
    ("a.txt.gz", b"no gzip", "a.txt.gz"),
    ("a.txt.gz", gzip.compress(b"", mtime=0)[:10] + b"\xff", "a.txt.gz"),
    ("a.txt", b"", "have no text"),
  ],
)
def test_what_cannot_be_read_is_named(name, content, said, tmp_path, monkeypatch, inline, capsys):
  (tmp_path / name).write_bytes(content)
  arguments = f"--to={tmp_path}/data", f"--text={tmp_path}/a*", "--tokenizer=bytes"
  assert run(monkeypatch, *arguments) == 2
  error = capsys.readouterr().err
  assert said in error and "Fix: " in error and "Traceback" not in error
  assert not list((tmp_path / "data").glob("*.bin"))


@pytest.mark.parametrize(
  "arguments, said",
  [
    (("--text=/nowhere/*",), "no file matches"),
    (("--vocab_size=9",), "Fix: give 300"),
    (("--tokenizer=huggingface:/nowhere",), "cannot be loaded"),
  ],
)
def test_wrong_arguments_are_named_and_nothing_is_written(
  arguments, said, tmp_path, monkeypatch, capsys
):
  assert run(monkeypatch, f"--to={tmp_path}/data", *arguments) == 2
  assert said in capsys.readouterr().err
  assert not (tmp_path / "data").exists()
