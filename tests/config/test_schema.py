"""Every rule of the config says field, value, rule and fix; what goes in comes out again."""

import dataclasses
import difflib
import json
import math
import re
import runpy
import typing
from pathlib import Path

import ml_collections
import pytest

from ddiloco import config as config_lib
from ddiloco.config import Config, ConfigError, Fault, IslandConfig, default, from_dict
from tests import golden_configs

CONFIGS = Path(__file__).parent.parent.parent / "configs"
SECTIONS = ("model", "data", "inner", "islands", "sync", "outer", "network", "run", "checkpoint")


def nested(path: str, value) -> dict:
  """{"a": {"b": value}} of "a.b"."""
  for name in reversed(path.split(".")):
    value = {name: value}
  return value


def refusal(values) -> str:
  with pytest.raises(ConfigError) as caught:
    from_dict(values)
  return str(caught.value)


def test_defaults_are_valid_and_the_config_dict_says_the_same():
  assert from_dict({}) == Config() == from_dict(default())


@pytest.mark.parametrize(
  "values",
  [
    {"seed": (1 << 32) - 1, "network": {"streams": 64}},
    {"model": {"num_layers": 1 << 14, "num_kv_heads": 4, "num_experts": 3, "experts_per_token": 3}},
    {"model": {"num_experts": 1, "experts_per_token": 1}, "data": {"sequence_length": 1}},
    {"inner": {"final_share": 0.0, "clip_norm": 0.0}, "outer": {"final_share": 1.0}},
    {"inner": {"final_share": 1.0}, "outer": {"learning_rate": 1e3, "decay_share": 0.0}},
    {"outer": {"learning_rate": 1e-11, "final_share": 0.1}, "run": {"hang_seconds": 0}},
    {"sync": {"sync_period": 1, "overlap_steps": 0, "mix_alpha": 0.0, "num_shards": 8}},
    {"sync": {"error_feedback": True, "apply": "mix"}},
    {"sync": {"mix_alpha": 1.0, "max_norm_ratio": 1.01, "min_quorum": 4, "num_fragments": 1 << 15}},
    {"islands": {"loss_chunks": 256, "data": 7, "devices": 7, "batch_size": 7}},
    {"chaos": {"faults": [{"action": "poison", "role": "learner-3", "at_step": 0, "factor": 0}]}},
    {"chaos": {"faults": [{"action": "slow", "role": "syncer-1", "at_seconds": 0, "factor": 1}]}},
    {"chaos": {"faults": [{"action": "stall", "role": "learner-0", "at_step": 0, "seconds": 0}]}},
  ],
)
def test_the_edge_of_a_rule_is_inside_it(values):
  config = from_dict(values)
  assert from_dict(json.loads(config.to_json())) == config


