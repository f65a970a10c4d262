"""How many parameters a model has and how many FLOPs a token costs, from its config alone."""

from __future__ import annotations

from ddiloco.config import ModelConfig


def _attention_params(model: ModelConfig) -> int:
  queries_and_output = 2 * model.model_dim * model.num_heads * model.head_dim
  keys_and_values = 2 * model.model_dim * model.num_kv_heads * model.head_dim
  return queries_and_output + keys_and_values


def _count(model: ModelConfig, experts: int) -> int:
  """Parameters with this many experts counted in each layer (1 stands for a dense model's MLP)."""
  d = model.model_dim
  router = d * model.num_experts
  mlps = experts * 3 * d * model.mlp_dim
  layer = _attention_params(model) + router + mlps + 2 * d
  places = d * model.num_patches
  return model.vocab_size * d + model.num_layers * layer + d + _projection_params(model) + places


def _projection_params(model: ModelConfig) -> int:
  """Of an image's patches; 0 for text alone."""
  return model.patch_size**2 * model.image_channels * model.model_dim if model.image_size else 0


def num_params(model: ModelConfig) -> int:
  """All parameters; the tied embedding counts once."""
  return _count(model, model.num_experts or 1)


def active_params(model: ModelConfig) -> int:
  """Parameters that one token meets: the router and `experts_per_token` experts of each layer."""
  return _count(model, model.experts_per_token if model.num_experts else 1)


def flops_per_token(model: ModelConfig, sequence_length: int) -> float:
  """Training FLOPs (forward and backward) of one token, counting matrix products only.

  Two FLOPs a multiply-add; the backward pass costs twice the forward pass. Of attention's scores
  and their product with the values only the half that is not masked counts: 6 * parameters +
  6 * L * H * Q * T for a dense model without norms. (PaLM, arXiv 2204.02311, appendix B, counts
  both halves: 12.) Counted are the router, the k chosen experts and the logits. Not counted: the
  embedding look-up, norms, softmax, optimizer, recomputation under remat, and a mixture's empty
  slots. A patch of an image is a token like any other, which also meets the projection; every row
  is taken to have an image, since every row's patches are multiplied.

  Args:
    model: the model.
    sequence_length: T, positions in a sequence.
  """
  d = model.model_dim
  experts = model.experts_per_token if model.num_experts else 1
  weights = _attention_params(model) + d * model.num_experts + experts * 3 * d * model.mlp_dim
  scores_and_values = model.num_heads * model.head_dim * sequence_length  # halves of two products
  multiply_adds = model.num_layers * (weights + scores_and_values) + d * model.vocab_size
  patches = _projection_params(model) * model.num_patches / sequence_length
  return 3.0 * 2.0 * (multiply_adds + patches)
