"""Every message survives the wire; everything else is refused by name."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import msgpack

from ddiloco.protocol.messages import (
  CHECKSUM_BYTES,
  KINDS,
  MAX_HEADER_BYTES,
  MAX_LEARNERS,
  NOTHING,
  ForwardMoments,
  FragmentState,
  Goodbye,
  MalformedMessage,
  Moments,
  ProvideMoments,
  Publish,
  Pull,
  Push,
  Recover,
  Recovered,
  Rejection,
  Replica,
  Replicated,
  Report,
  RequestMoments,
  RequestValue,
  Value,
  Welcome,
  decode,
  encode,
  frame_bytes,
  with_checksum,
)
from ddiloco.protocol.values import replace

LEAST = {  # of numbers that may be negative
  **dict.fromkeys(("rounds", "base_round"), -2),
  **dict.fromkeys(("learner", "versions", "base_version", "round", "fragment"), -1),
  **dict.fromkeys(("last_round", "merged_rounds", "merged_global_steps", "momentum_round"), -1),
}
BYTES = bytes(range(64))
STATE = FragmentState(5, 8, 10**9, {0: 2**33, 3: 2**33}, {0: 900}, 2**33, 900, 3)
HEADER = Publish(1, 0, 2, 5, 2**33, 8, 9, 900, 10**9, {0: 2**33}, 3, 7, "ab12", "bf16")
EXAMPLES = [
  Report(3, 1, 17, 0.25, (4, -1), (2**33, -2), (2, 0), False, 3),
  Report(-1, 0, 0, 0.0, (), (), (), False, 0, joins=True, whole=True),
  Push(3, 1, 5, 2**33, 7, 24, 24_576, 3, 2**52, "int4", BYTES),
  Value(3, 1, HEADER, 3, 2**52, BYTES),
  RequestMoments(3, 1, (0, 5)),
  Moments(3, 1, 5, 2, 880, BYTES),
  Goodbye(3, 1),
  Welcome(1, 0, 2, 900, (1, 3, 5), (-1, 2**33, 7), 3),
  Pull(1, 0, 2, 5, 2**33, 7, 3),
  RequestValue(1, 0, 2, 5),
  ProvideMoments(1, 0, 2, 5),
  ForwardMoments(1, 0, 2, 5, 0, 1, 2, 880, BYTES),
  Publish(1, 0, 2, 5, 2**33, 8, 9, 900, 10**9, {0: 2**33}, 3, 7, "ab12", "bf16", BYTES),
  Publish(1, 0, 2, 5, -1, 0, -2, 0, 0, {}, 0, 0, "", "f32", BYTES),
  Rejection(1, 0, 2, -1, -1, True, "norm 1e+06 is over sync.max_norm_ratio (10) x 1"),
  Replica(1, 7, 1, STATE, 2**33, -2, "f32", BYTES),
  Replicated(2, 7, 5, 8, True),
  Recover(1, 8),
  Recovered(2, 7, 8, (1, 3, 5), (1 << 40, 7, NOTHING)),
]


def header_of(message) -> list:
  """[kind, fields...]"""
  return msgpack.decode(encode(message)[0][:-CHECKSUM_BYTES])


def changed(message, name: str, value) -> list:
  """The header with another value of this field."""
  header = header_of(message)
  header[1 + message.__struct_fields__.index(name)] = value
  return header


def read(header: list | bytes, payload=None):
  header = header if isinstance(header, bytes) else msgpack.encode(header)
  return decode(with_checksum(header), payload)


def test_examples_cover_every_kind():
  assert {type(m).__name__ for m in EXAMPLES} == {kind.__name__ for kind in KINDS}


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_round_trip(message):
  header, payload = encode(message)
  assert decode(header, payload) == message
  assert payload is getattr(message, "payload", None), "no copy"
  assert frame_bytes(header, payload) == len(header) + (len(BYTES) if payload else 0)


def test_headers_are_small():
  for message in EXAMPLES:
    header, _ = encode(message)
    assert len(header) < 220, message


def field_cases():
  """(message, field, wrong value) for every field of every kind."""
  for message in EXAMPLES:
    for name in message.__struct_fields__:
      if name != "payload":
        yield from ((message, name, value) for value in wrong(name, getattr(message, name)))


def wrong(name: str, good) -> list:
  """Values that a field with this good value must not have."""
  least, most = LEAST.get(name, 0), 1 << (40 if name == "global_step" else 62)
  more: list = {
    int: [True, 1.0, "1", least - 1, most],
    float: [1, True, math.nan, math.inf, -0.5, "0.5"],
    tuple: [7, "ab", [0, True], [1.0], [least - 1], [most], [0] * 65_537],
    bool: [0, 1, "True"],
    dict: [7, {0: True}, {0: -2}, {-2: 0}, {1 << 15: 0}],
    str: [7, b"f32", True, "f" * 4097],
    **{kind: [7, {}] for kind in (FragmentState, Publish)},
  }[type(good)]
  if isinstance(good, FragmentState):
    inside = {field: getattr(good, field) for field in good.__struct_fields__}
    lacking = [{k: v for k, v in inside.items() if k != field} for field in inside]
    more += lacking + [{**inside, k: each} for k, v in inside.items() for each in wrong(k, v)]
  return [None, [[]], {"a": 1}, *more]


def test_what_no_honest_peer_says_is_refused():
  """Else one report would push the global step to its end, or one number cost gigabytes."""
  for message, field, most in [
    (Goodbye(3, 1), "learner", (1 << 15) - 1),
    (Report(3, 1, 17, 0.25, (4,), (3,), (2,), False, 3), "global_step", (1 << 40) - 1),
    (
      Publish(1, 0, 2, 5, 9, 8, 6, 900, 10, {0: 9}, 3, 7, "", "f32", BYTES),
      "merged_rounds",
      {32_767: 9},
    ),
  ]:
    more = {32_768: 9} if field == "merged_rounds" else most + 1
    good = replace(message, **{field: most})
    assert read(header_of(good), getattr(message, "payload", None)) == good
    with pytest.raises(MalformedMessage, match=rf"`{field}\b"):
      bad = replace(message, **{field: more})
      read(header_of(bad), getattr(message, "payload", None))


def test_a_version_fits_a_header_whoever_has_had_a_part_in_it():
  """Learners come and go under ever new numbers, and a version names all that were ever merged."""
  last = (1 << 53) - 1
  merged = dict.fromkeys(range(MAX_LEARNERS), last)
  steps = dict.fromkeys(range(MAX_LEARNERS), 1 << 39)
  publish = Publish(1, 0, 2, 5, 9, 8, 6, 900, 10, merged, 3, 7, "", "f32", BYTES)
  state = FragmentState(3, 9, 64, merged, steps, 12, 5, 2)
  replica = Replica(1, 7, 0, state, 12, NOTHING, "f32", BYTES)
  for message in (publish, replica):
    assert decode(*encode(message)) == message


def test_every_wrong_field_is_refused_and_named():
  cases = list(field_cases())
  assert len(cases) > 300
  for message, name, value in cases:
    what = rf"(`{name}\b|{type(message).__name__}: `{name}` is of another type)"
    with pytest.raises(MalformedMessage, match=what):
      read(changed(message, name, value), getattr(message, "payload", None))


@pytest.mark.parametrize("kind", ["Report", "Push", "Goodbye", "Welcome", "Publish"])
def test_only_what_may_be_minus_one_is(kind):
  message = next(m for m in EXAMPLES if type(m).__name__ == kind)
  with pytest.raises(MalformedMessage, match=r"message is not valid: .*>= 0 - at `incarnation`"):
    read(header_of(replace(message, incarnation=-1)), BYTES)


@pytest.mark.parametrize(
  "kind, text",
  [
    ("Helo", "Invalid value 'Helo'"),
    (7, "Expected `str`, got `int`"),
    (["Hello"], "Expected `str`, got `array`"),
  ],
)
def test_wrong_kinds(kind, text):
  with pytest.raises(MalformedMessage, match=text):
    read([kind, *header_of(RequestMoments(3, 1, (2, 1, 0)))[1:]])


def test_wrong_frames():
  good = header_of(next(each for each in EXAMPLES if isinstance(each, Publish)))
  for header, text in [
    (b"", "is not valid"),
    (b"\xc1", "is not valid"),
    (b"\x93\xa7Goodby\xff\x03\x01", "is not valid"),
    (msgpack.encode(good) + b"\x00", "is not valid"),
    (msgpack.encode(good)[:-1], "is not valid"),
    (msgpack.encode({"kind": "Goodbye"}), "Expected `array`, got `object`"),
    ([], "Expected `array` of at least length 1, got 0"),
    ([*good, 1], "Expected `array` of at most length"),
    (good[:-3], "Expected `array` of at least length"),
    ([*good[:-1], b""], "Expected `null`, got `bytes` - at `payload`"),
    (good[:-1], "Publish: it is .*another way"),
    (bytes(MAX_HEADER_BYTES + 1), "exceeds"),
    (b"\x91" * 100_000, "is not valid"),
    (b"\xdd\xff\xff\xff\xff", "is not valid"),
    (b"\xdf\xff\xff\xff\xff", "is not valid"),
  ]:
    with pytest.raises(MalformedMessage, match=text):
      read(header, BYTES)
  with pytest.raises(MalformedMessage, match="RequestMoments carries no payload"):
    read(header_of(RequestMoments(3, 1, (2, 1, 0))), BYTES)


def test_bulk_comes_with_its_payload():
  bulk = [m for m in EXAMPLES if getattr(m, "payload", None) is not None]
  assert {type(m) for m in bulk} == {Push, Value, Moments, ForwardMoments, Publish, Replica}
  for message in bulk:
    with pytest.raises(MalformedMessage, match=f"{type(message).__name__} without its payload"):
      read(header_of(message))


def test_the_text_of_an_error_is_short_and_controls_no_terminal():
  message = Welcome(1, 0, 2, 900, (1, 3, 5), (-1, 2**33, 7), 3)
  hostile = header_of(message)
  hostile[0] = "\n\x1b[31mX" * 60_000
  for wrong in (changed(message, "rounds", [True] * 60_000), hostile):
    with pytest.raises(MalformedMessage) as error:
      read(wrong)
    assert len(str(error.value)) < 300 and str(error.value).isprintable()


def test_a_value_is_written_in_one_way_only():
  """Whoever reads a header, and whatever it compares, sees the same."""
  good = msgpack.encode(header_of(Goodbye(3, 1)))
  assert good.endswith(b"\x93\xa7Goodbye\x03\x01")
  longer = good.replace(b"\x93\xa7Goodbye", b"\xdc\x00\x03\xa7Goodbye")
  for header, what in [(good[:-1] + b"\xcc\x01", "`incarnation`"), (longer, "it")]:
    with pytest.raises(MalformedMessage, match=f"Goodbye: {what} is .*written in another way"):
      read(header)


def is_malformed_or_a_message(body: bytes, payload) -> bool:
  """With a right checksum, so that what is in it is looked at."""
  try:
    message = decode(with_checksum(body), payload)
  except MalformedMessage as error:
    return str(error) != ""
  again, same_payload = encode(message)
  return decode(again, same_payload) == message


@settings(max_examples=300)
@given(st.binary(max_size=200), st.sampled_from([None, BYTES]))
def test_random_bytes(header, payload):
  assert is_malformed_or_a_message(header, payload)


@settings(max_examples=500)
@given(st.sampled_from(EXAMPLES), st.lists(st.tuples(st.integers(0, 10**6), st.binary(max_size=3))))
def test_mutated_frames(message, edits):
  header, payload = encode(message)
  header = header[:-CHECKSUM_BYTES]
  for where, new in edits:
    at = where % (len(header) + 1)
    header = header[:at] + new + header[at + where % 3 :]
  assert is_malformed_or_a_message(header, payload)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_no_flipped_bit_goes_unnoticed(message):
  header, payload = encode(message)
  for bit in range(8 * len(header)):
    damaged = bytearray(header)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(MalformedMessage, match="damaged"):
      decode(bytes(damaged), payload)
  for length in range(len(header)):
    with pytest.raises(MalformedMessage, match="damaged"):
      decode(header[:length], payload)


ANYTHING = st.recursive(
  st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5),
  lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
  max_leaves=5,
)


@settings(max_examples=500)
@given(st.sampled_from(EXAMPLES), st.integers(0, 20), ANYTHING)
def test_any_value_in_any_place(message, place, value):
  header = header_of(message)
  header[place % len(header)] = value
  assert is_malformed_or_a_message(msgpack.encode(header), getattr(message, "payload", None))