@pytest.mark.parametrize(
  "path, value, rule",
  [
    *[(f"{section}.{f}", 0, "greater than 0") for section, fields in [
        ("model", "vocab_size num_layers model_dim num_heads num_kv_heads head_dim mlp_dim"),
        ("model", "rope_theta norm_epsilon capacity_factor patch_size image_channels"),
        ("data", "sequence_length heldout_sequences"),
        ("inner", "learning_rate epsilon accumulation_steps"),
        ("islands", "num_learners hosts batch_size loss_chunks"),
        ("sync", "num_fragments sync_period min_quorum quarantine_after"),
        ("sync", "liveness_steps liveness_seconds"),
        ("network", "streams hello_seconds patience_seconds silence_seconds give_up_seconds"),
        ("checkpoint", "keep patience_seconds"),
        ("run", "total_tokens"),
      ] for f in fields.split()],
    *[(f"{section}.{f}", -1, "not be negative") for section, fields in [
        ("model", "num_experts load_balance_weight image_size"),
        ("inner", "warmup_steps decay_steps weight_decay clip_norm"),
        ("islands", "devices min_step_seconds"),
        ("sync", "num_shards max_rows overlap_steps value_threads snapshot_steps"),
        ("network", "queue_bytes drain_seconds"),
        ("checkpoint", "warmup_steps donor_seconds"),
        ("run", "evaluations evaluator_devices sample_tokens"),
        ("run", "restart_seconds max_restarts hang_seconds"),
      ] for f in fields.split()],
    *[(f, share, "[0, 1)") for share in (-0.1, 1.0) for f in
      ("inner.b1", "inner.b2", "sync.grace_safety", "outer.momentum", "outer.decay_share")],
    *[(f, share, "[0, 1]") for share in (-0.1, 1.1) for f in
      ("inner.final_share", "sync.mix_alpha")],
    ("seed", -1, "between 0 and 2**32 - 1"),
    ("seed", 1 << 32, "between 0 and 2**32 - 1"),
    ("model.compute_dtype", "float23", "one of float32, bfloat16"),
    ("model.num_kv_heads", 3, "divide model.num_heads (4)"),
    ("model.head_dim", 15, "even"),
    ("data.source", "stdlob", "one of stdlib, text, tokens, synthetic"),
    ("data.token_dtype", "uint8", "one of uint16, uint32"),
    ("data.heldout_share", 0.0, "between 0 and 1"),
    ("data.heldout_share", 1.0, "between 0 and 1"),
    ("data.path", "x.txt", "needed for sources text and tokens"),
    ("data.tokenizer", "sentencepiece:", "sentencepiece:FILE"),
    ("data.tokenizer", "words:x", "sentencepiece:FILE"),
    ("islands.attention", "flash", "one of auto, einsum, splash, cudnn"),
    ("islands.remat", "some", "one of none, products, attention, full"),
    ("islands.loss_chunks", 3, "divide model.vocab_size (256)"),
    ("network.streams", 65, "at most 64"),
    ("islands.num_learners", (1 << 15) + 1, "at most 32768"),
    ("sync.num_shards", 9, "not exceed sync.num_fragments (8)"),
    ("sync.num_fragments", (1 << 15) + 1, "at most 32768"),
    ("model.rope_theta", 1e-101, "at least 1e-100"),
    ("sync.overlap_steps", 24, "smaller than sync.sync_period (24)"),
    ("sync.min_quorum", 5, "not exceed islands.num_learners (4)"),
    ("sync.fragmentation", "balance", "one of balanced, layer, tensor, strided"),
    ("sync.apply", "overwrit", "one of overwrite, mix, rebase"),
    ("sync.merge", "mean", "one of rda, average"),
    ("sync.push_codec", "fp8", "one of f32, bf16, int8, int4"),
    ("sync.publish_codec", "fp8", "one of f32, bf16, int8, int4"),
    ("sync.max_norm_ratio", 1.0, "greater than 1"),
    ("sync.error_feedback", True, "built into apply = 'rebase'"),
    ("outer.learning_rate", 0.0, "at least 1e-12"),
    ("outer.learning_rate", 1e-40, "at least 1e-12"),
    ("outer.learning_rate", 1001, "at most 1000"),
    *[("outer.final_share", share, "(0, 1]") for share in (0, 1.1)],
  ],
)  # fmt: skip
def test_a_broken_rule_names_field_value_rule_and_fix(path, value, rule):
  shown = float(value) if _type_of(path) is float else value
  text = refusal(nested(path, value))
  assert text.startswith(f"{path} = {shown!r}: ") and rule in text
  assert re.search(r"\. Fix: .+\.$", text)


def _type_of(path: str) -> type:
  cls: typing.Any = Config
  for name in path.split("."):
    cls = typing.get_type_hints(cls)[name]
  return cls


