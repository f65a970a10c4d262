"""Makes a tokenizer and token files from text, for configs/dense.py:100m and larger.

    python scripts/make_tokens.py --to=data [--text='corpus/*.txt'] [--vocab_size=32768]

Trains a byte-level BPE on the text (by default the Python standard library), and writes
DIR/tokenizer.json and the tokens of all documents, each followed by its end token, as DIR/0.bin.
Needs `pip install -e '.[tokenizers]'`. It prints the flags with which a run reads them. Last line:
{"vocab_size", "tokens", "bytes_per_token"}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import common
import numpy as np

from ddiloco.checks import ConfigError, require
from ddiloco.config import DataConfig
from ddiloco.training.tokens import END_TOKENS, load_tokenizer, read_parts

MOST_WITH_UINT16 = 1 << 16
SLICE = 1 << 20  # bytes of text that the trainer is given at a time


def train_bpe(text: bytes, vocab_size: int, to: Path) -> None:
  """Writes a byte-level BPE of `vocab_size` tokens, the first of which ends a document."""
  from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

  def slices() -> Iterator[str]:
    for begin in range(0, len(text), SLICE):
      yield text[begin : begin + SLICE].decode("utf-8", errors="replace")

  tokenizer = Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=vocab_size,
    special_tokens=[END_TOKENS[0]],
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # so that any text has tokens
  )
  tokenizer.train_from_iterator(slices(), trainer)
  tokenizer.save(str(to))


def main() -> int:
  to = {"type": Path, "required": True, "help": "is made if needed"}
  options = common.options(__doc__, to=to, text=("", "glob of UTF-8 files"), vocab_size=32_768)
  size = options.vocab_size
  data = DataConfig(source="text" if options.text else "stdlib", path=options.text)
  try:
    require(size >= 300, "--vocab_size", size, "each byte has a token", "give 300 or more")
    [text] = read_parts(data, load_tokenizer("bytes"))
    options.to.mkdir(parents=True, exist_ok=True)
    file = options.to / "tokenizer.json"
    train_bpe(text.tobytes(), size, file)
    setting = f"huggingface:{file}"
    tokenizer = load_tokenizer(setting)
    [tokens] = read_parts(data, tokenizer)
    dtype = "uint16" if tokenizer.vocab_size <= MOST_WITH_UINT16 else "uint32"
    tokens.astype(np.dtype(dtype).newbyteorder("<")).tofile(options.to / "0.bin")
  except (ConfigError, ImportError, OSError) as error:
    print(f"make_tokens.py: {error}", file=sys.stderr)
    return 2
  print(
    f"--config.data.source=tokens --config.data.path='{options.to}/*.bin' "
    f"--config.data.token_dtype={dtype} "
    f"--config.data.tokenizer={setting} --config.model.vocab_size={tokenizer.vocab_size}"
  )
  figures = {"vocab_size": tokenizer.vocab_size, "tokens": len(tokens)}
  print(json.dumps({**figures, "bytes_per_token": round(len(text) / len(tokens), 2)}))
  return 0


if __name__ == "__main__":
  common.run_script(main)
