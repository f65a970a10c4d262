"""A run starts from a model of Hugging Face with the same values, or the script says why not."""

from __future__ import annotations

import json
from pathlib import Path

import from_huggingface
import numpy as np
import pytest
import safetensors.numpy

import ddiloco
from ddiloco.config import from_dict
from ddiloco.models import transformer
from ddiloco.roles import initial
from ddiloco.training.tokens import shared_files
from tests.scripts import commands

SIZE = {"num_layers": 2, "model_dim": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 6}
SIZE |= {"mlp_dim": 20, "tied_embedding": False, "rope_theta": 500.0}
MODELS = {
  "dense": {},
  "mixture": {"num_experts": 3, "experts_per_token": 2},
  "one expert": {"num_experts": 1, "experts_per_token": 1},
}


def run(monkeypatch, source: Path, to: Path) -> int:
  return commands.status(from_huggingface, monkeypatch, f"--model={source}", f"--to={to}")


def write(folder: Path, config: dict, tensors: dict[str, np.ndarray]) -> None:
  folder.mkdir()
  (folder / "config.json").write_text(json.dumps(config))
  whole = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
  safetensors.numpy.save_file(whole, folder / "model.safetensors")


def start_of(experiment: Path):
  """(The config of the experiment file that was written, the run's initial values)."""
  config = from_dict(ddiloco.load(experiment))
  return config, initial.initial_params(config)


@pytest.mark.parametrize("more", MODELS.values(), ids=MODELS)
def test_what_is_exported_starts_a_run_with_the_same_values(more, tmp_path, monkeypatch):
  """The width is the fourth power of 2: the factor of the embedding rounds nothing."""
  config = from_dict({"model": {**SIZE, **more}, "data": {"source": "synthetic"}})
  params = initial.initial_params(config)
  said = transformer.huggingface_config(config.model)
  write(tmp_path / "hf", said, transformer.huggingface_tensors(config.model, params))
  (tmp_path / "hf" / "tokenizer.json").write_text("{}")
  assert run(monkeypatch, tmp_path / "hf", tmp_path / "to") == 0
  found, values = start_of(tmp_path / "to" / "start.py")
  assert found.model == config.model
  assert found.data.tokenizer == f"huggingface:{tmp_path / 'hf' / 'tokenizer.json'}"
  assert values.keys() == params.keys()
  for name, value in params.items():
    np.testing.assert_array_equal(values[name], value, err_msg=name)


def test_a_tied_model_in_parts_and_with_the_defaults_of_its_kind(tmp_path, monkeypatch, capsys):
  """transformers leaves out what is a default, and writes large models as several files."""
  model = from_dict({"model": {**SIZE, "head_dim": 8, "num_kv_heads": 2}}).model
  said = transformer.huggingface_config(model) | {"tie_word_embeddings": True}
  for name in ("head_dim", "num_key_value_heads", "rope_theta"):
    del said[name]
  said["rope_parameters"] = {"rope_theta": 500.0, "rope_type": "default"}
  params = initial.initial_params(from_dict({"model": {**SIZE, "head_dim": 8, "num_kv_heads": 2}}))
  tensors = transformer.huggingface_tensors(model, params)
  del tensors["lm_head.weight"]
  write(tmp_path / "hf", said, {})
  (tmp_path / "hf" / "model.safetensors").unlink()
  parts = {name: f"part-{i % 3}.safetensors" for i, name in enumerate(tensors)}
  for file in set(parts.values()):
    inside = {n: np.ascontiguousarray(v) for n, v in tensors.items() if parts[n] == file}
    safetensors.numpy.save_file(inside, tmp_path / "hf" / file)
  index = {"weight_map": parts}
  (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))
  assert run(monkeypatch, tmp_path / "hf", tmp_path / "to") == 0
  assert json.loads(capsys.readouterr().out)["tokenizer"] is False
  for name, content in shared_files("bytes").items():
    (tmp_path / "hf" / name).write_bytes(content)
  assert run(monkeypatch, tmp_path / "hf", tmp_path / "to") == 0
  assert json.loads(capsys.readouterr().out)["tokenizer"] is True
  config, values = start_of(tmp_path / "to" / "start.py")
  assert config.model == model and config.data.tokenizer == "bytes"
  np.testing.assert_array_equal(values["head"], tensors["model.embed_tokens.weight"])
  np.testing.assert_array_equal(values["embedding"], params["embedding"])