@pytest.mark.parametrize(
  "values, field, rule",
  [
    ({"model": {"num_experts": 2, "experts_per_token": 3}}, "model.experts_per_token", "1 and"),
    ({"model": {"num_experts": 2, "experts_per_token": 0}}, "model.experts_per_token", "1 and"),
    ({"data": {"source": "text"}}, "data.path", "source is 'text'"),
    ({"islands": {"data": -1}}, "islands.(data, fsdp, tensor)", "at most one of them -1"),
    ({"islands": {"tensor": 0}}, "islands.(data, fsdp, tensor)", "must be positive"),
    ({"islands": {"devices": 3, "tensor": 2}}, "islands.(data, fsdp, tensor)", "must multiply"),
    ({"islands": {"devices": 4, "fsdp": 2}}, "islands.(data, fsdp, tensor)", "must multiply"),
    ({"islands": {"devices": 4, "batch_size": 6}}, "islands.batch_size", "accumulation_steps = 4"),
    ({"islands": {"devices": 3, "hosts": 2}}, "islands.devices", "Fix: use 2, or 0: all that each"),
    (
      {"inner": {"optimizer": "muon"}, "checkpoint": {"rejoin": "peer"}},
      "checkpoint.rejoin",
      "Muon",
    ),
    ({"inner": {"accumulation_steps": 3}}, "islands.batch_size", "accumulation_steps = 3"),
    ({"islands": {"resources": {"TPU": object()}}}, "islands.resources", "what JSON can say"),
    ({"islands": {"resources": {1: 4}}}, "islands.resources", "what JSON can say"),
    ({"islands": {"resources": {"TPU": math.inf}}}, "islands.resources", "what JSON can say"),
    ({"islands": {"overrides": {"01": {}}}}, "islands.overrides", "learner numbers"),
    ({"islands": {"overrides": {1: {}}}}, "islands.overrides", "learner numbers"),
    ({"islands": {"overrides": {"²": {}}}}, "islands.overrides", "learner numbers"),
    ({"islands": {"overrides": {"1": 3}}}, "islands.overrides.1", "mapping"),
    ({"islands": {"overrides": 3}}, "islands.overrides", "mapping"),
    (
      {"islands": {"overrides": {"1": {"fsdp": 2}}}},
      "islands.(data, fsdp, tensor)",
      "must multiply",
    ),
    ({"islands": {"overrides": {"1": {"devices": "2"}}}}, "islands.overrides.1.devices", "int"),
  ],
)
def test_rules_that_need_two_fields(values, field, rule):
  text = refusal(values)
  assert text.startswith(f"{field} = ") and rule in text and ". Fix: " in text


def test_fields_of_a_model_of_ones_own_mean_what_its_function_says():
  own = {"head_dim": 15, "num_kv_heads": 3, "image_size": 9}
  assert refusal({"model": own}).startswith("model.image_size = 9: ")
  own = {"model": own | {"custom": "mine.py:model"}, "islands": {"loss_chunks": 3}}
  assert from_dict(own).model.head_dim == 15


def test_the_fix_of_an_outer_rate_that_falls_too_low_is_one():
  text = refusal({"outer": {"final_share": 1e-13}})
  assert text.endswith("Fix: use 0.5, and 0.05 for outer.final_share.")
  assert from_dict({"outer": {"learning_rate": 0.5, "final_share": 0.05}})


def test_an_optimizer_of_ones_own_takes_the_place_of_muon():
  inner = {"optimizer": "muon", "custom": "mine.py:inner"}
  assert from_dict({"inner": inner, "checkpoint": {"rejoin": "peer"}}).inner.optimizer == "muon"


