"""`ddiloco export` writes what others read, and replaces nothing that it was not told to."""

import json
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors
import safetensors.numpy
import tokenizers

import ddiloco
from ddiloco import cli, custom
from ddiloco.checkpoint import weights
from ddiloco.config import Config, from_dict
from ddiloco.engines.engine import save_result
from ddiloco.models import transformer
from ddiloco.roles import initial
from ddiloco.training import tokens
from tests.cli.conftest import contents

SMALL = {
  "model": {"num_layers": 2, "model_dim": 8, "num_heads": 1, "num_kv_heads": 1, "head_dim": 4,
            "mlp_dim": 8},
  "data": {"source": "synthetic", "sequence_length": 8},
}  # fmt: skip
CONFIG = from_dict(SMALL)
OWN = """
import jax, jax.numpy as jnp
from flax import nnx
from ddiloco.models.model import NnxModel

class Mean(NnxModel):
  def __init__(self):
    super().__init__(lambda rngs: nnx.Linear(1, 1, rngs=rngs))
  def inputs(self, batch_size, sequence_length):
    return jax.ShapeDtypeStruct((batch_size, sequence_length + 1), jnp.int32)
  def loss(self, params, batch, execution=None):
    loss = jnp.float32(0.5) + 0 * sum(jnp.sum(each) for each in params.values())
    return loss, {"loss": loss}
  def evaluate(self, params, batch):
    return self.loss(params, batch)[1]

def model(config):
  return Mean()
"""
FORMS = ["model.safetensors", "model"]


def full(*_: object) -> None:
  raise OSError(28, "No space left on device")


@pytest.fixture(scope="module")
def params() -> dict[str, np.ndarray]:
  return initial.initial_params(CONFIG)


def of_own_model(source: Path, text: str = OWN) -> Config:
  """A config whose model is in this file, which is written."""
  source.parent.mkdir(exist_ok=True)
  source.write_text(text)
  own = {"model": {"custom": f"{source}:model"}, "sync": {"num_fragments": 2}}
  return from_dict({**SMALL, **own})


def begun(place: Path, config: Config) -> Path:
  """The workdir of a run of this config, without a result."""
  folder = place / "run"
  folder.mkdir()
  (folder / "config.json").write_text(config.to_json())
  return folder


@pytest.fixture
def workdir(tmp_path, params) -> Path:
  """What a finished run leaves that matters here."""
  folder = begun(tmp_path, CONFIG)
  weights.save(folder / "result", params, {weights.MERGED_TOKENS: "12345"})
  return folder


def test_a_result_of_own_parts_is_used_where_its_project_has_moved(tmp_path, capsys, refused):
  """Its model was looked for where it had been, however the command was told where it is."""
  old, new = tmp_path / "old.d" / "mine.py", tmp_path / "new.d" / "mine.py"
  config, _ = of_own_model(old), of_own_model(new)
  run = begun(tmp_path, config)
  weights.save(run / "result", initial.initial_params(config))
  old.unlink()
  custom.load_model.cache_clear()
  flags = [f"--workdir={run}", f"--config={run}", f"--config.model.custom={new}:model"]
  assert "give its --config there" in refused("export", flags[0], f"--to={tmp_path / 'no'}")
  assert cli.main(["export", *flags, f"--to={tmp_path / 'model.safetensors'}"]) == 0
  assert cli.main(["evaluate", *flags, "--cpu"]) == 0
  assert json.loads(capsys.readouterr().out.splitlines()[-1])["loss"] == 0.5
  moved = ddiloco.load(run)
  moved.model.custom = f"{new}:model"
  assert ddiloco.Run(run, moved).evaluate() == {"loss": 0.5}
  assert "this model makes no text" in refused("generate", *flags, "--cpu")
  for command in ("evaluate", "replay"):
    assert "--config: is needed" in refused(command, flags[0], flags[2])
  assert "seed = 7: the run in --workdir=" in refused("evaluate", *flags, "--config.seed=7")


def test_a_source_that_is_not_the_one_of_the_run_is_said(tmp_path, capsys):
  """The text of then is known by the result alone: the config has only the name of the file."""
  kept, changed = tmp_path / "kept.d" / "mine.py", tmp_path / "changed.d" / "mine.py"
  config, _ = of_own_model(kept), of_own_model(changed, OWN + "# by now\n")
  run = begun(tmp_path, config)
  save_result(config, run, initial.initial_params(config), 7)
  to, flags = f"--to={tmp_path / 'model.safetensors'}", [f"--workdir={run}", f"--config={run}"]
  assert cli.main(["evaluate", *flags, "--cpu"]) == cli.main(["export", *flags, to]) == 0
  assert "WARNING" not in capsys.readouterr().err
  flags.append(f"--config.model.custom={changed}:model")
  for command in (["evaluate", *flags, "--cpu"], ["export", *flags, to, "--overwrite"]):
    assert cli.main(command) == 0
    said = f"WARNING: model.custom = '{changed}:model': its source is not the one that made {run}"
    assert said in capsys.readouterr().err
  kept.unlink()  # a run's end saves its result also without its sources
  custom._texts.clear()
  save_result(config, run, weights.load(run / "result"), 8)
  assert weights.metadata(run / "result") == {weights.MERGED_TOKENS: "8"}


