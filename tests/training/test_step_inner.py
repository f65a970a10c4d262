import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ddiloco import custom
from ddiloco.config import (
  Config,
  ConfigError,
  DataConfig,
  InnerConfig,
  IslandsConfig,
  ModelConfig,
)
from ddiloco.models.transformer import LanguageModel, cross_entropy, language_model
from ddiloco.training import step
from ddiloco.training.devices import make_mesh

TINY = ModelConfig(
  vocab_size=32, num_layers=1, model_dim=8, num_heads=2, num_kv_heads=1, head_dim=4, mlp_dim=16
)


def _rate(global_step, **fields):
  config = InnerConfig(**{"learning_rate": 2.0, "warmup_steps": 10, "final_share": 0.1, **fields})
  return step.learning_rate(config, 110, global_step)


@pytest.mark.parametrize(
  ("global_step", "expected"),
  [
    (0, 0.2),  # 1/10 of the peak: the first step already learns
    (4, 1.0),
    (9, 2.0),  # the warm-up's last step
    (10, 2.0),
    (35, 2.0 * (0.1 + 0.9 * (0.5 + math.sqrt(0.125)))),  # a quarter: cos(pi/4)
    (60, 2.0 * 0.55),  # half way between peak and floor
    (110, 0.2),
    (100_000, 0.2),
  ],
)
def test_learning_rate_goldens(global_step, expected):
  assert _rate(global_step) == pytest.approx(expected, rel=1e-6)


def test_learning_rate_settings():
  assert _rate(35, decay_steps=60) == pytest.approx(1.1, rel=1e-6)  # decay_steps, not the plan
  assert _rate(0, warmup_steps=0) == pytest.approx(2.0)
  assert _rate(500, final_share=0.0) == 0.0
  assert _rate(200, warmup_steps=200) == pytest.approx(2.0)  # warm-up beyond the end: floor after
  assert _rate(201, warmup_steps=200) == pytest.approx(0.2)


def test_weight_decay_spares_norms_alone():
  params = {name: np.ones(s.shape, np.float32) for name, s in language_model(TINY).shapes().items()}
  transform = step.optimizer(InnerConfig(weight_decay=0.25), {})
  zeros = jax.tree.map(np.zeros_like, params)
  updates, _ = jax.jit(transform.update)(zeros, jax.jit(transform.init)(params), params)
  norms = {"layers/attention_norm/scale", "layers/mlp_norm/scale", "final_norm/scale"}
  assert norms < updates.keys()
  for name, update in updates.items():
    np.testing.assert_array_equal(update, 0.0 if name in norms else -0.25, err_msg=name)


def test_weight_decay_spares_what_is_no_matrix_by_any_name():
  axes = {"gain": (None,), "layers/gain": ("layers", None), "layers/matrix": ("layers", None, None)}
  params = {name: np.ones((2,) * len(each), np.float32) for name, each in axes.items()}
  transform = step.optimizer(InnerConfig(weight_decay=0.25), axes)
  updates, _ = transform.update(jax.tree.map(np.zeros_like, params), transform.init(params), params)
  assert {name: float(np.ravel(update)[0]) for name, update in updates.items()} == {
    "gain": 0.0, "layers/gain": 0.0, "layers/matrix": -0.25,
  }  # fmt: skip


def test_first_update_is_the_sign_of_the_clipped_gradient():
  # By hand: Adam's first bias-corrected update is g / (|g| + epsilon), here g = (0.6, -0.8) after
  # clipping (3, -4) to norm 1; plus decay 0.1 * param.
  params, grads = {"w": jnp.array([[2.0, 2.0]])}, {"w": jnp.array([[3.0, -4.0]])}
  config = InnerConfig(clip_norm=1.0, epsilon=0.2, weight_decay=0.1)
  transform = step.optimizer(config, {})
  updates, _ = transform.update(grads, transform.init(params), params)
  np.testing.assert_allclose(updates["w"], [[-0.6 / 0.8 - 0.2, 0.8 / 1.0 - 0.2]], rtol=1e-5)
  unclipped = step.optimizer(InnerConfig(clip_norm=0.0, epsilon=0.2, weight_decay=0.0), {})
  updates, _ = unclipped.update(grads, unclipped.init(params), params)
  np.testing.assert_allclose(updates["w"], [[-3.0 / 3.2, 4.0 / 4.2]], rtol=1e-5)


@pytest.mark.parametrize("experts", [0, 2])
def test_hidden_matrices_are_those_between_features(experts):
  axes = language_model(dataclasses.replace(TINY, num_experts=experts)).logical_axes()
  found = {name: step.hidden_matrix(each) for name, each in axes.items()}
  sides = {name: (each.reduction_axis, each.output_axis) for name, each in found.items() if each}
  shift = int(experts > 0)
  mlp = "moe" if experts else "mlp"
  assert sides == {
    "layers/attention/query": ((1,), (2, 3)),
    "layers/attention/key": ((1,), (2, 3)),
    "layers/attention/value": ((1,), (2, 3)),
    "layers/attention/output": ((1, 2), (3,)),
    f"layers/{mlp}/gate": ((1 + shift,), (2 + shift,)),
    f"layers/{mlp}/up": ((1 + shift,), (2 + shift,)),
    f"layers/{mlp}/down": ((1 + shift,), (2 + shift,)),
  }