@pytest.mark.parametrize(
  "changes, field, rule",
  [
    ({"action": "kil"}, "chaos.faults.action", "one of kill, stall, slow"),
    ({"role": "engine"}, "chaos.faults.role", "must name a role"),
    ({"role": "learner-x"}, "chaos.faults.role", "must name a role"),
    ({"role": "learner-01"}, "chaos.faults.role", "must name a role"),
    ({"role": "learner-4"}, "chaos.faults.role", "the run has 4"),
    ({"role": "syncer-2"}, "chaos.faults.role", "the run has 2"),
    ({"at_seconds": 2.0}, "chaos.faults.(at_step, at_seconds)", "exactly one"),
    ({"at_step": -1}, "chaos.faults.(at_step, at_seconds)", "exactly one"),
    ({"action": "stall", "seconds": -1}, "chaos.faults.seconds", "not be negative"),
    ({"seconds": -2}, "chaos.faults.seconds", "not be negative"),
    ({"factor": 0.5}, "chaos.faults.factor", "at least 1"),
    ({"action": "poison", "factor": -0.5}, "chaos.faults.factor", "at least 0"),
    *[({"share": share}, "chaos.faults.share", "(0, 1]") for share in (0.0, 1.1)],
    ({"delay_seconds": -1.0}, "chaos.faults.delay_seconds", "not be negative"),
    ({"bits_per_second": 0.0}, "chaos.faults.bits_per_second", "greater than 0"),
    ({"peers": ("engine-1",)}, "chaos.faults.peers", "must name a role"),
    ({"role": "region-us"}, "chaos.faults.role", "none of chaos.regions"),
    ({"action": "join"}, "chaos.faults.role", "there from the start"),
    ({"action": "join", "role": "learner-5"}, "chaos.faults.role", "join in order"),
    ({"action": "join", "role": "syncer-2"}, "chaos.faults.role", "only a learner can join"),
    ({"at_step": 1.5}, "chaos.faults[0].at_step", "of type int"),
    ({"when": 3}, "chaos.faults[0].when", "no such field"),
  ],
)
def test_rules_of_faults(changes, field, rule):
  good = {"action": "kill", "role": "learner-2", "at_step": 10}
  assert from_dict({"chaos": {"faults": [good]}}).chaos.faults == (Fault(**good),)
  text = refusal({"chaos": {"faults": [{**good, **changes}]}})
  assert text.startswith(f"{field} = ") and rule in text and ". Fix: " in text


def test_a_fault_of_a_region_strikes_its_roles_and_its_links_to_the_outside():
  regions = {"east": ["learner-2", "syncer-1"]}
  cut = {"action": "cut", "role": "region-east", "at_seconds": 1.0}
  chaos = from_dict({"chaos": {"regions": regions, "faults": [cut]}}).chaos
  assert [f.role for f in chaos.of_roles()] == ["learner-2", "syncer-1"]
  assert {f.peers for f in chaos.of_roles()} == {("!learner-2", "!syncer-1")}
  own = from_dict({"chaos": {"regions": regions, "faults": [{**cut, "peers": ["syncer-0"]}]}}).chaos
  assert {f.peers for f in own.of_roles()} == {("syncer-0",)}
  text = refusal({"chaos": {"regions": {1: ["learner-2"], "west": []}, "faults": [cut]}})
  assert "'region-east': is none of chaos.regions (1, 'west'). Fix: " in text
  text = refusal({"chaos": {"regions": {"east": ["learner"]}}})
  assert text.startswith("chaos.regions.east = ") and "must name a role" in text
  text = refusal({"chaos": {"regions": {"east": ["learner-9"]}, "faults": [cut]}})
  assert text.startswith("chaos.faults.role = 'learner-9'")


def test_a_learner_that_joins_may_be_struck_too():
  join = {"action": "join", "role": "learner-4", "at_step": 5, "seconds": -1}
  kills = [{"action": "kill", "role": f"learner-{m}", "at_step": 10} for m in (1, 4)]
  assert from_dict({"chaos": {"faults": [join, *kills]}}).num_islands() == 5


def test_all_learners_of_a_region_may_join():
  regions = {"late": ["learner-5", "learner-4"]}
  join = {"action": "join", "role": "region-late", "at_step": 5, "seconds": -1}
  assert from_dict({"chaos": {"regions": regions, "faults": [join, join]}}).num_islands() == 6


def test_a_fault_without_a_needed_field_names_it():
  text = refusal({"chaos": {"faults": [{"action": "kill"}]}})
  assert text.startswith("chaos.faults[0] = {'action': 'kill'}: must have role. Fix: ")
  assert "drop this fault" in refusal(
    {
      "sync": {"num_shards": 0},
      "chaos": {"faults": [{"action": "kill", "role": "syncer-0", "at_step": 1}]},
    }
  )


