"""The user's own model, data and optimizer: found by name, refused by name if they do not fit."""

import dataclasses
import os
import textwrap

import jax
import numpy as np
import pytest

import ddiloco
from ddiloco import custom
from ddiloco.cli.arguments import Flags
from ddiloco.config import Config, ConfigError, default, from_dict
from ddiloco.engines import session
from ddiloco.models import transformer
from ddiloco.roles import initial
from ddiloco.training import data, evaluate, step
from ddiloco.training.tokens import load_tokenizer

MODEL = """
import jax, jax.numpy as jnp, optax
from flax import nnx
from ddiloco.models.model import NnxModel

class Line(NnxModel):
  reports = ("loss",)

  def __init__(self, size):
    super().__init__(lambda rngs: nnx.Linear(size, 1, rngs=rngs))
    self.size = size

  def inputs(self, batch_size, sequence_length):
    x = jax.ShapeDtypeStruct((batch_size, self.size), jnp.float32)
    return {"x": x, "y": jax.ShapeDtypeStruct((batch_size, 1), jnp.float32)}

  def loss(self, params, batch, execution=None):
    loss = jnp.mean((self.module(params)(batch["x"]) - batch["y"]) ** 2)
    return loss, dict.fromkeys(self.reports, loss)

  def evaluate(self, params, batch):
    return self.loss(params, batch)[1]

def model(config):
  return Line(config.options.get("size", 3))

def broken(config):
  return 1 / 0

def lacking(config):
  raise ImportError("needs wheels. Fix: pip install wheels.")

def leaving(config):
  raise SystemExit("no weights here")

def half(config):
  made = Line(3)
  made.evaluate = None
  return made

def nosy(config):
  made = Line(3)
  made.reports = ("loss", "wisdom")
  return made

def silent(config):
  made = Line(3)
  made.reports = ()
  return made

def counting(config):
  return Line3(lambda rngs: nnx.BatchNorm(3, rngs=rngs))

class Line3(Line):
  def __init__(self, build):
    NnxModel.__init__(self, build)
    self.size = 3

def narrow(config):
  return Line3(lambda rngs: nnx.Linear(3, 1, param_dtype=jnp.bfloat16, rngs=rngs))

def rounded(config):
  made = Line(3)
  made.loss = lambda *_: (jnp.zeros((), jnp.bfloat16), {"loss": jnp.zeros(())})
  return made

def forgetful(config):
  made = Line(3)
  made.shapes = lambda: None
  return made

def wide(config):
  made = Line(3)
  made.inputs = lambda batch_size, length: jax.ShapeDtypeStruct((7, 3), jnp.float32)
  return made

class Empty(nnx.Module):
  def __init__(self):
    self.kernel = nnx.Param(jnp.zeros((0, 1)))

def empty(config):
  return Line3(lambda rngs: Empty())

def momentum(config):
  return optax.sgd(1.0, momentum=config.options["momentum"])

def halved(config):
  cast = lambda updates, params: jax.tree.map(lambda u: u.astype(jnp.float16), updates)
  return optax.stateless(cast)

def failing(config):
  return optax.stateless(lambda updates, params: 1 / 0)

def drifting(config):
  init = lambda params: {"count": jnp.zeros((), jnp.int32)}
  update = lambda g, state, params=None: (g, {"count": state["count"] + 1.0})
  return optax.GradientTransformation(init, update)

def growing(config):
  update = lambda g, state, params=None: (g, (jnp.zeros(()),))
  return optax.GradientTransformation(lambda params: (), update)

def noisy(config):
  return optax.add_noise(0.1, 0.5, jax.random.key(0))

def keeping(state):
  update = lambda g, state, params=None: (g, state)
  return optax.GradientTransformation(lambda params: state, update)

def doubled(config):
  return keeping({"a": {"b": jnp.zeros(2)}, "a/b": jnp.zeros(2)})

def nameless(config):
  return keeping({"": jnp.zeros(2), "a": {"": jnp.zeros(2), "c": jnp.zeros(2)}})

def anchored(config):
  return optax.contrib.schedule_free_sgd(1.0)

def scaled_by_loss(config):
  return optax.contrib.reduce_on_plateau()

def bare(config):
  made = Line(3)
  made.loss = lambda params, batch, execution=None: jnp.zeros(())
  return made

def unequal(config):
  made = Line(3)
  made.loss = lambda params, batch: Line.loss(made, params, batch)
  return made

def scored(config):
  made = Line(3)
  made.evaluate = lambda params, batch: made.loss(params, batch)[0]
  return made

def tuples(config):
  made = Line(3)
  made.inputs = lambda batch_size, length: {"x": (batch_size, 3), "y": (batch_size, 1)}
  return made

def sized(config):
  made = Line(3)
  made.shapes = lambda: {"kernel": (3, 1), "bias": (1,)}
  return made

def listed(config):
  made = Line(3)
  made.shapes = lambda: [jax.ShapeDtypeStruct((3, 1), jnp.float32)]
  return made

def pair(config):
  made = Line(3)
  made.loss = lambda params, batch, execution=None: list(Line.loss(made, params, batch))
  return made

def nested(config):
  made = Line(3)
  made.shapes = lambda: {"layer": {"kernel": jax.ShapeDtypeStruct((3, 1), jnp.float32)}}
  return made

def unnamed(config):
  made = Line(3)
  made.logical_axes = lambda: {"kernel": None, "bias": None}
  return made

def leaned(config):
  made = Line(3)
  made.logical_axes = lambda: {"kernel": ["layers", "mlp"], "bias": (None,)}
  return made

def uncounted(config):
  made = Line(3)
  made.flops_per_token = lambda sequence_length: None
  return made

def begun(config):
  made = Line(3)
  made.init = lambda key: [jnp.zeros((3, 1)), jnp.zeros(1)]
  return made

def layered(config):
  made = Line(3)
  made.init = lambda key: {"layer": {"kernel": jnp.zeros((3, 1)), "bias": jnp.zeros(1)}}
  return made

def parted(config):
  made = Line(3)
  made.loss = lambda params, batch, execution=None: (jnp.zeros(()), {"loss": (jnp.zeros(()),)})
  return made

def numbered(config):
  made = Line(3)
  made.logical_axes = lambda: {0: (None,), 1: (None, None)}
  return made

def rooted(config):
  made = Line(3)
  for method in ("shapes", "logical_axes"):
    old = getattr(made, method)()
    setattr(made, method, lambda old=old: {f"/{name}": each for name, each in old.items()})
  return made

def twofold(config):
  made = Line(3)
  made.frozen = lambda: {"bias": jnp.zeros(1)}
  return made

def surplus(config):
  made, axes = Line(3), Line(3).logical_axes()
  made.logical_axes = lambda: {**axes, "other": ()}
  return made

def unkept(config):
  made = Line(3)
  made.frozen = lambda: {"base": [1.0]}
  return made

def unfound(config):
  made = Line(3)
  made.frozen = lambda: dict(base=open("/nowhere/base"))
  return made

def strange(config):
  made = Line(3)
  made.frozen = lambda: {"other": jnp.zeros(1)}
  return made

def mismatched(config):
  made = Line(3)
  made.evaluate = lambda params, batch: {"loss": jnp.sum(batch["x"] @ batch["y"])}
  return made

number = 3
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> str:
  path = tmp_path_factory.mktemp("own") / "mine.py"
  path.write_text(MODEL)
  return str(path)


def config(section: str, name: str, **options) -> Config:
  return from_dict({section: {"custom": name, "options": options}, "sync": {"num_fragments": 2}})


def test_a_model_is_found_by_its_name_and_planned_and_made_like_any(file):
  mine = config("model", f"{file}:model", size=5)
  assert initial.shapes(mine.model) == {"bias": (1,), "kernel": (5, 1)}
  assert sum(initial.make_plan(mine).sizes) == 6
  params = initial.initial_params(mine)
  assert {n: (v.shape, v.dtype.name) for n, v in params.items()} == {
    "bias": ((1,), "float32"), "kernel": ((5, 1), "float32"),
  }  # fmt: skip
  again = initial.initial_params(dataclasses.replace(mine, seed=1))
  assert not np.array_equal(params["kernel"], again["kernel"])
  assert custom.load_model(mine.model) is custom.load_model(mine.model)


def test_without_a_name_the_model_is_the_transformer():
  plain = from_dict({})
  assert custom.load_model(plain.model) is transformer.language_model(plain.model)
  custom.check(plain)


@pytest.mark.parametrize(
  ("name", "rule"),
  [
    ("broken", r"broken\(\) fails at .*mine.py, line \d+ \(ZeroDivisionError: division by zero\)"),
    ("lacking", r"lacking\(\) fails at .*needs wheels\.\)\. Fix: pip install wheels\.$"),
    ("leaving", r"leaving\(\) fails at .*mine.py, line \d+ \(SystemExit: no weights here\)"),
    ("half", r"it made a Line, which has no evaluate; every ddiloco.models.model.Model has"),
    ("momentum", r"momentum\(\) fails at .*KeyError"),
    ("missing", r"has no function 'missing'. Fix: name one of its functions \(.*model"),
    ("number", r"has no function 'number'"),
    ("nosy", r"loss\(\) also reports \['wisdom'\]"),
    ("silent", r"loss\(\) gives loss = None, must give a float32 scalar"),
    ("counting", r"shapes\(\) fails at .*are no nnx.Param.*\)\. Fix: normalise by LayerNorm"),
    ("bare", r"loss\(\) gives Shape.*, must give \(what is minimised, {\"loss\": what is rep"),
    ("unequal", r"loss\(\) fails \(TypeError: .*takes 2 positional arguments but 3 were given"),
    ("scored", r"evaluate\(\) gives ShapeDtypeStruct.*, must give {\"loss\": ...}"),
    ("tuples", r"inputs\(\) has 2 where a jax.ShapeDtypeStruct must be"),
    ("sized", r"shapes\(\) has \(3, 1\) where a jax.ShapeDtypeStruct must be"),
    ("listed", r"shapes\(\) gives a list, must give a dict whose keys are names"),
    ("nested", r"shapes\(\) has {'kernel': Shape.*} where a jax.ShapeDtypeStruct must be"),
    ("unnamed", r"axes None: it must .*have .* a tuple of names or None, one for each axis"),
    ("leaned", r"axes \[.layers., .mlp.\]: it must .*a tuple of names or None, one for each axis"),
    ("uncounted", r"flops_per_token\(\) fails \(TypeError: float\(\) argument must be"),
    ("begun", r"init\(\) gives a list, must give a dict whose keys are names"),
    ("layered", r"init\(\) has {'bias': Shape.*} where a jax.ShapeDtypeStruct must be"),
    ("parted", r"loss\(\) gives loss = \(Shape.*,\), must give a float32 scalar"),
    ("numbered", r"shapes\(\) and logical_axes\(\) must be dicts that name the same"),
    (
      "twofold",
      r"frozen\(\) and shapes\(\) both have \['bias'\]: a parameter is trained, or it is",
    ),
    ("surplus", r"logical_axes\(\) must name the same: \['other'\] is in the latter alone"),
    ("unkept", r"frozen\(\) has \[1.0\] where a jax.ShapeDtypeStruct must be"),
    ("unfound", r"frozen\(\) fails at .*mine.py, line \d+ \(FileNotFoundError"),
    ("strange", r"loss\(\) fails at .*ValueError: params: other is .*not known"),
    ("mismatched", r"evaluate\(\) fails at .*mine.py, line \d+ \(TypeError: dot_general"),
    ("rooted", r"parameter '/.*: it must .*; its name is parts joined by '/', none of them empty"),
    ("empty", r"parameter 'kernel' is float32\[0, 1\], .*: it must .*have values"),
    ("wide", r"its first axis must be the batch"),
    ("narrow", r"parameter 'bias' is bfloat16\[1\], .*: it must be float32"),
    ("rounded", r"loss\(\) gives what is minimised = .*bfloat16.*, must give a float32 scalar"),
    ("forgetful", r"shapes\(\) gives a NoneType, must give a dict"),
  ],
)
def test_what_does_not_fit_is_refused_by_name(file, name, rule):
  refused = r"^model.custom = '.*mine.py:" + name + "': .*" + rule
  with pytest.raises(ConfigError, match=refused) as caught:
    initial.make_plan(config("model", f"{file}:{name}"))
  assert caught.type is ConfigError, "it is no storage that did not answer"


def test_a_file_that_could_not_be_read_is_read_once_it_can(tmp_path):
  path = tmp_path / "late.py"
  path.write_text("import not_there_yet\n")
  for _ in range(2):
    with pytest.raises(ConfigError, match=r"late.py, line 1 \(ModuleNotFoundError"):
      initial.make_plan(config("model", f"{path}:model"))
  path.write_text(MODEL)
  assert initial.make_plan(config("model", f"{path}:model"))


def test_a_loss_and_its_metrics_may_be_a_list_as_in_jax(file):
  plan = initial.make_plan(config("model", f"{file}:pair"))
  assert sum(plan.sizes) > 0


def test_a_place_that_is_not_there_is_refused_by_name(tmp_path):
  with pytest.raises(ConfigError, match=r"nowhere.py is no file. Fix: name a Python file"):
    initial.make_plan(config("model", f"{tmp_path}/nowhere.py:model"))
  with pytest.raises(ConfigError, match=r"no_such_module_.*ModuleNotFoundError"):
    initial.make_plan(config("model", "no_such_module_at_all:model"))


def test_a_function_of_the_running_program_is_refused():
  rule = r"'__main__:model': is in this program alone: .* Fix: name a file that has it"
  with pytest.raises(ConfigError, match=f"^model.custom = {rule}"):
    config("model", "__main__:model")


@pytest.mark.parametrize("text", ["model", "mine.py", "mine.py:", "my-module:model", ":model"])
def test_a_name_has_a_place_and_a_function(text):
  for section in custom.SECTIONS:
    with pytest.raises(ConfigError, match=rf"^{section}.custom = .*must name a function"):
      from_dict({section: {"custom": text}})


def test_options_are_for_a_custom_part_alone_and_what_json_can_say():
  with pytest.raises(ConfigError, match=r"^inner.options = .*are for inner.custom alone"):
    from_dict({"inner": {"options": {"momentum": 0.9}}})
  with pytest.raises(ConfigError, match=r"^model.options = .*what JSON can say"):
    from_dict({"model": {"custom": "a:b", "options": {"sizes": (1, 2)}}})
  free = default()
  free.model.custom, free.model.options.sizes = "a:b", [1, 2]
  assert from_dict(free).model.options == {"sizes": [1, 2]}


def test_an_optimizer_by_name_takes_the_place_of_adamw(file):
  mine = config("inner", f"{file}:momentum", momentum=0.5).inner
  transform = step.optimizer(mine, {})
  updates, _ = transform.update({"w": np.ones(2)}, transform.init({"w": np.zeros(2)}))
  np.testing.assert_array_equal(updates["w"], [-1, -1])  # a descent of rate 1
  with pytest.raises(
    ConfigError,
    match=r"^inner.custom = .*which has no update; every optax.GradientTransformation has",
  ):
    step.optimizer(config("inner", f"{file}:model").inner, {})
  initial.make_plan(config("inner", f"{file}:momentum", momentum=0.5))
  for name, rule in (
    ("halved", r"update\(\) gives .*float16"),
    ("failing", "ZeroDivisionError"),
    ("drifting", r"update\(\) makes the state .*float32\[\].* init\(\) makes: .*int32\[\]"),
    ("growing", r"update\(\) makes the state"),
    ("doubled", r"the state has arrays \['inner/a/b', 'inner/a/b'\], which no snapshot can tell"),
    ("nameless", r"the state has arrays \['inner/', 'inner/a/'\], which no snapshot can tell"),
    ("noisy", r"the state .*rng_key.* has keys, which no snapshot can hold.*key_data"),
    ("anchored", r"init\(\) reads the parameters' values.*Fix: take one without"),
    ("scaled_by_loss", r"update\(grads, state, params\) fails \(TypeError: .* argument: 'value'"),
  ):
    with pytest.raises(ConfigError, match=rf"^inner.custom = .*{rule}"):
      initial.make_plan(config("inner", f"{file}:{name}"))


def test_muon_for_a_model_without_hidden_matrices_is_refused_before_a_role_begins(file, tmp_path):
  """With --engine=processes each island was refused, and an untrained result was left."""
  own = {"model": {"custom": f"{file}:model"}, "inner": {"optimizer": "muon"}}
  config = from_dict({**own, "sync": {"num_fragments": 2}})
  for refuse in (session.describe, lambda config: session.train(config, tmp_path / "run")):
    with pytest.raises(ConfigError, match=r"^inner.optimizer = 'muon': is for hidden matrices"):
      refuse(config)
  assert not (tmp_path / "run").exists()


def test_a_path_becomes_absolute_and_does_not_part_roles(file, monkeypatch, tmp_path):
  folder, name = os.path.split(file)
  monkeypatch.chdir(folder)
  relative = config("model", f"{name}:model")
  assert custom.absolute(relative) == initial.absolute_start(relative)
  assert custom.absolute(relative).model.custom == f"{file}:model"
  module = config("model", "package.module:model")
  assert custom.absolute(module) is module
  # The same text elsewhere is the same model, another text is another one.
  contracts, plan = [], initial.make_plan(relative)
  for text in (MODEL, MODEL + "# changed"):
    (tmp_path / "copy.py").write_text(text)
    other = config("model", f"{tmp_path}/copy.py:model")
    contracts.append(initial.contract(other, plan))
  assert contracts[0] == initial.contract(relative, plan) != contracts[1]


def test_what_a_custom_part_is_told_parts_roles(file):
  mine = from_dict({"data": {"custom": f"{file}:model", "options": {"a": 1}}})
  other = dataclasses.replace(mine, data=dataclasses.replace(mine.data, options={"a": 2}))
  plan = initial.make_plan(mine)
  assert initial.contract(mine, plan) != initial.contract(other, plan)


def test_a_relative_path_is_that_of_the_folder_in_which_it_is_given(tmp_path, monkeypatch):
  """A notebook that has gone on to another project was given the model of the first."""
  found = []
  for size in ("3", "30"):
    (tmp_path / size).mkdir()
    (tmp_path / size / "mine.py").write_text(MODEL.replace('"size", 3', f'"size", {size}'))
    monkeypatch.chdir(tmp_path / size)
    mine = {"model": {"custom": "mine.py:model"}, "sync": {"num_fragments": 2}}
    found.append(ddiloco.plan(mine, gbps=1.0, step_seconds=1.0)["bytes_per_step"])
  assert found[1] > found[0]


def test_a_changed_initial_value_and_changed_frozen_arrays_are_new_too(tmp_path):
  path = tmp_path / "drawn.py"
  mine = config("model", f"{path}:model")
  text = f"{MODEL}\nLine.frozen = lambda self: {{'base': jnp.zeros(SIZE)}}\n"
  path.write_text(text.replace("SIZE", "2"))
  drawn = initial.initial_params(mine)["kernel"]
  assert custom.frozen_shapes(mine.model)["base"].shape == (2,)
  scaled = "Line.init = lambda self, key: jax.tree.map(lambda x: x + 1, NnxModel.init(self, key))"
  path.write_text(text.replace("SIZE", "4") + scaled)
  custom.renew(mine)
  np.testing.assert_array_equal(initial.initial_params(mine)["kernel"], drawn + 1)
  assert custom.frozen_shapes(mine.model)["base"].shape == (4,)


def test_text_is_that_of_the_changed_model(tmp_path):
  path, tokenizer = tmp_path / "writer.py", load_tokenizer("bytes")
  mine, found = config("model", f"{path}:model").model, []
  for letter in "ab":
    writes = f"jax.nn.one_hot(jnp.full(tokens.shape, ord('{letter}')), 256)"
    path.write_text(f"{MODEL}\nLine.logits = lambda self, params, tokens: {writes}\n")
    custom.renew(config("model", mine.custom))
    found.append(evaluate.generate(mine, {}, tokenizer, "", 3, temperature=0.0))
  assert found == ["aaa", "bbb"]


def test_parts_in_a_module_are_found_like_in_a_file(tmp_path, monkeypatch):
  (tmp_path / "mine_as_module.py").write_text(textwrap.dedent(MODEL))
  monkeypatch.syspath_prepend(tmp_path)
  mine = config("model", "mine_as_module:model")
  assert initial.shapes(mine.model) == {"bias": (1,), "kernel": (3, 1)}
  assert custom.identity(mine.model)[0] == "model" and len(custom.identity(mine.model)[1]) == 16
  assert custom.identity(from_dict({}).model) == []


def test_what_is_no_source_is_refused_by_name(file):
  with pytest.raises(ConfigError, match=r"^data.custom = .*which has no batches, heldout_batches"):
    data.open_data(config("data", f"{file}:model").data)


def test_inputs_are_traced_not_made(file):
  mine = config("model", f"{file}:model")
  model = custom.load_model(mine.model)
  total, metrics = jax.eval_shape(model.loss, model.shapes(), model.inputs(4, 1))
  assert total.shape == () and set(metrics) == {"loss"}


def test_an_option_that_the_file_gives_can_be_changed_on_the_command_line(tmp_path):
  (tmp_path / "mine.py").write_text(
    "from ddiloco import config\n"
    "def get_config():\n"
    "  c = config.default()\n"
    "  c.model.custom, c.model.options = 'a:b', {'width': 3}\n"
    "  return c\n"
  )
  file = f"--config={tmp_path}/mine.py"
  given = Flags(["train", file, "--config.model.options.width=4"])
  given.add_config()
  given.parse("")
  assert given.final_config().model.options == {"width": 4}
  with pytest.raises(
    ConfigError, match=r"Did you mean \"width\".* Fix: use an option that .*mine.py"
  ):
    Flags(["train", file, "--config.model.options.widht=4"]).add_config()


def test_a_plan_needs_no_file_of_the_data(tmp_path):
  """Only roles that read them do."""
  assert initial.make_plan(config("data", f"{tmp_path}/elsewhere.py:data")).fragments
