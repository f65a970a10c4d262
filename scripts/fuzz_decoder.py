"""Fuzzes everything that decodes bytes from the network, steered by coverage (atheris, libFuzzer).

Five targets, chosen by the first byte of an input: a protocol message as it is on the wire; the
same with a right envelope, so that every input reaches the fields; a frame of the transport; a
fragment in a wire codec; a series of chunks into `network.transfers.Incoming`. The rule for all:
nothing but `MalformedMessage` and `CodecError` comes out, what decodes encodes back to the same,
memory stays bounded, chunks make whole messages, once and in order. It starts from real frames.

  pip install -e .[fuzz]
  python scripts/fuzz_decoder.py [--runs=1000000] [--seed=N]
  python scripts/fuzz_decoder.py --replay=HEX        one input again, without atheris

Last line: {"inputs", "accepted", "malformed", "seconds", "seed"}. An input that breaks the rule is
printed in hex and ends the run with status 1; one that hangs or takes 1 GB of memory ends it too.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import functools
import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

try:
  import atheris
except ImportError:
  atheris = None

import numpy as np
from msgspec import msgpack

# What is fuzzed is imported so that atheris sees which way every input goes.
with atheris.instrument_imports(include=["ddiloco"]) if atheris else contextlib.nullcontext():
  from ddiloco.core import codec
  from ddiloco.network import frames, handshake, transfers, transport
  from ddiloco.protocol import messages, wire

RUN, PLAN = "run", "0123456789abcdef"
MAX_INPUT_BYTES = 320
MAX_MEMORY_MB = 1024
CHUNK_BYTES, LARGEST_BYTES, QUEUE_BYTES = 16, 64, 128
EXIT_MALFORMED, EXIT_USAGE = 1, 2
PROGRESS_SECONDS = 10.0
NETWORK_RUN = handshake.RunIdentity(RUN, PLAN, LARGEST_BYTES, QUEUE_BYTES)

# --- targets: each returns whether the input was accepted -----------------------------------------


def message(data: bytes) -> bool:
  """[with or without payload, with a right seal or as it is; header...]"""
  first = data[0] if data else 0
  header = wire.seal(data[1:]) if first % 2 else data[1:]
  return _message(header, b"payload" if first > 127 else None)


def fields(data: bytes) -> bool:
  """[kind, fields as msgpack...] with the envelope that this run has."""
  kinds = list(messages.KINDS.values())
  kind = kinds[data[0] % len(kinds)] if data else kinds[0]
  bulk = kind in messages.BULK
  count = len(kind.__dataclass_fields__) - bulk
  start = msgpack.encode((kind.__name__, [None] * count))[:-count]  # a byte for each None
  header = wire.seal(wire.envelope(RUN, PLAN) + start + data[1:])
  return _message(header, b"payload" if bulk else None)


def _message(header: bytes, payload: bytes | None) -> bool:
  decoded = wire.decode(header, payload, RUN, PLAN)
  again = wire.decode(*wire.encode(decoded, RUN, PLAN), RUN, PLAN)
  assert again == decoded, f"{decoded} became {again}"
  if payload is not None:  # what is asked before its bytes are let in
    sender = transport.claimed_sender(decoded)
    handshake.check_header(NETWORK_RUN, sender, decoded.incarnation, header)
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
  sizes, bytes_of = range(2 * len(payload) + 2), functools.partial(codec.payload_bytes, codec=name)
  size = bisect.bisect_right(sizes, len(payload), key=bytes_of) - 1
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


MOST_STEPS = 32


def chunks(data: bytes) -> bool:
  """Six bytes for each of up to 32 steps: [what, transfer, offset, total, length, header]."""
  incoming = transfers.Incoming(CHUNK_BYTES, 0, LARGEST_BYTES, QUEUE_BYTES, _check)
  untaken: list[tuple[int, int]] = []  # bytes of payload and header
  last, accepted = -1, False
  for at in range(0, min(len(data), 6 * MOST_STEPS) - 5, 6):
    what, ahead, *shape = data[at : at + 6]
    if what < 192:
      far = what >= 160
      _accept(incoming, ahead << what % 54 if far else incoming.expected + ahead - 8, *shape)
    elif what < 224:
      incoming.skip_to(incoming.expected + ahead % 8)
    elif untaken:
      incoming.taken(*untaken.pop())
    for header, payload in incoming.deliver():
      number = int(header)
      assert number > last, f"transfer {number} came after {last}"
      assert bytes(payload) == _content(number, 0, len(payload)), "not what was sent"
      last, accepted = number, True
      untaken.append((len(payload), len(header)))
    _bounded(incoming, sum(size for size, _ in untaken))
  return accepted


def _accept(incoming, number: int, offset: int, total: int, length: int, header: int) -> None:
  number, total = max(0, number), total % (LARGEST_BYTES + 16)
  offset = offset % 8 * CHUNK_BYTES + (offset % 32 == 31)
  size = max(0, min(CHUNK_BYTES, total - offset)) if length < 224 else length % 32
  name = b"?" if header % 16 == 15 else b"%d" % number
  chunk = frames.Chunk(b"12345678", number, offset, total, name)
  with contextlib.suppress(wire.MalformedMessage):  # what follows it must still arrive
    incoming.accept(chunk, memoryview(_content(number, offset, size)))


def _check(header: bytes) -> None:
  if header == b"?":
    raise wire.MalformedMessage("not from here")


def _bounded(incoming, untaken_bytes: int) -> None:
  held = sum(len(each.payload) for each in incoming._assemblies.values())
  held += sum(len(done[1]) for done in incoming._complete.values() if done)
  assert incoming.bytes == held + untaken_bytes, "miscounted"
  assert incoming.bytes <= QUEUE_BYTES + LARGEST_BYTES, "more than agreed"
  numbers = [*incoming._assemblies, *incoming._complete]
  assert all(n - incoming.expected < transfers.MAX_AHEAD for n in numbers), "no bound"


def _content(number: int, offset: int, size: int) -> bytes:
  return bytes((number + place) % 256 for place in range(offset, offset + size))


TARGETS: tuple[Callable[[bytes], bool], ...] = (message, fields, frame, fragment, chunks)

# --- real frames to start from --------------------------------------------------------------------


EXAMPLES = {
  int: 3,
  float: 0.25,
  str: "f32",
  bool: True,
  bytes: b"12345678",
  tuple[int, ...]: (3, 1),
  tuple[tuple[int, int], ...]: ((3, 1),),
}


def example(kind: type) -> Any:
  """A valid message or frame of this kind."""
  hints = typing.get_type_hints(kind)
  return kind(**{name: EXAMPLES[hint] for name, hint in hints.items() if name != "payload"})


def seeds() -> list[bytes]:
  """Inputs as the network carries them, at least one of every kind."""
  inputs = []
  for number, kind in enumerate(messages.KINDS.values()):
    header = wire.encode(example(kind), RUN, PLAN)[0]
    body = header[: -wire.SEAL_BYTES]
    _, values = msgpack.decode(body)[-1]
    packed = b"".join(map(msgpack.encode, values))
    inputs.append((message, (b"\xfe" if kind in messages.BULK else b"\0") + header))
    inputs.append((message, (b"\xff" if kind in messages.BULK else b"\1") + body))
    inputs.append((fields, bytes([number]) + packed))
    inputs.append((frame, frames.encode(frames.Control(header))))
    inputs.append((frame, frames.encode(frames.Chunk(b"12345678", 7, 4096, 9000, header))))
  inputs += [(frame, frames.encode(example(kind))) for kind in typing.get_args(frames.Frame)]
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
  except (wire.MalformedMessage, codec.CodecError) as error:
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