def test_a_result_is_not_measured_by_the_old_text_of_a_source(tmp_path):
  """In a notebook, where a file is read once: the loss was that of the text before."""
  source = tmp_path / "mine.py"
  config = of_own_model(source)
  run = begun(tmp_path, config)
  weights.save(run / "result", initial.initial_params(config))
  assert ddiloco.Run(run).evaluate() == {"loss": 0.5}
  source.write_text(OWN.replace("0.5", "0.7"))
  assert ddiloco.Run(run).evaluate() == {"loss": pytest.approx(0.7)}


def export(workdir: Path, to: object, *more: str) -> int:
  return cli.main(["export", f"--workdir={workdir}", f"--to={to}", *more])


@pytest.fixture
def unexported(workdir, refused):
  """An export that must be refused; returns what it says."""

  def run(to: object, *more: str) -> str:
    said = refused("export", f"--workdir={workdir}", f"--to={to}", *more)
    assert said.startswith("ddiloco export: ") and str(to) in said and ". Fix: " in said
    return said

  return run


@pytest.mark.parametrize("form", FORMS)
def test_one_line_says_what_was_written(workdir, params, tmp_path, capsys, form):
  to = tmp_path / "out" / form
  assert export(workdir, to) == 0
  count = sum(value.size for value in params.values())
  what = "one file" if form.endswith(".safetensors") else "a folder"
  assert capsys.readouterr() == (f"{to}: {count:,} parameters, in {what}\n", "")


def test_plain_libraries_read_the_weights_and_what_they_are(workdir, params, tmp_path):
  file, folder = (tmp_path / form for form in FORMS)
  assert export(workdir, file) == export(workdir, folder) == 0
  with ocp.StandardCheckpointer() as plain:
    found = [safetensors.numpy.load_file(file), plain.restore(folder)]
    also_said = plain.metadata(folder).custom_metadata
  for each in found:
    assert each.keys() == params.keys()
    for name in params:
      assert np.asarray(each[name]).dtype == np.float32
      assert np.asarray(each[name]).tobytes() == params[name].tobytes()
  with safetensors.safe_open(file, framework="np") as opened:
    said = opened.metadata()
  assert said == also_said
  assert (said["format"], said["tokenizer"], said["merged_tokens"]) == ("ddiloco", "bytes", "12345")
  assert from_dict({"model": json.loads(said["model"])}).model == CONFIG.model


def test_a_folder_for_hugging_face(workdir, params, tmp_path, capsys):
  """The logits: tests/models/test_transformer_huggingface.py."""
  to, flag = tmp_path / "deep" / "llama", "--format=huggingface"
  assert export(workdir, to, flag) == 0
  files = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
  assert contents(to).keys() == {str(to / name) for name in files}
  shape = transformer.huggingface_config(CONFIG.model)
  tensors = transformer.huggingface_tensors(CONFIG.model, params)
  said = json.loads((to / "config.json").read_text())
  more = {"max_position_embeddings": 8, "bos_token_id": None, "eos_token_id": 0}
  assert said == {**shape, **more}
  found = safetensors.numpy.load_file(to / "model.safetensors")
  assert found.keys() == tensors.keys()
  for name, value in tensors.items():
    np.testing.assert_array_equal(found[name], value)
  tokenizer = tokenizers.Tokenizer.from_file(str(to / "tokenizer.json"))
  text = "def f(x):\n\treturn 'Ā é日本\0\x7f\xad\N{NO-BREAK SPACE} '"
  ids = tokenizer.encode(text).ids
  assert ids == list(text.encode()) and tokenizer.decode(ids) == text
  with safetensors.safe_open(to / "model.safetensors", framework="np") as opened:
    assert opened.metadata()["format"] == "pt" and opened.metadata()["merged_tokens"] == "12345"

  capsys.readouterr()
  assert export(workdir, to, flag) == 2 and "--overwrite" in capsys.readouterr().err
  (to / ".model.safetensors.0123456789abcdef").write_text("what a killed export has left")
  assert export(workdir, to, flag, "--overwrite") == 0
  assert contents(to).keys() == {str(to / name) for name in files}
  (to / "mine.txt").write_text("not to be lost")
  assert export(workdir, to, flag, "--overwrite") == 2
  assert "has other files than such an export" in capsys.readouterr().err


def test_a_folder_for_hugging_face_that_was_cut_off_is_no_model(workdir, tmp_path, monkeypatch):
  to, write = tmp_path / "llama", Path.write_bytes
  assert export(workdir, to, "--format=huggingface") == 0
  monkeypatch.setattr(Path, "write_bytes", full)
  assert export(workdir, to, "--format=huggingface", "--overwrite") == 2
  assert not (to / "config.json").exists()
  monkeypatch.setattr(Path, "write_bytes", write)
  assert export(workdir, to, "--format=huggingface", "--overwrite") == 0
  assert (to / "config.json").exists()