WRONG = {
  "model_type": ({"model_type": "gpt2"}, "must be one of llama, mistral, mixtral"),
  "act": ({"hidden_act": "gelu"}, "ddiloco's transformer has only silu"),
  "bias": ({"attention_bias": True}, "attention_bias = True"),
  "window": ({"sliding_window": 4096}, "sliding_window = 4096"),
  "rope": ({"rope_scaling": {"rope_type": "llama3"}}, "rope_type = 'llama3'"),
  "shape": ({"intermediate_size": 24}, "model.layers.0.mlp.down_proj.weight"),
  "layers": ({"num_hidden_layers": 3}, "has no model.layers.2."),
  "field": ({"vocab_size": None}, "model.vocab_size"),
}


@pytest.mark.parametrize("change, said", WRONG.values(), ids=WRONG)
def test_another_model_is_refused_by_what_differs(change, said, tmp_path, monkeypatch, capsys):
  config = from_dict({"model": SIZE})
  tensors = transformer.huggingface_tensors(config.model, initial.initial_params(config))
  write(tmp_path / "hf", transformer.huggingface_config(config.model) | change, tensors)
  assert run(monkeypatch, tmp_path / "hf", tmp_path / "to") == 2
  error = capsys.readouterr().err
  assert said in error and "Traceback" not in error
  assert not (tmp_path / "to").exists()


def add_bias(tensors):
  tensors["model.layers.0.self_attn.q_proj.bias"] = np.ones(12, np.float32)


def quantize(tensors):
  tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.int8)


def cut(tensors):
  tensors["model.layers.1.mlp.up_proj.weight"] = np.ones((20, 15), np.float32)


TENSORS = {
  "more": (add_bias, "has 1 tensors that ddiloco's transformer does not (model.layers.0.self_attn"),
  "quantized": (quantize, "lm_head.weight is of type I8"),
  "one shape": (
    cut,
    "up_proj.weight': is (20, 15), and model.layers.0.mlp.up_proj.weight (20, 16)",
  ),
}


@pytest.mark.parametrize("change, said", TENSORS.values(), ids=TENSORS)
def test_other_tensors_than_the_model_s_are_refused(change, said, tmp_path, monkeypatch, capsys):
  """A bias was left out, and quantized values were taken for weights, without a word."""
  config = from_dict({"model": SIZE})
  tensors = transformer.huggingface_tensors(config.model, initial.initial_params(config))
  tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(3, np.float32)
  change(tensors)
  write(tmp_path / "hf", transformer.huggingface_config(config.model), tensors)
  assert run(monkeypatch, tmp_path / "hf", tmp_path / "to") == 2
  assert said in capsys.readouterr().err
  assert not (tmp_path / "to").exists()


def test_a_folder_without_a_model_is_named(tmp_path, monkeypatch, capsys):
  assert run(monkeypatch, tmp_path / "none", tmp_path / "to") == 2
  assert str(tmp_path / "none" / "config.json") in capsys.readouterr().err
  write(tmp_path / "hf", {"model_type": "llama"}, {})
  assert run(monkeypatch, tmp_path / "hf", tmp_path / "to") == 2
  assert "config.json has no 'hidden_size'" in capsys.readouterr().err
  (tmp_path / "hf" / "config.json").write_text('{"model_type": ')
  assert run(monkeypatch, tmp_path / "hf", tmp_path / "to") == 2
  assert f"a JSON file in --model={tmp_path / 'hf'} is torn" in capsys.readouterr().err
  model = from_dict({"model": SIZE}).model
  (tmp_path / "hf" / "config.json").write_text(json.dumps(transformer.huggingface_config(model)))
  (tmp_path / "hf" / "model.safetensors").rename(tmp_path / "hf" / "pytorch_model.bin")
  assert run(monkeypatch, tmp_path / "hf", tmp_path / "to") == 2
  assert "is not there. Fix: save the model as safetensors" in capsys.readouterr().err
