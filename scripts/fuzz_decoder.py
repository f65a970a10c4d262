"""Fuzzes everything that decodes bytes from the network, steered by coverage (atheris, libFuzzer).

Five targets, chosen by the first byte of an input: a protocol message as it is on the wire; the
same with a right envelope, so that every input reaches the fields; a frame of the transport; a
fragment in a wire codec; and a series of chunks into `runtime.transfers.Incoming`. The rule for all:
nothing but `MalformedMessage` and `CodecError` comes out, what decodes encodes back to the same,
memory stays bounded, and chunks make whole messages, once and in order. It starts from real frames.

  pip install -e .[fuzz]
  python scripts/fuzz_decoder.py [--runs=1000000] [--seed=N]
  python scripts/fuzz_decoder.py --replay=HEX        one input again, without atheris

Last line: {"inputs", "accepted", "malformed", "seconds", "seed"}. An input that breaks the rule is
printed in hex and ends the run with status 1; one that hangs or takes 1 GB of memory ends it too.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

try:
  import atheris
except ImportError:
  atheris = None

import msgpack
import numpy as np


def import_decoders() -> None:
  """What is fuzzed: imported here so that atheris sees where every input goes."""
  global codec, frames, greetings, messages, transfers
  from ddiloco.core import codec, messages
  from ddiloco.runtime import frames, greetings, transfers


if atheris is None:
  import_decoders()
else:
  with atheris.instrument_imports(include=["ddiloco.core", "ddiloco.runtime"]):
    import_decoders()

RUN, PLAN = "run", "0123456789abcdef"
MAX_INPUT_BYTES = 2048
MAX_MEMORY_MB = 1024
EXIT_MALFORMED, EXIT_USAGE = 1, 2
PROGRESS_SECONDS = 10.0

# --- targets: each returns whether the input was accepted -----------------------------------------


def message(data: bytes) -> bool:
  """[with or without payload, header...]"""
  return _message(data[1:], b"payload" if data[:1] > b"\x7f" else None)


def fields(data: bytes) -> bool:
  """[kind, fields as msgpack...] with the envelope that this run has."""
  kinds = list(messages.KINDS.values())
  kind = kinds[data[0] % len(kinds)] if data else kinds[0]
  bulk = kind in messages.BULK
  count = len(kind.__dataclass_fields__) - bulk
  envelope = (messages.WIRE_FORMAT, RUN, PLAN, kind.__name__)
  packer = msgpack.Packer(autoreset=False)
  packer.pack_array_header(len(envelope) + count)
  for value in envelope:
    packer.pack(value)
  return _message(packer.bytes() + data[1:], b"payload" if bulk else None)


def _message(header: bytes, payload: bytes | None) -> bool:
  decoded = messages.decode(header, payload, RUN, PLAN)
  again = messages.decode(*messages.encode(decoded, RUN, PLAN), RUN, PLAN)
  assert again == decoded, f"{decoded} became {again}"
  return True


def frame(data: bytes) -> bool:
  """[frame...]"""
  decoded = frames.decode(data)
  again = frames.decode(frames.encode(decoded))
  assert again == decoded, f"{decoded} became {again}"
  return True


def fragment(data: bytes) -> bool:
  """[codec, fitting or not, payload...]: the size is the greatest that fits, or one too many."""
  if len(data) < 2:
    return False
  name, payload = codec.CODECS[data[0] % len(codec.CODECS)], np.frombuffer(data[2:], np.uint8)
  sizes = range(2 * len(payload) + 1)
  size = max(n for n in sizes if codec.payload_bytes(n, name) <= len(payload))
  if data[1] % 8:  # mostly of the right length; the wrong one is refused at once
    payload = payload[: codec.payload_bytes(size, name)]
  values = codec.decode(payload, size + (data[1] % 16 == 8), name)
  assert values.dtype == np.float32 and values.shape == (size,)
  again = codec.decode(codec.encode(values, name), size, name)
  if name in ("f32", "bf16"):
    assert np.array_equal(values, again, equal_nan=True)
    return True
  for start in range(0, size, codec.BLOCK):
    before, after = (x[start : start + codec.BLOCK].astype(np.float64) for x in (values, again))
    if not np.isfinite(before).all():
      assert np.isnan(after).all()
      continue
    levels = 127 if name == "int8" else 7
    step = max(np.abs(before).max() / levels, 2.0**-149)  # the smallest float32 is one too
    assert np.abs(after - before).max() <= 0.5001 * step + 2.0**-149, f"off in block at {start}"
  return True


CHUNK_BYTES, LARGEST_BYTES, QUEUE_BYTES = 16, 64, 128
MOST_WAITING = 1 << 10  # messages that are kept for later, whole or in parts


def chunks(data: bytes) -> bool:
  """Six bytes for each step: [what, transfer, offset, total, length, header]."""
  run = greetings.Run(RUN, PLAN, LARGEST_BYTES, QUEUE_BYTES)
  check = functools.partial(greetings.check_header, run, "learner/0")
  incoming = transfers.Incoming(CHUNK_BYTES, 0, LARGEST_BYTES, QUEUE_BYTES, check)
  untaken: list[int] = []
  last, accepted = -1, False
  for at in range(0, len(data) - 5, 6):
    what, ahead, offset, total, length, header = data[at : at + 6]
    if what < 192:
      number = incoming.expected + ahead - 8 if what < 128 else ahead << (what - 128) % 54
      _accept(incoming, max(0, number), (offset, total, length, header))
    elif what < 224:
      incoming.skip_to(incoming.expected + ahead % 8)
    elif untaken:
      incoming.taken(untaken.pop())
    for header_bytes, payload in incoming.deliver():
      number = _push(header_bytes).round
      assert number > last, f"transfer {number} came after {last}"
      assert bytes(payload) == _content(number, 0, len(payload)), "not what was sent"
      last, accepted = number, True
      untaken.append(len(payload))
    held = [len(a.payload) for a in incoming._assemblies.values()]
    held += [len(done[1]) for done in incoming._complete.values() if done]
    assert incoming.bytes == sum(held) + sum(untaken), "miscounted"
    assert incoming.bytes - sum(untaken) <= QUEUE_BYTES + LARGEST_BYTES
    assert len(incoming._assemblies) + len(incoming._complete) <= MOST_WAITING, "no bound"
  return accepted


def _accept(incoming: transfers.Incoming, number: int, shape: tuple[int, int, int, int]) -> None:
  offset, total, length, header = shape
  total = total % (LARGEST_BYTES + 16)
  offset = offset % 8 * CHUNK_BYTES + (offset % 32 == 31)
  size = max(0, min(CHUNK_BYTES, total - offset)) if length < 224 else length % 32
  push = messages.Push(header % 16 == 15, 0, 0, number, 0, 1, 1, 0, "f32")
  chunk = frames.Chunk(b"12345678", number, offset, total, messages.encode(push, RUN, PLAN)[0])
  chunk = frames.decode(frames.encode(chunk))
  try:
    incoming.accept(chunk, memoryview(_content(number, offset, size)))
  except messages.MalformedMessage:
    pass  # the series goes on: what follows must still arrive


def _push(header: bytes) -> messages.Push:
  return messages.decode(header, b"", RUN, PLAN)


def _content(number: int, offset: int, size: int) -> bytes:
  return bytes((number + place) % 256 for place in range(offset, offset + size))


TARGETS: tuple[Callable[[bytes], bool], ...] = (message, fields, frame, fragment, chunks)

# --- real frames to start from --------------------------------------------------------------------


def seeds() -> list[bytes]:
  """Inputs as the network carries them, at least one of every kind."""
  some = [
    messages.Hello(3, 1),
    messages.Report(3, 1, 17, 0.25, (4, -1), (2, 0), False),
    messages.Push(3, 1, 5, 2**33, 7, 24, 24_576, 900, "int4", b""),
    messages.Goodbye(3, 1),
    messages.Welcome(1, 0, 2, 900, (1, 3, 5)),
    messages.Pull(1, 0, 2, 5, 2**33, 7),
    messages.Publish(1, 0, 2, 5, 2**33, 8, 7, 900, 10**9, (0, 3), 2**33, "bf16", b""),
    messages.Refusal(1, 0, 2, 5, 2**33, True, "norm 1e+06 is over 10 x 1"),
  ]
  inputs = []
  for each in some:
    header, payload = messages.encode(each, RUN, PLAN)
    kind = list(messages.KINDS).index(type(each).__name__)
    packed = b"".join(map(msgpack.packb, msgpack.unpackb(header)[4:]))
    inputs.append((message, (b"\0" if payload is None else b"\xff") + header))
    inputs.append((fields, bytes([kind]) + packed))
    inputs.append((frame, frames.encode(frames.Control(header))))
    inputs.append((frame, frames.encode(frames.Chunk(b"12345678", 7, 4096, 9000, header))))
  for each in (
    frames.Greeting(RUN, PLAN, "learner/3", 7, b"12345678", b"", 0, 1 << 20, 2),
    frames.Refused(b"12345678", True, "a newer incarnation is here"),
    frames.Unknown(),
    frames.Beat(),
    frames.Acknowledged((3, 0, 3, 1 << 20)),
  ):
    inputs.append((frame, frames.encode(each)))
  values = np.random.default_rng(0).standard_normal(300).astype(np.float32)
  for number, name in enumerate(codec.CODECS):
    inputs.append((fragment, bytes([number, 1]) + codec.encode(values, name).tobytes()))
  whole = [bytes([0, 8, at, 50, 0, 0]) for at in range(4)]
  inputs.append((chunks, b"".join([*whole, *whole[::-1], bytes([255] * 6)])))
  inputs.append((chunks, b"".join(bytes([0, 8 + n, 0, 16, 0, 0]) for n in (2, 1, 3, 0))))
  return [bytes([TARGETS.index(target)]) + data for target, data in inputs]


# --- the run --------------------------------------------------------------------------------------


def try_one(data: bytes) -> bool:
  """Whether one input was accepted; whatever is not the rule comes out as an exception."""
  if not data:
    return False
  try:
    return TARGETS[data[0] % len(TARGETS)](data[1:])
  except (messages.MalformedMessage, codec.CodecError) as error:
    assert len(str(error)) < 1000, "an error repeats what it was sent"
    return False


class Fuzz:
  """Counts inputs, and ends the process after the last: libFuzzer never returns to Python."""

  def __init__(self, runs: int, seed: int):
    self.runs, self.seed = runs, seed
    self.inputs = self.accepted = 0
    self.began = self.said = time.monotonic()
    self.folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    (self.folder / "corpus").mkdir()
    for number, data in enumerate(seeds()):
      (self.folder / "corpus" / f"seed-{number}").write_bytes(data)

  def run(self) -> NoReturn:
    """Until `runs` inputs are done, or one breaks the rule."""
    options = {
      "seed": self.seed,
      "max_len": MAX_INPUT_BYTES,
      "rss_limit_mb": MAX_MEMORY_MB,
      "timeout": 20,
      "verbosity": 0,
      "len_control": 0,
      "artifact_prefix": f"{self.folder}/",
    }
    arguments = [f"-{name}={value}" for name, value in options.items()]
    atheris.Setup([sys.argv[0], *arguments, str(self.folder / "corpus")], self.one)
    atheris.Fuzz()
    raise SystemExit("libFuzzer ended before the last input")

  def one(self, data: bytes) -> None:
    """One input."""
    try:
      self.accepted += try_one(data)
    except Exception:
      traceback.print_exc()
      print(f"input {self.inputs} of seed {self.seed} breaks the rule; once more with\n")
      print(f"  python scripts/fuzz_decoder.py --replay={data.hex()}")
      self._end(EXIT_MALFORMED)
    self.inputs += 1
    now = time.monotonic()
    if now - self.said >= PROGRESS_SECONDS:
      self.said = now
      print(f"{self.inputs} inputs, {self.accepted} accepted, {now - self.began:.0f} s", flush=True)
    if self.inputs == self.runs:
      result = {
        "inputs": self.inputs,
        "accepted": self.accepted,
        "malformed": self.inputs - self.accepted,
        "seconds": round(now - self.began, 1),
        "seed": self.seed,
      }
      print(json.dumps(result))
      self._end(0)

  def _end(self, status: int) -> NoReturn:
    shutil.rmtree(self.folder)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # neither `return` nor an exception would get past libFuzzer


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--runs", type=int, default=1_000_000, help="inputs")
  parser.add_argument("--seed", type=int, help="default: another one every time")
  parser.add_argument("--replay", type=bytes.fromhex, help="one input, in hex")
  args = parser.parse_args()
  if args.replay is not None:
    print("accepted" if try_one(args.replay) else "malformed")
    return
  if atheris is None:
    print("scripts/fuzz_decoder.py needs atheris. Fix: pip install -e .[fuzz]", file=sys.stderr)
    raise SystemExit(EXIT_USAGE)
  if args.runs < 1:
    parser.error(f"--runs={args.runs}: must be at least 1")
  seed = args.seed if args.seed else random.SystemRandom().randrange(1, 1 << 31)
  print(f"{args.runs} inputs, seed {seed}", flush=True)
  Fuzz(args.runs, seed).run()


if __name__ == "__main__":
  main()