@pytest.mark.parametrize(
  "path, close",
  [
    ("modle", "model"),
    *[(f"{section}.sed", "") for section in SECTIONS],
    ("chaos.fault", "faults"),
    ("sync.min_qurum", "min_quorum"),
    ("islands.overrides.1.batchsize", "batch_size"),
    ("islands.overrides.1.num_learners", ""),
  ],
)
def test_unknown_fields_are_refused_at_every_level(path, close):
  text = refusal(nested(path, 3))
  assert text.startswith(f"{path} = 3: there is no such field. Fix: ")
  assert (f"did you mean '{close}'" if close else "Fix: ") in text


def test_a_wrong_name_is_refused_where_it_is_written():
  """In a notebook it stayed in the config, and was refused again after it had been corrected."""
  config = default()
  with pytest.raises(AttributeError, match='Did you mean "total_tokens"'):
    config.run.total_tokns = 5
  config.data.options.base = config.islands.resources.TPU = 4  # names that are free
  assert "total_tokns" not in config.run and config.data.options.base == 4


def test_names_that_are_right_are_compared_with_no_others(monkeypatch):
  """Nine tenths of the time that a config took went into what was close to each of its names."""
  looked_for = []
  monkeypatch.setattr(difflib, "get_close_matches", lambda name, *_: looked_for.append(name) or [])
  from_dict(default())
  assert not looked_for
  with pytest.raises(ConfigError):
    from_dict({"sync": {"min_qurum": 3}})
  assert looked_for == ["min_qurum"]


def test_a_path_is_checked_before_anything_is_parsed():
  config_lib.check_field("sync.min_quorum", "2")
  config_lib.check_field("islands.overrides", "{}")
  for path, rule in (
    ("sync.min_qurum", "did you mean 'min_quorum'"),
    ("snyc.min_quorum", "did you mean 'sync'"),
    ("sync.min_quorum.x", "sync.min_quorum has no fields"),
    ("islands.overrides.2.devices", "in the experiment file"),
  ):
    with pytest.raises(ConfigError, match=re.escape(rule)):
      config_lib.check_field(path, "2")


def _scalar_fields():
  for section in SECTIONS:
    for name, hint in typing.get_type_hints(typing.get_type_hints(Config)[section]).items():
      hint = str if typing.get_origin(hint) is typing.Literal else hint
      if hint in (int, float, bool, str):
        yield f"{section}.{name}", hint


@pytest.mark.parametrize("path, hint", list(_scalar_fields()))
def test_wrong_types_are_refused_for_every_field(path, hint):
  wrong = {
    int: (True, 1.0, "1", None, [1]),
    float: (True, "1", None, math.nan, math.inf, -math.inf),
    bool: (1, 0.0, "true", None),
    str: (1, True, None, b"x"),
  }[hint]
  for value in wrong:
    text = refusal(nested(path, value))
    assert text.startswith(f"{path} = {value!r}: must be ")


def test_a_whole_number_is_a_float_too():
  rate = from_dict({"outer": {"learning_rate": 1}}).outer.learning_rate
  assert rate == 1.0 and isinstance(rate, float)
  assert "must be a finite number" in refusal({"outer": {"learning_rate": 10**400}})


NUMBERS = [(path, hint) for path, hint in _scalar_fields() if hint in (int, float)]


@pytest.mark.parametrize("path, hint", NUMBERS)
def test_a_giant_number_is_refused_by_name(path, hint):
  giants = [10**400, -(10**400), 10**5000]
  if hint is int or path.endswith("seconds"):
    giants += [10**20, -(10**20)]
  if hint is float:
    giants += [1e101, -1e101]
  for value in giants:
    text = refusal(nested(path, value))
    assert text.startswith(f"{path} = ") and ". Fix: " in text and len(text) < 400


def test_a_model_of_millions_of_layers_is_refused_at_once():
  assert "model.num_layers = 1000000" in refusal({"model": {"num_layers": 10**6}})


