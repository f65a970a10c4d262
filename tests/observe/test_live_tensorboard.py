"""TensorBoard: which scalars an event gives, what is in the files, and that failing is harmless."""

from __future__ import annotations

import io
import struct
from pathlib import Path

from tensorboardX.proto import event_pb2

from ddiloco.observe import live
from ddiloco.observe.live import TensorBoard, scalars


def _read(folder):
  """[(step, {tag: value})] of all event files in a folder, parsed from the record format."""
  records = []
  for path in sorted(folder.glob("*tfevents*")):
    data, at = path.read_bytes(), 0
    while at < len(data):
      (size,) = struct.unpack_from("<Q", data, at)  # then a crc of 4 bytes, data, a crc of 4 bytes
      message = event_pb2.Event.FromString(data[at + 12 : at + 12 + size])
      at += 16 + size
      if message.HasField("summary"):
        values = {value.tag: value.simple_value for value in message.summary.value}
        records.append((message.step, values))
  return records


def test_scalars_of_a_step(make):
  step = make.step(
    *(1.0, 0, 3),
    **{"global_step": 50, "loss": 2.5, "tokens": 1024, "learning_rate": 0.01},
    **{"seconds": 0.5, "data_seconds": 0.125},
  )
  assert scalars(step) == (
    50,
    {
      "train/loss": 2.5,
      "train/tokens_per_second": 2048.0,
      "train/step_seconds": 0.5,
      "train/data_seconds": 0.125,
      "train/learning_rate": 0.01,
      "train/grad_norm": 1.0,
    },
  )
  bare = make.changed(step, loss=None, grad_norm=None, learning_rate=None)
  assert list(scalars(bare)[1]) == ["train/data_seconds"], "an accelerator has only begun it"


def test_scalars_of_a_commit_and_an_evaluation(make):
  commit = make.commit(1.0, weights={0: 1.0}, rejected={1: "big"}, missing={2: "", 3: ""})
  step, values = scalars(commit)
  assert step == 2048
  assert values == {
    "sync/participation": 0.25,
    "sync/quorum_seconds": 0.05,
    "sync/grace_seconds": 0.02,
    "sync/merge_seconds": 0.004,
    "sync/staleness": 24,
  }
  known = make.changed(commit, agreement=0.25, rho=0.5, length=0.98)
  more = {"sync/agreement": 0.25, "sync/rho": 0.5, "sync/length": 0.98}
  assert scalars(known)[1] == values | more
  evaluation = make.event(1.0, "evaluator", "evaluation", merged_tokens=5000, loss=1.5)
  assert scalars(evaluation) == (5000, {"heldout/loss": 1.5})
  assert scalars(make.event(1.0, "engine", "restart", target="learner-1")) == (0, {})


def test_the_files_hold_them_by_role(tmp_path, make):
  board = TensorBoard(tmp_path)
  for number in range(1, 6):
    board(make.step(float(number), 0, number, loss=float(number)))
    board(make.step(float(number), 1, number, loss=-float(number)))
  board(make.event(1.0, "engine", "restart", target="learner-1"))
  board.close()
  assert sorted(path.name for path in (tmp_path / "tensorboard").iterdir()) == [
    "learner-0",
    "learner-1",
  ]
  for role, sign in (("learner-0", 1), ("learner-1", -1)):
    records = _read(tmp_path / "tensorboard" / role)
    assert [(step, v["train/loss"]) for step, v in records] == [(k, sign * k) for k in range(1, 6)]


def test_two_boards_never_share_a_file(tmp_path, make):
  for _ in range(2):
    board = TensorBoard(tmp_path)
    board(make.step(1.0, 0, 1))
    board.close()
  assert len(_read(tmp_path / "tensorboard" / "learner-0")) == 2


def test_a_failure_is_one_warning_and_all_is_written_when_writing_works_again(
  tmp_path, make, capsys
):
  """After one write that failed nothing was written any more."""
  folder = tmp_path / "tensorboard"
  folder.write_text("a file where the folder should be")
  board = TensorBoard(tmp_path, flush_seconds=0.001)
  for number in range(1, 4):
    board(make.step(1.0, 0, number))
    assert board._drain.flush(60)
  folder.unlink()
  board(make.step(1.0, 0, 4))
  assert board._drain.flush(60)
  assert [step for step, _ in _read(folder / "learner-0")] == [1, 2, 3, 4]
  assert capsys.readouterr().err.count("WARNING") == 1
  folder.rename(tmp_path / "elsewhere")
  folder.write_text("a file again")
  for number in range(5, 7):
    board(make.step(1.0, 0, number))
    assert board._drain.flush(60)
  board.close()
  assert capsys.readouterr().err.count("WARNING") == 1, "it is another trouble"


def test_what_waits_for_a_disk_is_bounded(tmp_path, make, monkeypatch, capsys):
  monkeypatch.setattr(live, "MOST_UNWRITTEN", 2000)
  (tmp_path / "tensorboard").write_text("a file, where its folder would be")
  board = TensorBoard(tmp_path, flush_seconds=1000.0)
  board._write([(0.0, make.step(1.0, 0, n)) for n in range(1, 200)])
  assert 2000 < len(board._unwritten["learner-0"]) < 3000
  board.close()
  assert capsys.readouterr().err.count("WARNING") == 1


def test_a_full_disk_tears_no_record(tmp_path, make, monkeypatch, capsys):
  """No reader gets past a torn one."""
  write, room = io.FileIO.write, 50

  class Full(io.FileIO):
    def write(self, data):
      return write(self, bytes(data)[:room])

  board, folder = TensorBoard(tmp_path, flush_seconds=0.001), tmp_path / "tensorboard"
  board(make.step(1.0, 0, 1))
  assert board._drain.flush(60)
  with monkeypatch.context() as full:
    full.setattr(Path, "open", lambda self, mode, buffering: Full(self, mode))
    board(make.step(2.0, 0, 2))
    assert board._drain.flush(60)
  assert [step for step, _ in _read(folder / "learner-0")] == [1]
  board.close()
  assert [step for step, _ in _read(folder / "learner-0")] == [1, 2]
  assert "is the disk full?" in capsys.readouterr().err


def test_an_event_that_cannot_be_drawn_takes_no_other_with_it(tmp_path, make, capsys):
  board = TensorBoard(tmp_path, flush_seconds=0.001)
  board(make.changed(make.step(1.0, 0, 1), global_step=10**40))
  assert board._drain.flush(60)
  board(make.step(2.0, 0, 2))
  board.close()
  assert [step for step, _ in _read(tmp_path / "tensorboard" / "learner-0")] == [2]
  assert capsys.readouterr().err.count("WARNING") == 1
