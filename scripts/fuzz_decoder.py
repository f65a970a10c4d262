"""Fuzzes everything that decodes bytes from the network, steered by coverage (atheris, libFuzzer).

Four targets, chosen by the first byte of an input: a protocol message; a frame of the transport; a
fragment in a wire codec; parts of payloads into `network.peers.Incoming`. The rule for all targets:
no exception but `MalformedMessage` and `CodecError` is raised, a decoded input encodes back to the
same bytes, memory stays bounded, parts make whole messages, once and in order. The seeds are real
frames.

  pip install -e .[fuzz]
  python scripts/fuzz_decoder.py [--runs=1000000] [--seed=N]     another seed every time
  python scripts/fuzz_decoder.py --replay=HEX        one input again, without atheris

Last line: {"inputs", "accepted", "malformed", "seconds", "seed"}. An input that breaks the rule is
printed in hex and ends the run with status 1; one that hangs or takes 1 GB of memory ends it too.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import json
import random
import shutil
import sys
import tempfile
import time
import traceback
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

try:
  import atheris
except ImportError:
  atheris = None

import numpy as np

# The fuzzed modules are instrumented, so that atheris sees the path of every input.
with atheris.instrument_imports(include=["ddiloco"]) if atheris else contextlib.nullcontext():
  from ddiloco.core import codec
  from ddiloco.network import endpoint, frames, peers, transport
  from ddiloco.protocol import messages

import common

from ddiloco import environment
from ddiloco.checks import require

MAX_INPUT_BYTES = 320
MAX_MEMORY_MB = 1024
STREAMS, LARGEST_BYTES, QUEUE_BYTES = 3, 64, 128
PROGRESS_SECONDS = 10.0
NETWORK_RUN = transport.RunIdentity("run", "plan", LARGEST_BYTES, QUEUE_BYTES)

# --- targets: each returns whether the input was accepted -----------------------------------------


def message(data: bytes) -> bool:
  """[with or without payload, with a right checksum or as it is; header...]"""
  first = data[0] if data else 0
  header = messages.with_checksum(data[1:]) if first % 2 else data[1:]
  return _message(header, b"payload" if first > 127 else None)


def _message(header: bytes, payload: bytes | None) -> bool:
  decoded = messages.decode(header, payload)
  again = messages.decode(*messages.encode(decoded))
  assert again == decoded, f"{decoded} became {again}"
  if payload is not None:  # the check before a payload's bytes are let in
    sender = transport.claimed_sender(decoded)
    transport.open_frame(sender, decoded.incarnation, header, payload)
  return True


def frame(data: bytes) -> bool:
  """[frame...]"""
  decoded = frames.decode(data)
  again = frames.decode(frames.encode(decoded)[frames.PREFIX.size :])
  assert again == decoded, f"{decoded} became {again}"
  return True


def fragment(data: bytes) -> bool:
  """[codec, fitting or not, payload...]: the size is the greatest that fits, or greater by one."""
  if len(data) < 2:
    return False
  name, payload = codec.CODECS[data[0] % len(codec.CODECS)], np.frombuffer(data[2:], np.uint8)
  sizes, bytes_of = range(2 * len(payload) + 2), functools.partial(codec.payload_bytes, codec=name)
  size = bisect.bisect_right(sizes, len(payload), key=bytes_of) - 1
  if data[1] % 8:  # mostly of the right length; a wrong length is refused at once
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


MOST_STEPS = 48


def parts(data: bytes) -> bool:
  """Four bytes for each of up to 48 steps: [action, numbers skipped, total, header]. As over real
  connections, the message numbers of a stream only grow; some parts are lost on the way."""
  inbox = _Inbox()
  incoming = _Incoming(peers.Peer("learner-0", STREAMS, inbox))  # type: ignore
  newest, last = [-1] * STREAMS, -1
  at: list[int | None] = [None] * STREAMS  # numbers of messages under way
  for place in range(0, min(len(data), 4 * MOST_STEPS) - 3, 4):
    what, ahead, total, header = data[place : place + 4]
    stream = what % STREAMS
    if what >= 224 and inbox.messages:
      inbox.messages.pop()
    elif what >= 192:
      at[stream] = None  # the stream's connection has broken
    elif (whole := at[stream]) is not None:
      count, at[stream] = len(inbox.messages), None
      incoming.arrived(stream, whole)
      for name, payload in inbox.messages[count:]:
        number = int(name)
        assert number > last, f"message {number} came after {last}"
        assert bytes(payload) == _content(number, len(payload)), "not what was sent"
        last = number
    else:
      number = newest[stream] + 1 + ahead % 4 * (ahead > 127)
      heard, at[stream] = _offer(incoming, stream, number, total, header, what)
      newest[stream] = max(newest[stream], number if heard else newest[stream])
    held = sum(each.size for each in incoming._assemblies.values())
    assert held + inbox.waiting_bulk("")[1] <= QUEUE_BYTES + LARGEST_BYTES + 4, "more than agreed"
  return last >= 0


class _Inbox:
  """A stand-in for the endpoint: messages that the role has not taken yet."""

  def __init__(self) -> None:
    self.run, self.buffers = NETWORK_RUN, endpoint.BufferPool()
    self.control_thread, self.bulk_threads = None, itertools.repeat(None)
    self.messages = list[tuple[bytes, np.ndarray]]()

  def put(self, sender: str, header: bytes, payload: np.ndarray, incarnation: int) -> None:
    self.messages.append((header, payload))

  def waiting_bulk(self, sender: str) -> tuple[int, int]:
    return len(self.messages), sum(len(h) + len(p) for h, p in self.messages)


class _Incoming(peers.Incoming):
  def _check(self, header: bytes) -> None:
    if header == b"?":
      raise messages.MalformedMessage("not from here")


def _offer(
  incoming, stream: int, number: int, total: int, header: int, what: int
) -> tuple[bool, int | None]:
  """Offers a part of a message as a stream does; returns whether it was read, and its number if it
  is let in and filled."""
  total = number * 7 % (LARGEST_BYTES + 16) if total < 192 else total  # mostly all streams agree
  name = b"?" if header % 16 == 15 else b"%d" % number
  place = frames.part(stream, STREAMS, total)
  size = place.stop - place.start + (what % 32 == 31)
  try:
    memory = incoming.room(stream, frames.Bulk(number, total, name), size)
  except (messages.MalformedMessage, peers.Forget):  # later parts must still arrive
    return True, None
  if memory is None:
    return False, None
  memory[:] = _content(number, total)[place]
  return True, number


def _content(number: int, size: int) -> bytes:
  return bytes((number + place) % 256 for place in range(size))


TARGETS: tuple[Callable[[bytes], bool], ...] = (message, frame, fragment, parts)

# --- real frames to start from --------------------------------------------------------------------


EXAMPLES = {
  int: 3,
  float: 0.25,
  str: "f32",
  bool: True,
  bytes: b"12345678",
  tuple[int, ...]: (3, 1),
  Mapping[int, int]: {3: 1},
  messages.FragmentState: messages.FragmentState(3),
}
EXAMPLES[messages.Publish] = messages.Publish(*(0,) * 9, {}, 0, 0, "", "f32")


def example(kind: type) -> Any:
  """A valid message or frame of this kind."""
  hints = typing.get_type_hints(kind)
  return kind(**{name: EXAMPLES[hint] for name, hint in hints.items() if name != "payload"})


def seeds() -> list[bytes]:
  """Inputs as the network carries them, at least one of every kind."""
  inputs = []
  for kind in messages.KINDS:
    header, bulk = messages.encode(example(kind))[0], kind in messages.BULK
    body = header[: -messages.CHECKSUM_BYTES]
    inputs.append((message, (b"\xfe" if bulk else b"\0") + header))
    inputs.append((message, (b"\xff" if bulk else b"\1") + body))
    inputs.append((frame, _framed(frames.Control(header))))
    inputs.append((frame, _framed(frames.Bulk(7, 9000, header))))
  inputs += [(frame, _framed(example(kind))) for kind in typing.get_args(frames.Frame)]
  values = np.random.default_rng(0).standard_normal(300).astype(np.float32)
  for number, name in enumerate(codec.CODECS):
    inputs.append((fragment, bytes([number, 1]) + codec.encode(values, name).tobytes()))
  inputs.append((parts, bytes([0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0] * 6)))
  inputs.append((parts, bytes([0, 0, 0, 0] * 4 + [1, 0, 0, 0, 2, 0, 0, 0] * 5 + [255] * 4)))
  return [bytes([TARGETS.index(target)]) + data for target, data in inputs]


def _framed(each: frames.Frame) -> bytes:
  """A frame without its prefix."""
  return frames.encode(each)[frames.PREFIX.size :]


# --- the run --------------------------------------------------------------------------------------


def try_one(data: bytes) -> bool:
  """Whether one input was accepted; raises an exception if the input breaks the rule."""
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
    """Runs until `runs` inputs are done, or an input breaks the rule."""
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
      self._end(environment.LOST)
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
      self._end(environment.FINISHED)

  def _end(self, status: int) -> NoReturn:
    shutil.rmtree(self.folder)
    environment.end_now(status)  # neither `return` nor an exception would get past libFuzzer


def main() -> None:
  replay = {"type": bytes.fromhex, "help": "one input, in hex"}
  args = common.options(__doc__, runs=(1_000_000, "inputs"), seed=int, replay=replay)
  if args.replay is not None:
    print("accepted" if try_one(args.replay) else "malformed")
    return
  require(atheris is not None, "atheris", "None", "must be installed", "pip install -e .[fuzz]")
  seed = args.seed or random.SystemRandom().randrange(1, 1 << 31)
  print(f"{args.runs} inputs, seed {seed}", flush=True)
  Fuzz(args.runs, seed).run()


if __name__ == "__main__":
  common.run_script(main)
