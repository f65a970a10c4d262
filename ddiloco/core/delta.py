"""The arithmetic of one learner's exchange: what it pushes, and what a new version adds.

A learner's exchange thread and replay use the very same code, in the same order, so that both get
the same bits. All vectors are flat f32 [size] of one fragment; none is written again once it is
here, so that a snapshot may keep it without a copy.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ddiloco.config import SyncConfig
from ddiloco.core import codec
from ddiloco.core.codec import Encoded
from ddiloco.core.passes import SEGMENT, Share
from ddiloco.protocol.messages import Publish
from ddiloco.protocol.values import replace


class Deltas:
  """What a learner knows of every fragment's global value, and of its own pushes."""

  def __init__(self, sync: SyncConfig):
    self.share: Share = map  # on which threads
    self._sync = sync
    self.base: dict[int, np.ndarray] = {}  # what the global model was when last received
    self.sent: dict[int, np.ndarray] = {}  # my outstanding push, as the shard decodes it
    self.residual: dict[int, np.ndarray] = {}  # what rounding lost; only with error_feedback
    self.rounding: dict[int, np.ndarray] = {}  # the residual if the outstanding push is merged

  def push(self, fragment: int, local: np.ndarray, factor: float = 1.0) -> np.ndarray:
    """The payload of a push: base - local in the wire codec; remembers what of it arrives.

    `factor` other than 1: it is poisoned on purpose.
    """
    name, base, size = self._sync.push_codec, self.base[fragment], local.size
    encoded = Encoded(name, np.empty(codec.payload_bytes(size, name), np.uint8))
    residual = self.residual.get(fragment) if self._sync.error_feedback else None
    sent = encoded.payload.view(np.float32) if name == "f32" else np.empty(size, np.float32)
    rounding = np.empty_like(sent) if self._sync.error_feedback else None

    def chunk(start: int) -> None:
      here = slice(start, start + codec.CHUNK)
      delta, there = base[here] - local[here], codec.part(encoded, size, start)
      if factor != 1.0:
        with np.errstate(over="ignore", invalid="ignore"):
          delta *= np.float32(factor)
      if residual is not None:
        delta += residual[here]
      codec.encode_chunk(delta, name, there, sent[here])
      codec.decode_chunk(there, name, sent[here])
      if rounding is not None:
        np.subtract(delta, sent[here], out=rounding[here])

    self._chunks(size, chunk)
    self.sent[fragment] = sent
    if rounding is not None:
      self.rounding[fragment] = rounding
    return encoded.payload

  def _chunks(self, size: int, work: Callable[[int], None]) -> None:
    """`work` of every chunk, which stays in a core's cache; segments are shared out."""

    def segment(start: int) -> None:
      for at in range(start, min(start + SEGMENT, size), codec.CHUNK):
        work(at)

    list(self.share(segment, range(0, size, SEGMENT)))

  def made(self, publish: Publish, value: np.ndarray) -> Publish | None:
    """A published initial value with this one as its payload; None if it has other bits."""
    if bytes(publish.payload) != codec.digest(value):
      return None
    return replace(publish, codec="f32", payload=codec.encode(value, "f32"))

  def receive(self, publish: Publish, size: int, mode: str, included: bool) -> np.ndarray:
    """What `apply` adds for a published version of a fragment of `size` values; see `stage`.

    Without a payload it says that my push was rejected: see `back`.

    Raises:
      CodecError: the payload is not what it says.
    """
    p = publish.fragment
    if publish.payload is None:
      return self.back(p)
    encoded = codec.checked(np.frombuffer(publish.payload, np.uint8), size, publish.codec)
    base = self.base[p] if publish.base_version >= 0 else None
    if base is None and publish.codec == "f32":
      return self.stage(p, encoded.payload.view(np.float32), mode, included)
    value = np.empty(size, np.float32)

    def chunk(start: int) -> None:
      new = value[start : start + codec.CHUNK]
      codec.decode_chunk(codec.part(encoded, size, start), publish.codec, new)
      if base is not None:
        np.add(base[start : start + codec.CHUNK], new, out=new)

    self._chunks(size, chunk)
    return self.stage(p, value, mode, included)

  def stage(self, fragment: int, value: np.ndarray, mode: str, included: bool) -> np.ndarray:
    """What `apply` adds for a new version: overwrite g', mix (1-a) g', rebase g' - ref.

    `ref` is what of my parameters the new version g' already knows: the base, less my push if it
    is part of g'. What is left of the local value, rounding errors included, stays mine. From now
    on the base is g'.
    """
    base = self.base.get(fragment)
    sent, rounding = self.sent.pop(fragment, None), self.rounding.pop(fragment, None)
    if included and rounding is not None:
      self.residual[fragment] = rounding
    self.base[fragment] = value
    if mode == "overwrite":
      return value
    if mode == "mix":
      return np.float32(1 - self._sync.mix_alpha) * value
    assert base is not None, "a rebase has a base"
    assert sent is not None or not included, "what is included was sent"
    shift = np.empty_like(value)

    def chunk(start: int) -> None:
      here = slice(start, start + codec.CHUNK)
      known = base[here] if sent is None or not included else base[here] - sent[here]
      np.subtract(value[here], known, out=shift[here])

    self._chunks(value.size, chunk)
    return shift

  def back(self, fragment: int) -> np.ndarray:
    """A push was rejected: its fragment goes back to the base, and owes nothing to rounding."""
    self.residual.pop(fragment, None)
    return self.stage(fragment, self.base[fragment], "overwrite", included=False)

  def keep(self, mode: str) -> float:
    """Share of the local value that `apply` keeps."""
    return {"overwrite": 0.0, "mix": self._sync.mix_alpha, "rebase": 1.0}[mode]

  def value(self, fragment: int) -> np.ndarray:
    """The payload of the global value as last received, f32."""
    return codec.encode(self.base[fragment], "f32")

  def send_moments(self, flat: np.ndarray) -> np.ndarray:
    """The payload of inner optimizer moments [num_moments * size], f32."""
    return codec.encode(flat, "f32")

  def take_moments(self, payload: np.ndarray, size: int) -> np.ndarray:
    """Moments [size] out of a payload that a peer has sent.

    Raises:
      CodecError: they are another inner optimizer's, damaged, or not finite.
    """
    flat = codec.decode(payload, size, "f32")
    if not np.isfinite(flat).all():
      raise codec.CodecError("not finite")
    return flat

  # --- for a snapshot -----------------------------------------------------------------------------

  def arrays(self) -> dict[str, np.ndarray]:
    """All vectors, by name: "base/3"."""
    groups = {"base": self.base, "sent": self.sent}
    groups |= {"residual": self.residual, "rounding": self.rounding}
    return {f"{name}/{p}": v for name, each in groups.items() for p, v in sorted(each.items())}

  def restore(self, arrays: dict[str, np.ndarray]) -> None:
    """Takes back what `arrays` gave; other names are left alone."""
    for name, value in arrays.items():
      group, _, fragment = name.partition("/")
      if group in ("base", "sent", "residual", "rounding"):
        getattr(self, group)[int(fragment)] = value
