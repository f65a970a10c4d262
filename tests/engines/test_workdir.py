"""A workdir that several processes share: one config, one start, whoever comes first."""

import concurrent.futures
import dataclasses
import time

import pytest

from ddiloco.config import Config, ConfigError, IslandsConfig, RunConfig, from_dict
from ddiloco.engines import workdir
from ddiloco.runtime import initial

CONFIG = from_dict({"seed": 3, "sync": {"num_shards": 2}})


def test_the_first_leaves_config_and_time_and_the_others_find_them(tmp_path):
  before = time.time()
  started = workdir.join(tmp_path / "run", CONFIG)
  assert before <= started <= time.time()
  assert workdir.join(tmp_path / "run", CONFIG) == started
  assert workdir.saved_config(tmp_path / "run") == CONFIG
  assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["config.json", "started"]


def test_many_at_once_agree(tmp_path):
  with concurrent.futures.ThreadPoolExecutor(16) as pool:
    starts = set(pool.map(lambda _: workdir.join(tmp_path / "run", CONFIG), range(64)))
  assert len(starts) == 1
  assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["config.json", "started"]


def test_what_each_role_may_have_its_own_way(tmp_path):
  workdir.join(tmp_path, CONFIG)
  other = dataclasses.replace(
    CONFIG,
    islands=IslandsConfig(num_learners=2, batch_size=32),
    run=dataclasses.replace(CONFIG.run, restart_seconds=9.0),
    network=dataclasses.replace(CONFIG.network, streams=7),
  )
  workdir.join(tmp_path, other)


@pytest.mark.parametrize(
  "changes, text",
  [
    ({"seed": 4}, "seed = 4: the run in --workdir="),
    ({"run": RunConfig(total_tokens=5)}, "run.total_tokens = 5: "),
    ({"run": RunConfig(init_from="a")}, "run.init_from = 'a': "),
    ({"sync": dataclasses.replace(CONFIG.sync, sync_period=9)}, "sync.sync_period = 9: "),
    ({"model": dataclasses.replace(CONFIG.model, num_layers=9)}, "model.num_layers = 9: "),
  ],
)
def test_another_run_in_the_same_workdir_is_refused(tmp_path, changes, text):
  workdir.join(tmp_path, CONFIG)
  with pytest.raises(ConfigError) as error:
    workdir.join(tmp_path, dataclasses.replace(CONFIG, **changes))
  assert str(error.value).startswith(text) and ". Fix: use the same --config" in str(error.value)
  assert workdir.saved_config(tmp_path) == CONFIG


def test_a_workdir_that_cannot_be_is_refused(tmp_path):
  (tmp_path / "file").write_text("x")
  with pytest.raises(ConfigError, match=r"cannot be used .*Fix: "):
    workdir.join(tmp_path / "file" / "run", CONFIG)
  (tmp_path / "started").write_text("yesterday")
  with pytest.raises(ConfigError, match=r"yesterday.*Fix: "):
    workdir.join(tmp_path, CONFIG)


def agreed(config: Config) -> str:
  return initial.contract(config, initial.make_plan(config))


@pytest.mark.parametrize(
  "section, field, value, same",
  [
    ("sync", "sync_period", 7, False),
    ("sync", "num_fragments", 3, False),
    ("model", "rope_theta", 5.0, False),
    ("inner", "learning_rate", 1.0, False),
    ("outer", "momentum", 0.5, False),
    ("data", "sequence_length", 16, False),
    ("data", "tokenizer", "sentencepiece:x", False),
    ("run", "total_tokens", 5, False),
    ("run", "init_from", "a.safetensors", False),
    ("data", "heldout_sequences", 3, True),
    ("run", "evaluations", 3, True),
    ("network", "streams", 3, True),
    ("islands", "batch_size", 3, True),
  ],
)
def test_the_contract_is_what_all_roles_must_agree_on(section, field, value, same):
  changed = dataclasses.replace(getattr(CONFIG, section), **{field: value})
  other = dataclasses.replace(CONFIG, **{section: changed})
  assert (agreed(other) == agreed(CONFIG)) == same


def test_the_contract_is_short_and_knows_the_seed():
  assert len(agreed(CONFIG)) == 16
  assert agreed(dataclasses.replace(CONFIG, seed=4)) != agreed(CONFIG)
