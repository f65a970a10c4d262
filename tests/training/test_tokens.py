"""Tokenizers, loaded from real files that the tests train themselves."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.checks import lasts
from ddiloco.config import ConfigError, DataConfig, from_dict
from ddiloco.training import data as data_lib
from ddiloco.training import tokens

SENTENCES = [f"learner {i} sends fragment {i * 7 % 11} to its shard" for i in range(200)]


def train_sentencepiece(path, **ids):
  package = pytest.importorskip("sentencepiece")
  model = io.BytesIO()
  package.SentencePieceTrainer.train(
    sentence_iterator=iter(SENTENCES), model_writer=model, vocab_size=45, minloglevel=2, **ids
  )
  path.write_bytes(model.getvalue())
  return path


@pytest.fixture(scope="module")
def sentencepiece_file(tmp_path_factory):
  return train_sentencepiece(tmp_path_factory.mktemp("sp") / "tiny.model")


@pytest.fixture(scope="module")
def huggingface_file(tmp_path_factory):
  package = pytest.importorskip("tokenizers")
  tokenizer = package.Tokenizer(package.models.BPE())
  tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = package.decoders.ByteLevel()
  trainer = package.trainers.BpeTrainer(
    vocab_size=300,
    special_tokens=["<|endoftext|>"],
    initial_alphabet=package.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  tokenizer.train_from_iterator(SENTENCES, trainer)
  tokenizer.enable_truncation(max_length=4)  # must not cut documents,
  tokenizer.enable_padding(length=999)  # nor fill them, nor begin them
  end = ("<|endoftext|>", tokenizer.token_to_id("<|endoftext|>"))
  processor = package.processors.TemplateProcessing(single=f"{end[0]} $A", special_tokens=[end])
  tokenizer.post_processor = processor
  path = tmp_path_factory.mktemp("hf") / "tiny.json"
  tokenizer.save(str(path))
  return path


@given(st.text())
def test_bytes_round_trip(text):
  tokenizer = tokens.load_tokenizer("bytes")
  ids = tokenizer.encode(text)
  assert ids.dtype == np.uint8 and len(ids) == len(text.encode())
  assert tokenizer.decode(ids) == text


def test_bytes_decode_what_is_not_text():
  tokenizer = tokens.BYTES
  assert (tokenizer.vocab_size, tokenizer.end_token) == (256, 0)
  assert tokenizer.decode([0x61, 0xC3, 0x62]) == "a\ufffdb"  # a cut-off two-byte character
  assert tokenizer.decode(np.array([97, 256, 98])) == "ab"  # an id that is no byte


def test_token_dtype():
  assert [tokens.token_dtype(n) for n in (256, 257, 65_536, 65_537)] == [
    np.uint8,
    np.uint16,
    np.uint16,
    np.uint32,
  ]


def test_sentencepiece(sentencepiece_file):
  tokenizer = tokens.load_tokenizer(f"sentencepiece:{sentencepiece_file}")
  ids = tokenizer.encode(SENTENCES[3])
  assert tokenizer.vocab_size == 45 and tokenizer.end_token == 2
  assert ids.dtype == np.uint8 and 0 < len(ids) < len(SENTENCES[3])
  assert tokenizer.decode(ids) == SENTENCES[3]
  assert tokenizer.decode([*ids, 999]) == SENTENCES[3]  # a padded vocabulary


def test_huggingface(huggingface_file):
  tokenizer = tokens.load_tokenizer(f"huggingface:{huggingface_file}")
  ids = tokenizer.encode(SENTENCES[3])
  assert tokenizer.end_token == 0 and 256 < tokenizer.vocab_size <= 300
  assert ids.dtype == np.uint16 and 4 < len(ids) < len(SENTENCES[3])
  assert tokenizer.decode(ids) == SENTENCES[3]
  assert tokenizer.decode([*ids, tokenizer.end_token, 999]) == SENTENCES[3]


@pytest.mark.parametrize("kind", ["sentencepiece", "huggingface"])
def test_a_corpus_of_subwords(kind, tmp_path, request):
  file = request.getfixturevalue(f"{kind}_file")
  for i in range(20):
    (tmp_path / f"{i:02}.txt").write_text("\n".join(SENTENCES[i * 10 : i * 10 + 10]))
  data = DataConfig(
    source="text",
    path=str(tmp_path / "*.txt"),
    tokenizer=f"{kind}:{file}",
    sequence_length=8,
    heldout_sequences=2,
  )
  corpus = data_lib.open_corpus(data)
  (tokens,) = corpus.parts
  end = corpus.tokenizer.end_token
  assert (tokens == end).sum() == 20 and tokens[-1] == end
  first = tokens[: int(np.argmax(tokens == end))]
  assert corpus.tokenizer.decode(first).split() == "\n".join(SENTENCES[:10]).split()


@pytest.mark.parametrize(
  ("kind", "package"), [("sentencepiece", "sentencepiece"), ("huggingface", "tokenizers")]
)
def test_missing_package_missing_file_and_corrupt_file(kind, package, tmp_path, monkeypatch):
  pytest.importorskip(package)
  corrupt = tmp_path / "corrupt"
  corrupt.write_bytes(b"\x93 not a tokenizer")
  for file in (tmp_path / "gone", corrupt):
    with pytest.raises(ConfigError) as caught:
      tokens.load_tokenizer(f"{kind}:{file}")
    text = str(caught.value)
    assert f"data.tokenizer = '{kind}:{file}': cannot be loaded" in text
    assert ("No such file" in text) == (file != corrupt) and "Fix:" in text
    assert lasts(caught.value)
  with monkeypatch.context() as patch, pytest.raises(ConfigError, match="Stale") as caught:
    stale = OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(corrupt))
    patch.setattr(Path, "read_bytes", mock.Mock(side_effect=stale))
    tokens.load_tokenizer(f"{kind}:{corrupt}")
  assert not lasts(caught.value), "a role that starts again may read it"
  monkeypatch.setitem(sys.modules, package, None)
  with pytest.raises(ConfigError, match=r"pip install 'ddiloco\[tokenizers\]'"):
    tokens.load_tokenizer(f"{kind}:{corrupt}")


@pytest.mark.parametrize("end, ids", [(0, {"eos_id": 0, "unk_id": 2}), (1, {"eos_id": -1})])
def test_the_end_token_of_sentencepiece_else_its_begin_token_ends_documents(tmp_path, end, ids):
  file = train_sentencepiece(tmp_path / "tiny.model", **ids)
  assert tokens.load_tokenizer(f"sentencepiece:{file}").end_token == end


def test_tokenizers_without_an_end_token(tmp_path):
  file = train_sentencepiece(tmp_path / "tiny.model", eos_id=-1, bos_id=-1)
  with pytest.raises(ConfigError, match="eos_id"):
    tokens.load_tokenizer(f"sentencepiece:{file}")


def test_a_huggingface_token_that_was_added_counts(huggingface_file, tmp_path):
  package = pytest.importorskip("tokenizers")
  (tmp_path / "tiny.json").write_text(
    huggingface_file.read_text().replace("<|endoftext|>", "<strange>")
  )
  tokenizer = package.Tokenizer.from_file(str(tmp_path / "tiny.json"))
  known = tokenizer.get_vocab_size()
  deepseek = "<\uff5cend\u2581of\u2581sentence\uff5c>"
  # Each counts before those that the file had already. Gemma's has the last two.
  for number, name in enumerate((deepseek, "</s>", "<eos>"), known):
    tokenizer.add_special_tokens([name])
    tokenizer.save(str(tmp_path / "more.json"))
    found = tokens.load_tokenizer(f"huggingface:{tmp_path / 'more.json'}")
    assert (found.end_token, found.vocab_size) == (number, number + 1)


def test_huggingface_file_without_an_end_token(huggingface_file, tmp_path):
  content = json.loads(huggingface_file.read_text().replace("<|endoftext|>", "<strange>"))
  (tmp_path / "tiny.json").write_text(json.dumps(content))
  with pytest.raises(ConfigError, match="end-of-text"):
    tokens.load_tokenizer(f"huggingface:{tmp_path / 'tiny.json'}")


@pytest.mark.parametrize("kind", ["sentencepiece", "huggingface"])
def test_a_file_may_be_in_the_home_folder(kind, monkeypatch, request):
  """No shell expands the tilde behind the colon."""
  file = request.getfixturevalue(f"{kind}_file")
  monkeypatch.setenv("HOME", str(file.parent))
  data = DataConfig(source="synthetic", tokenizer=f"{kind}:~/{file.name}")
  assert tokens.load_tokenizer(data.tokenizer).vocab_size > 2
  assert tokens.shared_files(data.tokenizer) and tokens.is_here(data, 0)


@pytest.mark.parametrize("setting", ["words", "words:file", "huggingface:"])
def test_unknown_setting(setting):
  with pytest.raises(ConfigError, match="must be bytes, sentencepiece:FILE"):
    tokens.load_tokenizer(setting)


def test_where_others_train_a_tokenizer_is_not_asked_if_it_is_not_here_or_takes_long(
  huggingface_file, monkeypatch
):
  """A launch from where the package is missing was refused; a plan took 9 s for the stdlib."""
  small = {"data": {"source": "synthetic", "tokenizer": f"huggingface:{huggingface_file}"}}
  config = from_dict({**small, "model": {"vocab_size": 2}})
  with pytest.raises(ConfigError, match=r"model\.vocab_size = 2: must be at least"):
    data_lib.check_here(config)
  data = {**small["data"], "source": "stdlib"}
  monkeypatch.setattr(tokens.Tokenizer, "encode", lambda *_: pytest.fail("it takes long"))
  data_lib.check_here(from_dict({"data": data}))
  monkeypatch.setitem(sys.modules, "tokenizers", None)
  data_lib.check_here(config)