def test_muon_turns_matrices_and_steps_as_adam_where_there_are_none():
  # By hand: orthogonalized, all singular values are about 1 (Newton-Schulz: 0.7 to 1.2), here times
  # 0.2 x sqrt(8). Adam's first step with Nesterov: m = 0.1 g, (0.9 m / (1 - 0.9^2) + g) / |g|.
  axes = {"layers/up": ("layers", "embed", "mlp"), "table": ("vocab", "embed")}
  generator = np.random.default_rng(1)
  grads = {name: generator.normal(size=(2, 4, 8)[-len(a) :]) for name, a in axes.items()}
  params = {name: np.zeros_like(each) for name, each in grads.items()}
  config = InnerConfig(optimizer="muon", clip_norm=0.0, weight_decay=0.0)
  transform = step.optimizer(config, axes)
  updates, _ = jax.jit(transform.update)(grads, transform.init(params), params)
  for update, grad in zip(updates["layers/up"], grads["layers/up"]):
    values = np.linalg.svd(update, compute_uv=False) / (step.MUON_RMS * math.sqrt(8))
    assert values.min() > 0.6 and values.max() < 1.3
    assert np.vdot(update, grad) < 0, "it goes down"
  np.testing.assert_allclose(
    updates["table"], -np.sign(grads["table"]) * (1 + 0.09 / 0.19), rtol=1e-3
  )

  large = dataclasses.replace(config, epsilon=1e6)
  transform = step.optimizer(large, axes)
  updates, _ = jax.jit(transform.update)(grads, transform.init(params), params)
  assert np.abs(updates["table"]).max() < 1e-4, "Adam's epsilon is the config's"


RATES = {
  "adam": (optax.adam, True),
  "sgd": (optax.sgd, True),
  "lion": (optax.lion, True),
  "adafactor": (optax.adafactor, True),
  "muon": (optax.contrib.muon, True),
  "clipped": (lambda r: optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(r)), True),
  "warms up": (lambda r: optax.adam(optax.linear_schedule(0.0, r, 10)), False),
  "of other shapes": (lambda r: optax.masked(optax.adam(r), lambda params: params["no"]), False),
}


@pytest.mark.parametrize("make, known", RATES.values(), ids=RATES)
def test_the_first_update_says_whether_a_transform_has_a_learning_rate(make, known, monkeypatch):
  for rate in (1.0, 0.01, 3e-4):
    monkeypatch.setattr(custom, "load_optimizer", lambda inner, rate=rate: make(rate))
    found = custom.first_update(Config(model=TINY))
    assert (found >= custom.OWN_RATE) == (known and rate == 1) and (found > 0) == known


def test_muon_without_a_hidden_matrix_is_refused():
  with pytest.raises(ConfigError, match=r"^inner.optimizer = 'muon'.*logical_axes.*Fix"):
    step.optimizer(InnerConfig(optimizer="muon"), {"conv/kernel": (None,) * 4})


def bigram_loss(model, params, tokens_BxT1, execution=None):
  """Stands in for the transformer, which takes seconds to compile."""
  logits_BxTxV = params["embedding"][tokens_BxT1[:, :-1]] @ params["embedding"].T
  loss = cross_entropy(logits_BxTxV, tokens_BxT1[:, 1:])
  return loss, {"loss": loss, "load_balance": jnp.zeros(())}


def test_a_step_accumulates_to_the_full_batch_and_takes_the_rate(monkeypatch):
  generator = np.random.default_rng(5)
  shapes = language_model(TINY).shapes()
  params = {n: generator.normal(size=leaf.shape).astype("f4") for n, leaf in shapes.items()}
  tokens = generator.integers(0, 32, (4, 9)).astype(np.int32)
  after, rows = {}, []

  def seen(model, params, tokens_BxT1, execution=None):
    rows.append(len(tokens_BxT1))
    return bigram_loss(model, params, tokens_BxT1)

  monkeypatch.setattr(LanguageModel, "loss", seen)
  for steps in (1, 2, 4):
    config = Config(
      model=TINY,
      data=DataConfig(sequence_length=8),
      inner=InnerConfig(warmup_steps=4, accumulation_steps=steps, epsilon=1e-3),
      islands=IslandsConfig(batch_size=4),
    )
    mesh = make_mesh(jax.devices()[:1], config.islands.island(0))
    parts = step.IslandStep(config, 0, mesh)
    state = parts.layout.flat(params, jax.jit(parts.transform.init)(params))
    state, metrics = parts.lower().compile()(state, tokens, np.float32(4e-3), {})
    assert rows.pop() == 4 // steps, "no more is in memory at a time"
    after[steps] = state["params/embedding"], dict(zip(step.METRICS, np.asarray(metrics)))
  new, metrics = after[1]
  assert metrics["learning_rate"] == np.float32(4e-3)
  grads = jax.jit(jax.grad(lambda params: bigram_loss(None, params, tokens)[0]))(params)
  assert metrics["grad_norm"] == pytest.approx(float(jax.jit(optax.tree.norm)(grads)), rel=1e-5)
  change = np.abs(new - params["embedding"]).max()
  assert 1e-3 < change < 0.01  # about the learning rate
  for steps in (2, 4):
    again, accumulated = after[steps]
    for name in step.METRICS:
      np.testing.assert_allclose(accumulated[name], metrics[name], rtol=1e-5)
    np.testing.assert_allclose(again, new, rtol=0, atol=1e-4 * change)
