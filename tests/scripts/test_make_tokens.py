"""Token files made from text are what a run reads, and say what was written."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import make_tokens
import numpy as np
import pytest

from ddiloco.config import DataConfig
from ddiloco.training.tokens import load_tokenizer, read_parts

TEXTS = ("def zero():\n  return 0\n" * 50, "Größe: 3 µm — ärgerlich\n" * 50)


def run(monkeypatch, *arguments: str) -> int:
  monkeypatch.setattr(sys, "argv", ["make_tokens.py", *arguments])
  return make_tokens.main()


def test_a_run_reads_them_and_finds_the_text_again(tmp_path: Path, monkeypatch, capsys):
  for i, text in enumerate(TEXTS):
    (tmp_path / f"{i}.txt").write_text(text, encoding="utf-8")
  data = tmp_path / "data"
  arguments = (f"--to={data}", f"--text={tmp_path}/*.txt", "--vocab_size=320")
  assert run(monkeypatch, *arguments) == 0
  flags, last = capsys.readouterr().out.splitlines()
  told = [word.removeprefix("--config.data.") for word in flags.split()]
  assert {"source=tokens", f"path='{data}/*.bin'", "token_dtype=uint16"} <= {*told}
  figures = json.loads(last)
  tokenizer = load_tokenizer(f"huggingface:{data}/tokenizer.json")
  [tokens] = read_parts(DataConfig(source="tokens", path=f"{data}/*.bin"), tokenizer)
  assert figures["vocab_size"] == tokenizer.vocab_size <= 320
  assert figures["tokens"] == len(tokens) < sum(map(len, TEXTS)) / 2
  ends = np.flatnonzero(tokens == tokenizer.end_token)
  found = [tokenizer.decode(part) for part in np.split(tokens, ends + 1) if len(part)]
  assert found == list(TEXTS)


@pytest.mark.parametrize(
  "arguments, said",
  [(("--text=/nowhere/*",), "no file matches"), (("--vocab_size=9",), "Fix: give 300")],
)
def test_wrong_arguments_are_named_and_nothing_is_written(
  arguments, said, tmp_path, monkeypatch, capsys
):
  try:
    status = run(monkeypatch, f"--to={tmp_path}/data", *arguments)
  except SystemExit as left:
    status = left.code
  assert status == 2 and said in capsys.readouterr().err
  assert not (tmp_path / "data").exists()
