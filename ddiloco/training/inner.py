"""The inner step: what one island does between syncs. Pure functions, all but the schedule for jit.

AdamW, Muon, or an optax transform of the user's own. The learning rate follows the run's progress
in tokens, not the island's own count: a learner that rejoins takes the rate its peers have, and the
schedule ends when the run does, however many learners there were
(`protocol.states.schedule_step`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, muon

from ddiloco import custom
from ddiloco.config import ConfigError, InnerConfig
from ddiloco.models.execution import Axes, Execution
from ddiloco.models.model import Batch, Model, Params

METRICS = ("loss", "load_balance", "grad_norm", "learning_rate")
MUON_RMS = 0.2  # of an update's values, as AdamW's usually are ("Muon is Scalable", 2502.16982)


def learning_rate(inner: InnerConfig, planned_steps: int, step: int) -> float:
  """Linear warm-up to `inner.learning_rate`, then a cosine to `final_share` of it.

  Taken on the host, so that the compiled step is the same for every schedule and length of a run.
  With `decay_steps = 0` the cosine ends at `planned_steps`. `step` counts the schedule's finished
  steps: the first step (0) already has 1/warmup_steps of the peak, the one at warmup_steps
  the peak, and from the end of the decay on it stays at the floor.
  """
  end = inner.decay_steps or planned_steps
  warm = min(1.0, (step + 1) / max(1, inner.warmup_steps))
  progress = (step - inner.warmup_steps) / max(1, end - inner.warmup_steps)
  cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, progress))))
  return inner.learning_rate * warm * (inner.final_share + (1 - inner.final_share) * cosine)


def decayed(params: Params) -> dict[str, bool]:
  """Where weight decay applies: all but norm scales (stacked ones have rank 2 too) and biases."""
  return {name: not name.endswith(("scale", "bias")) for name in params}


def optimizer(inner: InnerConfig, axes: Mapping[str, Axes]) -> optax.GradientTransformation:
  """Clipping by the global norm, Adam in f32 or Muon, decoupled weight decay (arXiv 1711.05101).

  Its updates are those of learning rate 1: the caller adds `rate * update`. With `inner.custom` it
  is the user's own. `axes` are the model's logical axes: Muon is for hidden matrices, and all else
  takes Adam's steps.

  Raises:
    ConfigError: Muon is asked for, and the model says of no parameter that it is a hidden matrix.
  """
  if inner.custom:
    return custom.load_optimizer(inner)
  return optax.chain(
    optax.clip_by_global_norm(inner.clip_norm) if inner.clip_norm else optax.identity(),
    _adam(inner) if inner.optimizer == "adamw" else _muon(inner, axes),
    optax.add_decayed_weights(inner.weight_decay, mask=decayed)
    if inner.weight_decay
    else optax.identity(),
    optax.scale(-1.0),
  )


def _adam(inner: InnerConfig) -> optax.GradientTransformation:
  return optax.scale_by_adam(inner.b1, inner.b2, inner.epsilon, mu_dtype=jnp.float32)


def _muon(inner: InnerConfig, axes: Mapping[str, Axes]) -> optax.GradientTransformation:
  """Orthogonalized momentum, in steps as long as Adam's, so that the same learning rates suit."""
  matrices = {name: hidden_matrix(each) for name, each in axes.items()}
  if not any(matrices.values()):
    raise ConfigError(
      "inner.optimizer = 'muon': is for hidden matrices, and the model's logical_axes() name none:"
      " no parameter of stacked layers has 'embed' and another axis of its matrix. Fix: name the"
      " axes (ddiloco.Model), or use 'adamw'."
    )
  return muon(
    learning_rate=-1.0,  # of the gradient's own sign, as `scale_by_adam` is
    adam_b1=inner.b1,
    adam_b2=inner.b2,
    consistent_rms=MUON_RMS,
    muon_weight_dimension_numbers=matrices,
  )


def hidden_matrix(axes: Axes) -> MuonDimensionNumbers | None:
  """Which axes of a parameter are its matrix's inputs and outputs; None: it is no hidden matrix.

  Hidden matrices are those of stacked layers that lead from "embed" to other named axes or back.
  Layers and experts have a matrix each. A router is none: its outputs, without a name, are choices.

  >>> hidden_matrix(("layers", "heads", "head_dim", "embed"))
  MuonDimensionNumbers(reduction_axis=(1, 2), output_axis=(3,))
  >>> hidden_matrix(("vocab", "embed")), hidden_matrix(("layers", "embed"))
  (None, None)
  """
  own = tuple(i for i, axis in enumerate(axes) if axis not in ("layers", "experts"))
  embed = tuple(i for i in own if axes[i] == "embed")
  others = tuple(i for i in own if axes[i] != "embed")
  if axes[:1] != ("layers",) or len(embed) != 1 or not others or None in axes:
    return None
  inward, outward = (embed, others) if embed < others else (others, embed)
  return MuonDimensionNumbers(inward, outward)


def make_train_step(
  model: Model, inner: InnerConfig, execution: Execution | None = None
) -> Callable[..., tuple[dict[str, jax.Array], optax.OptState, dict[str, jax.Array]]]:
  """One inner step: the function `train_step(params, opt_state, batch, rate)`.

  `rate` is the learning rate, an f32 scalar. It returns (params, opt_state, metrics): f32 scalars
  "loss" (of the model: nats per token, ...), "load_balance" (0 where the model reports none),
  "grad_norm" (before clipping) and "learning_rate". B, the first axis of the batch's arrays, must
  be a multiple of `inner.accumulation_steps`; the gradient is the mean over the micro-batches,
  which for a dense model is the full batch's (a mixture's load-balance loss is taken per
  micro-batch).
  """
  transform = optimizer(inner, model.logical_axes())

  def value_and_grad(params: Params, batch: Batch):
    def loss(params: Params):
      return model.loss(params, batch, execution)

    (_, metrics), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return grads, metrics

  def train_step(params: Params, opt_state: optax.OptState, batch: Batch, rate: jax.Array):
    grads, metrics = accumulate(value_and_grad, params, batch, inner.accumulation_steps)
    updates, opt_state = transform.update(grads, opt_state, params)
    params = {name: value + rate * updates[name] for name, value in params.items()}
    metrics = {"load_balance": jnp.zeros(()), **metrics}
    metrics |= {"grad_norm": optax.tree.norm(grads), "learning_rate": rate}
    return params, opt_state, metrics

  return train_step


def accumulate(value_and_grad: Callable, params: Params, batch: Batch, steps: int):
  """Mean of `value_and_grad(params, micro_batch)`'s tree over `steps` micro-batches, by a scan."""
  if steps == 1:
    return value_and_grad(params, batch)

  def split(leaf: jax.Array) -> jax.Array:
    # Every steps-th example forms a micro-batch: so each device keeps the rows it already has.
    return leaf.reshape(len(leaf) // steps, steps, *leaf.shape[1:]).swapaxes(0, 1)

  micro = jax.tree.map(split, batch)
  shapes = jax.eval_shape(value_and_grad, params, jax.tree.map(lambda leaf: leaf[0], micro))
  zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

  def add(total, each):
    return jax.tree.map(jnp.add, total, value_and_grad(params, each)), None

  total, _ = jax.lax.scan(add, zeros, micro)
  return jax.tree.map(lambda x: x / steps, total)