def test_a_number_of_thousands_of_digits_is_no_learner():
  assert "learner numbers" in refusal({"islands": {"overrides": {"1" * 5000: {}}}})


@pytest.mark.parametrize("values", [3, None, [("seed", 1)], {3: 4}, {"sync": 3}, {"chaos": []}])
def test_anything_but_nested_mappings_is_refused(values):
  assert ". Fix: " in refusal(values)


def everything() -> dict:
  return {
    "seed": 3,
    "model": {"num_experts": 4, "compute_dtype": "bfloat16"},
    "islands": {"overrides": {"2": {"devices": 4, "fsdp": 2, "data": 2}}},
    "chaos": {
      "faults": [
        {"action": "kill", "role": "learner-1", "at_step": 5, "seconds": -1},
        {"action": "slow", "role": "syncer-1", "at_seconds": 1, "factor": 3},
      ]
    },
  }


def test_dict_config_dict_and_json_round_trips():
  frozen = from_dict(everything())
  assert from_dict(dataclasses.asdict(frozen)) == frozen
  assert from_dict(json.loads(frozen.to_json())) == frozen
  assert from_dict(ml_collections.ConfigDict(everything())) == frozen
  inside = everything()  # a ConfigDict as the value of a free name
  inside["islands"]["overrides"]["2"] = ml_collections.ConfigDict(
    {"devices": 4, "data": 2, "fsdp": 2}
  )
  assert from_dict(json.loads(from_dict(inside).to_json())) == frozen
  c = default()
  c.seed, c.model.num_experts, c.model.compute_dtype = 3, 4, "bfloat16"
  c.islands.overrides = everything()["islands"]["overrides"]
  # A tuple may hold ConfigDicts as well: `to_dict` does not reach into it.
  c.chaos.faults = tuple(map(ml_collections.ConfigDict, everything()["chaos"]["faults"]))
  assert from_dict(c) == frozen
  assert from_dict(json.loads(from_dict(c).to_json())) == frozen


def test_free_names_may_have_dots():
  """A run of such a config can be loaded from its workdir, and changed."""
  frozen = from_dict(
    {
      "model": {"custom": "a:b", "options": {"act.fn": 1, "more": {"c.d": [{"e.f": 2}]}}},
      "chaos": {"regions": {"us.east": ["learner-1"]}},
    }
  )
  c = config_lib.changeable(frozen)
  assert from_dict(c) == frozen
  c.model.options["act.fn"] = 3
  assert from_dict(c).model.options["act.fn"] == 3


def test_a_config_keeps_no_list_of_the_one_that_it_is_made_of():
  """In a sweep over `options.sizes[0]` each run trained the first run's model, which was found by
  the config that had changed with it."""
  c = default()
  c.model.custom, c.model.options = "a:b", {"sizes": [16], "more": {"parts": [{"size": 1}]}}
  first = from_dict(c)
  c.model.options.sizes[0] = 32
  c.model.options.more.parts[0]["size"] = 2
  assert first.model.options == {"sizes": [16], "more": {"parts": [{"size": 1}]}}
  assert from_dict(c).model.options == {"sizes": [32], "more": {"parts": [{"size": 2}]}}


def test_a_config_cannot_be_changed():
  with pytest.raises(dataclasses.FrozenInstanceError):
    Config().seed = 3  # type: ignore[misc]


@pytest.mark.parametrize(
  "wrong, field",
  [({"batch_size": 7}, "islands.batch_size"), ({"loss_chunks": 3}, "islands.loss_chunks")],
)
def test_islands_of_learners_that_join_later_are_checked_too(wrong, field):
  values = {"islands": {"overrides": {"4": wrong}}, "inner": {"accumulation_steps": 2}}
  assert refusal(values).startswith(f"{field} = ")


