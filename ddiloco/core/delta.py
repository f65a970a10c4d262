"""The arithmetic of one learner's exchange: what it pushes, and what a new version adds.

A learner's exchange thread and replay use the very same code, in the same order, so that both get
the same bits. All vectors are flat f32 [size] of one fragment; none is written again once it is
here, so that a snapshot may keep it without a copy.
"""

from __future__ import annotations

import numpy as np

from ddiloco.config import SyncConfig
from ddiloco.core import codec
from ddiloco.protocol.messages import Publish


class Deltas:
  """What a learner knows of every fragment's global value, and of its own pushes."""

  def __init__(self, sync: SyncConfig):
    self._sync = sync
    self.base: dict[int, np.ndarray] = {}  # what the global model was when last received
    self.sent: dict[int, np.ndarray] = {}  # my outstanding push, as the shard decodes it
    self.residual: dict[int, np.ndarray] = {}  # what rounding lost; only with error_feedback
    self.rounding: dict[int, np.ndarray] = {}  # the residual if the outstanding push is merged

  def push(self, fragment: int, local: np.ndarray, factor: float = 1.0) -> np.ndarray:
    """The payload of a push: base - local in the wire codec; remembers what of it arrives.

    `factor` other than 1: it is poisoned on purpose.
    """
    name = self._sync.push_codec
    delta = self.base[fragment] - local
    if factor != 1.0:
      with np.errstate(over="ignore", invalid="ignore"):
        delta *= np.float32(factor)
    if self._sync.error_feedback and fragment in self.residual:
      delta += self.residual[fragment]
    payload = codec.encode(delta, name)
    self.sent[fragment] = codec.decode(payload, delta.size, name)
    if self._sync.error_feedback:
      self.rounding[fragment] = delta - self.sent[fragment]
    return payload

  def receive(self, publish: Publish, size: int, mode: str, included: bool) -> np.ndarray:
    """What `apply` adds for a published version of a fragment of `size` values; see `stage`.

    Without a payload it says that my push was rejected: see `back`.

    Raises:
      CodecError: the payload is not what it says.
    """
    p = publish.fragment
    if publish.payload is None:
      return self.back(p)
    value = codec.decode(publish.payload, size, publish.codec)
    if publish.base_version >= 0:
      value = self.base[p] + value
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
    if included:
      assert sent is not None, "what is included was sent"
      return value - (base - sent)
    return value - base

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
