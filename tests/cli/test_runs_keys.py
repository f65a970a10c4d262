"""`ddiloco keys` makes keys, says what to copy where, and needs no device for it."""

import pytest

from ddiloco import cli
from ddiloco.network.keys import Keys

ROLES = ["learner-0", "learner-1", "syncer-0", "evaluator"]


def test_makes_keys_and_says_what_to_copy_where(tmp_path, capsys):
  folder = tmp_path / "keys"
  command = ["keys", f"--keys={folder}", "--learners=2", "--shards=1"]
  assert cli.main(command) == 0
  out, err = capsys.readouterr()
  assert err == "" and "made keys of learner-0, learner-1, syncer-0, evaluator." in out
  assert f"Copy {folder}/public to every host" in out
  assert f"{folder}/secret/learner-0.key_secret  ->  DIR/secret/ on the host of learner-0" in out
  public = {role: Keys.load(folder, role).public for role in ROLES}
  assert len(set(public.values())) == len(ROLES)

  assert cli.main(command) == 0
  assert "none was made" in capsys.readouterr().out
  assert cli.main(["keys", f"--keys={folder}", "--learners=3", "--shards=1"]) == 0
  assert "made keys of learner-2." in capsys.readouterr().out
  assert {role: Keys.load(folder, role).public for role in ROLES} == public


@pytest.mark.parametrize(
  "arguments, says",
  [
    (["--learners=2", "--shards=1"], "--keys: is needed. Fix: give --keys=DIR"),
    # Of a variable that is not set: they were made in the folder of the moment.
    (["--keys=", "--learners=2", "--shards=1"], "--keys: is needed. Fix: give --keys=DIR"),
    (["--keys={tmp}/k", "--shards=1"], "--learners: is needed. Fix: give --learners=8"),
    (["--keys={tmp}/k", "--learners=2"], "--shards: is needed. Fix: give --shards=2"),
    (["--keys={tmp}/k", "--learners=-1", "--shards=1"], "learners"),
    (["--keys={tmp}/k", "--learners=many", "--shards=1"], "learners"),
    (["--keys={tmp}/k", "--learners=32769", "--shards=1"], "--learners=32769"),
    (["--keys={tmp}/k", "--learners=2", "--shards=32769"], "--shards=32769"),
    (["--keys={tmp}/k", "--learners=2", "--shards=1", "more"], "'more': is not a flag"),
    (["--keys={tmp}/file", "--learners=2", "--shards=1"], "cannot be written"),
  ],
)
def test_what_is_typed_wrong_is_said_and_makes_nothing(arguments, says, tmp_path, refused):
  (tmp_path / "file").touch()
  said = refused("keys", *[a.format(tmp=tmp_path) for a in arguments])
  assert said.startswith("ddiloco keys: ") and says in said