def test_overrides_change_one_island_only():
  override = {"1": {"devices": 4, "fsdp": 2, "tensor": 2, "batch_size": 6}}
  c = from_dict({"islands": {"num_learners": 3, "overrides": override}})
  assert c.islands.island(0) == c.islands.island(2) == IslandConfig()
  assert c.islands.island(1) == IslandConfig(devices=4, fsdp=2, tensor=2, batch_size=6)
  assert c.islands.island(1).data_shards(4) == 2
  assert [c.tokens_per_step(m) for m in range(3)] == [8 * 128, 6 * 128, 8 * 128]
  assert c.planned_steps() == math.ceil(4_000_000 / (22 * 128))


@pytest.mark.parametrize(
  ("common", "override"),
  [
    ({"devices": 4, "data": -1, "fsdp": 1}, {"fsdp": 2}),
    ({"devices": 4}, {"tensor": 2}),
    ({"devices": 4, "hosts": 2}, {"hosts": 4}),
  ],
)
def test_an_override_is_checked_together_with_the_common_settings(common, override):
  """Alone, with the defaults' one device, it would break a rule."""
  c = from_dict({"islands": {**common, "overrides": {"1": override}}})
  assert c.islands.island(1) == IslandConfig(**{**common, **override})


def test_the_mesh_takes_what_the_devices_leave():
  assert IslandConfig(devices=0, data=2, fsdp=-1, tensor=2).mesh_shape(12) == (2, 3, 2)
  with pytest.raises(ConfigError, match=r"must multiply to the island's 6 devices.*multiple of 4"):
    IslandConfig(devices=0, data=2, fsdp=-1, tensor=2).mesh_shape(6)
  with pytest.raises(ConfigError, match="set one axis to -1"):
    IslandConfig(devices=0, data=2, fsdp=1).mesh_shape(6)


def test_without_shards_a_quorum_means_nothing():
  assert from_dict({"sync": {"num_shards": 0, "min_quorum": 9}}).sync.min_quorum == 9


@pytest.mark.parametrize("path", sorted((CONFIGS / "chaos").glob("*.py")), ids=lambda p: p.stem)
def test_fault_plans_fit_the_quickstart_and_say_how_to_use_them(path):
  module = runpy.run_path(str(path))
  config = runpy.run_path(str(CONFIGS / "quickstart.py"))["get_config"]()
  config.chaos = module["get_config"]()
  frozen = from_dict(config)
  assert frozen.chaos.faults and from_dict(json.loads(frozen.to_json())) == frozen
  doc = module["__doc__"]
  assert f"--config.chaos=configs/chaos/{path.name}" in doc and re.search(
    r"^Expect: +\S", doc, re.M
  )


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.py")), ids=lambda path: path.stem)
def test_experiment_files_load_validate_and_say_how_to_run_them(path):
  module = runpy.run_path(str(path))
  frozen = from_dict(module["get_config"]())
  assert from_dict(json.loads(frozen.to_json())) == frozen
  doc = module["__doc__"]
  for what in ("Command", "Hardware", "Time", "Numbers"):
    assert re.search(rf"^{what}: +\S", doc, re.M), what
  assert f"configs/{path.name}" in doc, "the command names the file itself"


@pytest.mark.parametrize(
  "name, presets", [("diloco", []), ("streaming_diloco", []), ("wan", ["data_parallel"])]
)
def test_a_quorum_of_all_learners_is_one_of_as_many_as_there_are(name, presets):
  config = runpy.run_path(str(CONFIGS / f"{name}.py"))["get_config"](*presets)
  config.islands.num_learners = 7
  assert from_dict(config).sync.min_quorum == 7
  config.sync.min_quorum = 3
  assert (config.islands.num_learners, from_dict(config).sync.min_quorum) == (7, 3)


def test_every_config_says_what_it_said_before():
  """A changed default is seen: `python -m tests.golden_configs` writes the texts anew."""
  texts = golden_configs.texts()
  assert {path.name for path in golden_configs.GOLDEN.glob("*.txt")} == set(texts)
  for name, text in texts.items():
    assert (golden_configs.GOLDEN / name).read_text() == text, name
