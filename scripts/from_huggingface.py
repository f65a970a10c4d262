"""Makes the start of a run from a model of Hugging Face: a Llama, a Mistral or a Mixtral.

    python scripts/from_huggingface.py --model=DIR --to=NEW_DIR

DIR is a folder with config.json, tokenizer.json and model.safetensors, or its parts and their index
(not a name: nothing is downloaded). NEW_DIR gets start.safetensors, f32 with ddiloco's names, and
start.py, an experiment file of the same model. The run keeps the values up to rounding, and
`ddiloco export --format=huggingface` writes its result in the same form again:

    ddiloco train --config=NEW_DIR/start.py --workdir=runs/more \\
      --config.data.source=text --config.data.path='data/*.txt'

Refused are models with biases or other further tensors, other activations, scaled rotary angles, a
sliding window, or quantized values, which ddiloco's transformer does not have. A mixture's tokens
may find an expert's slots taken while they train (`model.capacity_factor`). It takes memory for one
and a half models in f32. Last line: {"parameters", "tokenizer"}.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import common
import numpy as np

from ddiloco.checkpoint import weights
from ddiloco.checks import ConfigError, require
from ddiloco.config import ModelConfig, from_dict
from ddiloco.models import transformer
from ddiloco.roles import initial
from ddiloco.training.tokens import shared_files

FIELDS = {
  "vocab_size": "vocab_size",
  "num_layers": "num_hidden_layers",
  "model_dim": "hidden_size",
  "num_heads": "num_attention_heads",
  "num_kv_heads": "num_key_value_heads",
  "head_dim": "head_dim",
  "mlp_dim": "intermediate_size",
  "rope_theta": "rope_theta",
  "norm_epsilon": "rms_norm_eps",
}
EXPERTS = {"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"}
TYPES = ("llama", "mistral", "mixtral")
_DERIVED = "rotary_emb.inv_freq"  # older models have it, and it follows from rope_theta
EXPERIMENT = '''"""Goes on from {source}; made by scripts/from_huggingface.py."""

from ddiloco import config


def get_config():
  c = config.default()
  c.update_from_flattened_dict({values!r})
  return c
'''


def model_of(said: Mapping[str, Any]) -> ModelConfig:
  """The model of a config.json.

  Raises:
    ConfigError: ddiloco's transformer cannot be it.
  """
  kind = said.get("model_type")
  require(kind in TYPES, "model_type", kind, f"must be one of {', '.join(TYPES)}", "take another")
  rope = said.get("rope_parameters") or said.get("rope_scaling") or {}
  said = {"head_dim": None, "num_key_value_heads": None, "rope_theta": None, **said}
  said["rope_theta"] = rope.get("rope_theta") or said["rope_theta"] or 10_000.0
  said["head_dim"] = said["head_dim"] or said["hidden_size"] // said["num_attention_heads"]
  said["num_key_value_heads"] = said["num_key_value_heads"] or said["num_attention_heads"]
  plain = {
    "hidden_act": ("silu", None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "sliding_window": (None,),
  }
  found = {name: said.get(name) for name in plain}
  found["rope_type"] = rope.get("rope_type", rope.get("type"))
  for name, good in {**plain, "rope_type": ("default", None)}.items():
    rule = f"ddiloco's transformer has only {good[0]}"
    require(found[name] in good, name, found[name], rule, "take another model")
  names = FIELDS | (EXPERTS if kind == "mixtral" else {})
  values = {ours: said[theirs] for ours, theirs in names.items()}
  return from_dict({"model": {**values, "tied_embedding": False}}).model


def located(folder: Path) -> dict[str, Path]:
  """The file of every tensor.

  Raises:
    ConfigError: a file is not there, cannot be read, or has quantized values.
  """
  index, found = folder / "model.safetensors.index.json", dict[str, Path]()
  parts = json.loads(index.read_text())["weight_map"] if index.exists() else {}
  for name in sorted(set(parts.values())) or ["model.safetensors"]:
    file = folder / name
    fix = "save the model as safetensors, as save_pretrained of transformers does"
    require(file.exists(), "--model", str(file), "is not there", fix)
    for tensor, leaf in weights.leaves(file, "--model").items():
      rule, fix = f"{tensor} is of type {leaf.dtype}", "save the model in bf16 or f32"
      require("float" in leaf.dtype, "--model", str(file), rule, fix)
      found[tensor] = file
  return found


def parameters(model: ModelConfig, folder: Path, tied: bool) -> dict[str, np.ndarray]:
  """The model's parameters by ddiloco's names; the inverse of `huggingface_tensors`.

  Raises:
    ConfigError: as `located`; or the tensors are not those of this model, no more and no less.
  """
  params, found = dict[str, np.ndarray](), located(folder)
  names = transformer.huggingface_names(model)
  known = {each for theirs in names.values() for each in theirs}  # a tied one may have a head
  if tied:
    names["head"] = names["embedding"]
  for wanted in (each for theirs in names.values() for each in theirs):
    rule, fix = f"has no {wanted}", "take a model as its config.json says"
    require(wanted in found, "--model", str(folder), rule, fix)
  more = [name for name in found if name not in known and not name.endswith(_DERIVED)]
  rule = f"has {len(more)} tensors that ddiloco's transformer does not ({', '.join(more[:4])})"
  require(
    not more, "--model", str(folder), rule, "bring its own config.json, or take another model"
  )

  def read(name: str) -> np.ndarray:
    value = weights.load(found[name], "--model", [name])[name].astype(np.float32)
    return value.T if value.ndim > 1 else value

  for name, shape in initial.shapes(model).items():
    parts = [read(each) for each in names[name]]
    for each, part in zip(names[name], parts):
      rule = f"is {part.shape[::-1]}, and {names[name][0]} {parts[0].shape[::-1]}"
      same = part.shape == parts[0].shape
      require(same, "--model", each, rule, "bring the model's own files")
    stack = np.stack(parts)
    if name in ("embedding", "head"):
      stack = stack.swapaxes(1, 2)
    rule, fix = f"has {stack.size} values, the config {shape}", "bring the model's own config.json"
    require(stack.size == np.prod(shape), "--model", names[name][0], rule, fix)
    params[name] = stack.reshape(shape)
  params["embedding"] = params["embedding"] / np.float32(model.model_dim**0.25)  # see `embed`
  return params


def main() -> None:
  model = {"type": Path, "required": True, "help": "folder of the model"}
  to = {"type": Path, "required": True, "help": "is made if needed"}
  options = common.options(__doc__, model=model, to=to)
  source, start = options.model.absolute(), options.to.absolute() / "start.safetensors"
  try:
    said = json.loads((source / "config.json").read_text())
    found = model_of(said)
    params = parameters(found, source, said.get("tie_word_embeddings", False))
    options.to.mkdir(parents=True, exist_ok=True)
    weights.save(start, params, {"made_from": str(source)})
    names = [*FIELDS, "tied_embedding", *(EXPERTS if found.num_experts else ())]
    values = {f"model.{name}": getattr(found, name) for name in names}
    values["run.init_from"] = str(start)
    values["data.sequence_length"] = min(2048, said.get("max_position_embeddings", 2048))
    tokenizer = source / "tokenizer.json"
    as_bytes = shared_files("bytes")["tokenizer.json"]  # of an export: it is `bytes` again
    if tokenizer.exists() and tokenizer.read_bytes() != as_bytes:
      values["data.tokenizer"] = f"huggingface:{tokenizer}"
    text = EXPERIMENT.format(source=source.name, values=values)
    (options.to / "start.py").write_text(text)
  except KeyError as error:
    raise ConfigError(f"config.json has no {error}") from error
  except json.JSONDecodeError as error:
    raise ConfigError(f"a JSON file in --model={source} is torn ({error})") from error
  except (TypeError, ValueError, OSError) as error:
    raise ConfigError(str(error)) from error
  count = sum(value.size for value in params.values())
  print(json.dumps({"parameters": count, "tokenizer": tokenizer.exists()}))


if __name__ == "__main__":
  common.run_script(main)
