"""What the compiled step of a cut island exchanges: weights a layer at a time, nothing further."""

from __future__ import annotations

import math

import jax
import pytest

from ddiloco.config import from_dict
from ddiloco.training.aot import find_collectives
from ddiloco.training.devices import make_mesh
from ddiloco.training.step import IslandStep

LAYERS = 6  # enough for a loop
MATRIX = 4 * 64 * 192  # bytes of one of an MLP's three


def exchanged(experts: int, image_size: int = 0, **mesh):
  """(The island's step, its collectives)."""
  model = {"num_layers": LAYERS, "vocab_size": 512, "num_experts": experts}
  config = from_dict(
    {
      "model": {**model, "image_size": image_size},
      # So short that no activation is as large as a matrix.
      "data": {"sequence_length": 4, "custom": "any.module:pairs" if image_size else ""},
      "islands": {"devices": 8, "batch_size": 8, "remat": "full", "loss_chunks": 4, **mesh},
    }
  )
  parts = IslandStep(config, 0, make_mesh(jax.devices()[:8], config.islands.island(0)))
  return parts, list(find_collectives(parts.lower().compile().as_text(), 8))


def gathered_matrices(found, matrix: int) -> int:
  each_layer = (each for each in found if each.kind == "all-gather" and each.times == LAYERS)
  sizes = [each.bytes // LAYERS for each in each_layer]
  return sum(size // matrix for size in sizes if size % matrix == 0)


@pytest.mark.parametrize(
  ("experts", "mesh"),
  [
    (0, {"fsdp": 8}),
    pytest.param(4, {"fsdp": 4, "tensor": 2}, marks=pytest.mark.slow),
    (0, {"fsdp": 8, "image_size": 2}),
  ],
  ids=["dense", "mixture", "images"],
)
def test_weights_are_gathered_a_layer_at_a_time(experts, mesh):
  parts, found = exchanged(experts, **mesh)
  weights = {n: 4 * math.prod(leaf.shape) for n, leaf in parts.leaves.items()}
  layer = sum(size for n, size in weights.items() if n.startswith("layers/")) // LAYERS
  assert max(each.bytes // each.times for each in found) <= max(layer, weights["embedding"] // 4)
  # Three for the forward pass, and again for the backward pass.
  assert gathered_matrices(found, MATRIX * max(1, experts) // mesh.get("tensor", 1)) >= 6
