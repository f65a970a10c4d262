"""A shard's proof that a value is its own, for the day it gets it back from a learner.

A shard that dies with its copies takes its newest values from learners (`RequestValue`, `Value`).
A learner could send weights of its own instead. So every publish carries a seal: an HMAC, under a
key that only the shard has, over the value as learners then have it and over all that is said of
it. The learner returns it with the value. Without keys, on loopback, everything is trusted and
nothing is sealed.
"""

from __future__ import annotations

import hashlib
import hmac
import json

import numpy as np

from ddiloco.protocol.messages import Publish, Value


class Sealer:
  """Seals the values of one shard.

  Args:
    secret: of the shard, the same in all its lives.
    run_id: of the run ...
    plan_id: ... and of what its roles share: a value of another run fits neither.
  """

  def __init__(self, secret: bytes, run_id: str, plan_id: str):
    self._secret, self._run = secret, (run_id, plan_id)

  def digest(self, value: np.ndarray) -> str:
    """Of a fragment's value f32 [size], for `seal`: as long as reading all of it."""
    return hashlib.sha256(np.ascontiguousarray(value).view(np.uint8).data).hexdigest()

  def seal(self, of: Publish | Value, digest: str) -> str:
    """The seal of a fragment's value with this digest, about which `of` speaks."""
    said = (of.fragment, of.round, of.version, of.merged_tokens, of.participants, of.merged_rounds)
    text = json.dumps([*self._run, *said, digest])
    return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()

  def fits(self, of: Value, value: np.ndarray) -> bool:
    """Whether this shard, in one of its lives, has published just this."""
    return hmac.compare_digest(of.seal, self.seal(of, self.digest(value)))
