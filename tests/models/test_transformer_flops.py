"""Counts against hand arithmetic, real shapes and what the compiler says it multiplies."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

from ddiloco.config import ModelConfig
from ddiloco.models.transformer import language_model
from tests.models.small import DENSE, MIXTURE, active_params, forward, num_params


def test_dense_golden():
  # V*D + D + L * (q,o 2*16*32 + k,v 2*16*16 + 3*16*24 + 2*16)
  assert num_params(DENSE) == 32 * 16 + 16 + 5 * (1024 + 512 + 1152 + 32)
  assert active_params(DENSE) == num_params(DENSE)
  # 6 * (matrices + logits) + 6 * L * H * Q * T
  weights = 5 * (1024 + 512 + 1152) + 32 * 16
  assert language_model(DENSE).flops_per_token(10) == 6 * weights + 6 * 5 * 4 * 8 * 10


def test_mixture_golden():
  attention_and_norms = 1024 + 512 + 32
  assert num_params(MIXTURE) == 528 + 5 * (attention_and_norms + 16 * 4 + 4 * 1152)
  assert active_params(MIXTURE) == 528 + 5 * (attention_and_norms + 16 * 4 + 2 * 1152)
  more_experts = dataclasses.replace(MIXTURE, num_experts=8)
  per_expert = language_model(more_experts).flops_per_token(8) - language_model(
    MIXTURE
  ).flops_per_token(8)
  assert per_expert == 6 * 5 * 16 * 4  # four more router columns, no more experts a token


@pytest.mark.parametrize(
  "model", [DENSE, MIXTURE, ModelConfig()], ids=["dense", "mixture", "default"]
)
def test_counts_equal_the_real_parameters(model):
  real = sum(math.prod(s.shape) for s in language_model(model).shapes().values())
  assert num_params(model) == real


@pytest.mark.parametrize("experts", [0, 2])
def test_forward_flops_against_the_compiler(experts):
  """One layer, as the compiler counts a loop's body once; wide, so that matmuls dominate."""
  model = ModelConfig(
    num_layers=1,
    model_dim=128,
    num_heads=8,
    num_kv_heads=2,
    mlp_dim=256,
    num_experts=experts,
    capacity_factor=1.0,
  )
  tokens = jax.ShapeDtypeStruct((2, 64), jnp.int32)
  lowered = forward.lower(model, language_model(model).shapes(), tokens)
  cost = lowered.compile().cost_analysis()
  masked = 6 * model.num_layers * model.num_heads * model.head_dim * 64  # the einsum computes it
  ratio = cost["flops"] / (2 * 64 * (language_model(model).flops_per_token(64) + masked) / 3)
  assert 0.99 < ratio < 1.05  # softmax, norms, SwiGLU and routing are on top
