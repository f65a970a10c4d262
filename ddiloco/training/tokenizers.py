"""Text to token ids and back: bytes by default, SentencePiece and Hugging Face files optionally."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from ddiloco.config import ConfigError

# Names under which tokenizer files keep their end-of-text token, most common first.
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "[SEP]")


class TokenizerError(ConfigError):
  """A tokenizer cannot be loaded. The text names the setting, its value, the rule and the fix."""

  def __init__(self, value: str, rule: str, fix: str):
    super().__init__(f"data.tokenizer = {value!r}: {rule}. Fix: {fix}.")


class Tokenizer(Protocol):
  """What the data and the sampler need. Ids lie in [0, vocab_size)."""

  vocab_size: int
  end_token: int  # follows every document; also what an empty prompt starts from

  def encode(self, text: str) -> np.ndarray:
    """Token ids of `text`, without any special token, in the smallest fitting unsigned type."""
    ...

  def decode(self, ids: Iterable[int]) -> str:
    """The text of `ids`; what is not text becomes the replacement character, never an error."""
    ...


def token_dtype(vocab_size: int) -> np.dtype:
  """The smallest unsigned type that holds every id below `vocab_size`."""
  return np.min_scalar_type(vocab_size - 1)


class ByteTokenizer:
  """UTF-8 bytes are the tokens; byte 0, which text never contains, ends a document."""

  vocab_size = 256
  end_token = 0

  def encode(self, text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-8"), np.uint8)

  def decode(self, ids: Iterable[int]) -> str:
    # Byte 255 never occurs in UTF-8: an id that is no byte shows up as the replacement character.
    return bytes(i if 0 <= i < 256 else 255 for i in map(int, ids)).decode("utf-8", "replace")


class SentencePieceTokenizer:
  """A SentencePiece .model file (package `sentencepiece`)."""

  def __init__(self, file: str):
    setting = f"sentencepiece:{file}"
    package = _import("sentencepiece", setting)
    _check_file(file, setting)
    try:
      self._processor: Any = package.SentencePieceProcessor(model_file=file)
    except (OSError, RuntimeError) as error:
      raise _corrupt(setting, "a SentencePiece model", error) from error
    self.vocab_size = int(self._processor.vocab_size())
    ids = (self._processor.eos_id(), self._processor.bos_id())
    found = [i for i in ids if i >= 0]
    if not found:
      raise TokenizerError(
        setting,
        "the model has neither an end nor a begin token to separate documents with",
        "train it with eos_id >= 0",
      )
    self.end_token = found[0]

  def encode(self, text: str) -> np.ndarray:
    return np.asarray(self._processor.encode(text), token_dtype(self.vocab_size))

  def decode(self, ids: Iterable[int]) -> str:
    return self._processor.decode(_known(ids, self.vocab_size))


class HuggingFaceTokenizer:
  """A tokenizer.json file (package `tokenizers`)."""

  def __init__(self, file: str):
    setting = f"huggingface:{file}"
    package = _import("tokenizers", setting)
    _check_file(file, setting)
    try:
      self._tokenizer: Any = package.Tokenizer.from_file(file)
    except Exception as error:  # the package raises plain Exception and nothing finer
      raise _corrupt(setting, "a Hugging Face tokenizer.json", error) from error
    # Truncation and padding settings stored in the file would silently cut documents.
    self._tokenizer.no_truncation()
    self._tokenizer.no_padding()
    ids = self._tokenizer.get_vocab(with_added_tokens=True)
    self.vocab_size = max(ids.values(), default=-1) + 1  # ids may have gaps
    found = [ids[name] for name in END_TOKENS if name in ids]
    if not found:
      raise TokenizerError(
        setting,
        f"the file has none of the end-of-text tokens {', '.join(END_TOKENS)}",
        "add one as a special token and save the file again",
      )
    self.end_token = found[0]

  def encode(self, text: str) -> np.ndarray:
    ids = self._tokenizer.encode(text, add_special_tokens=False).ids
    return np.asarray(ids, token_dtype(self.vocab_size))

  def decode(self, ids: Iterable[int]) -> str:
    return self._tokenizer.decode(_known(ids, self.vocab_size), skip_special_tokens=True)


def load(setting: str) -> Tokenizer:
  """The tokenizer that `data.tokenizer` names: bytes, sentencepiece:FILE or huggingface:FILE.

  Raises:
    TokenizerError: the optional package is not installed, or the file is missing or corrupt.
  """
  kind, _, file = setting.partition(":")
  if setting == "bytes":
    return ByteTokenizer()
  if kind == "sentencepiece" and file:
    return SentencePieceTokenizer(file)
  if kind == "huggingface" and file:
    return HuggingFaceTokenizer(file)
  raise TokenizerError(
    setting, "must be bytes, sentencepiece:FILE or huggingface:FILE", "use 'bytes'"
  )


def _import(package: str, setting: str) -> ModuleType:
  try:
    return importlib.import_module(package)
  except ImportError as error:
    raise TokenizerError(
      setting,
      f"needs the optional package {package!r} ({error})",
      "pip install 'ddiloco[tokenizers]', or use 'bytes'",
    ) from error


def _check_file(file: str, setting: str) -> None:
  if not Path(file).is_file():
    raise TokenizerError(
      setting, f"there is no file {file!r}", "give the path of an existing tokenizer file"
    )


def _corrupt(setting: str, what: str, error: Exception) -> TokenizerError:
  rule = f"the file is not {what} ({type(error).__name__}: {str(error).strip()})"
  return TokenizerError(setting, rule, "check the file, or copy it again")


def _known(ids: Iterable[int], vocab_size: int) -> list[int]:
  """A model's vocabulary may be padded beyond the tokenizer's; such ids have no text."""
  return [i for i in map(int, ids) if 0 <= i < vocab_size]