def test_where_new_tensors_have_no_room_an_older_export_stays_whole(workdir, tmp_path, monkeypatch):
  to = tmp_path / "llama"
  assert export(workdir, to, "--format=huggingface") == 0
  before = contents(to)
  monkeypatch.setattr(safetensors.numpy, "save_file", full)
  assert export(workdir, to, "--format=huggingface", "--overwrite") == 2
  assert contents(to) == before


def test_an_export_reads_its_tokenizer_once(workdir, tmp_path, monkeypatch):
  loads, load = [], tokens.load_tokenizer
  counted = lambda setting: loads.append(setting) or load(setting)
  monkeypatch.setattr(tokens, "load_tokenizer", counted)
  assert export(workdir, tmp_path / "llama", "--format=huggingface") == 0
  assert loads == ["bytes"]


@pytest.mark.parametrize(
  "to, why", [("gs://bucket/x", "a local folder"), ("x.safetensors", "a local folder")]
)
def test_hugging_face_needs_a_local_folder(unexported, to, why):
  assert why in unexported(to, "--format=huggingface")


def test_a_model_that_hugging_face_does_not_know_is_refused(tmp_path, refused):
  config = of_own_model(tmp_path / "mine.d" / "mine.py")
  run = begun(tmp_path, config)
  weights.save(run / "result", initial.initial_params(config))
  flags = f"--workdir={run}", f"--to={tmp_path / 'x'}", f"--config={run}", "--format=huggingface"
  assert "this model is no Llama and no Mixtral" in refused("export", *flags)


def test_of_a_result_that_says_none_nothing_is_said_of_tokens(workdir, params, tmp_path):
  weights.save(workdir / "result", params)
  assert export(workdir, tmp_path / "model.safetensors") == 0
  with safetensors.safe_open(tmp_path / "model.safetensors", framework="np") as opened:
    assert opened.metadata().keys() == {"format", "model", "tokenizer"}


@pytest.mark.parametrize("form", FORMS)
def test_what_is_there_is_replaced_only_with_overwrite(workdir, params, tmp_path, unexported, form):
  to = tmp_path / form
  weights.save(to, {"old": np.ones(3, np.float32)})
  assert "exists. Fix: choose another path, or add --overwrite" in unexported(to)
  assert export(workdir, to, "--overwrite") == 0
  assert weights.load(to).keys() == params.keys()


@pytest.mark.parametrize("form", FORMS)
def test_what_a_killed_export_left_is_deleted_by_the_next(workdir, tmp_path, monkeypatch, form):
  """Each is as large as the weights."""
  left, other = tmp_path / f".{form}.0123456789abcdef", tmp_path / f".{form}.notes"
  for path in (left, other):
    path.write_text("half of it")
  assert export(workdir, tmp_path / form) == 0
  assert not left.exists() and other.exists()


def test_foreign_things_are_never_replaced(tmp_path, unexported):
  home, file = tmp_path / "home", tmp_path / "notes"
  (home / "letters").mkdir(parents=True)
  (home / "letters" / "dear").write_text("me")
  file.write_text("mine")
  (tmp_path / "folder.safetensors").mkdir()
  for to in (home, tmp_path, file, tmp_path / "folder.safetensors"):
    assert "and is never replaced" in unexported(to, "--overwrite")
    assert "and is never replaced" in unexported(to)


def test_paths_that_cannot_be_are_refused(tmp_path, unexported):
  (tmp_path / "file").touch()
  for form in FORMS:
    assert "cannot be written (" in unexported(tmp_path / "file" / form)
    assert "cannot be written (" in unexported(f"/proc/nothing/{form}")
  assert "can only be local" in unexported("gs://bucket/model.safetensors")


def test_a_full_disk_is_said(workdir, tmp_path, unexported, monkeypatch):
  monkeypatch.setattr(safetensors.numpy, "save_file", full)
  assert "No space left on device: " in unexported(tmp_path / "model.safetensors")


def test_where_to_is_needed_and_a_result(workdir, tmp_path, refused):
  for to in ((), ("--to=",)):
    assert "--to: is needed. Fix: " in refused("export", f"--workdir={workdir}", *to)
  assert "--workdir: is needed. Fix: " in refused("export", "--to=x")
  (tmp_path / "empty").mkdir()
  flags = f"--workdir={tmp_path / 'empty'}", f"--to={tmp_path / 'x'}"
  assert "holds no run" in refused("export", *flags)
  (tmp_path / "empty" / "config.json").write_text(CONFIG.to_json())
  assert "does not exist. Fix: finish a run" in refused("export", *flags)


def test_its_help_says_what_it_writes(capsys):
  assert cli.main(["export", "--help"]) == 0
  out = capsys.readouterr().out
  assert out.startswith("ddiloco export: Writes the global model")
  assert "layers/attention/query" in out and "first axis is the layer" in " ".join(out.split())
