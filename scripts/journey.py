"""The journey of one fragment's delta, file by file: from an island's step to the new version.

  python scripts/journey.py [--brief]

Prints every stop in order: the file and line, the function with its lines, and what happens there;
then every file with its lines. Files count that work on the delta, on messages that carry it or
decide on it, or on its round; not the settings, the event log, or code that only starts and ends
roles. With --brief only the files. Last line: {"files", "lines", "most_files", "most_lines",
"stops", "lines_of_stops"}, where `lines` are those of whole files and `lines_of_stops` those of the
functions and classes of the walk; exit status 1 if there are more files or lines than `most_files`
or `most_lines`. `tests/test_journey.py` keeps the list true.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
from pathlib import Path

import common

import ddiloco

ROOT = Path(ddiloco.__file__).parent
MOST_FILES, MOST_LINES = 16, 3500


@dataclasses.dataclass(frozen=True)
class Stop:
  """One place on the journey.

  Attributes:
    file: under ddiloco/.
    function: of it, as "name" or "Class.name".
    what: the event here, in one sentence.
    leads: a name that this file and the next stop's both use: the call, the message or the action
      by which the delta gets there.
  """

  file: str
  function: str
  what: str
  leads: str

  @property
  def lines(self) -> tuple[int, int]:
    """First and last line of the function or class in its file."""
    return places(self.file)[self.function]


JOURNEY = (
  # The learner reports, and the owner of the fragment asks for it.
  Stop("training/island.py", "Island.step",
       "An inner step moves the island's parameters away from the base of each fragment.", "step"),
  Stop("roles/learner.py", "Learner._step",
       "The loop passes the finished step to the boundary between two steps.", "boundary"),
  Stop("roles/learner.py", "Exchange.boundary",
       "The exchange feeds the step and all arrived messages to the reducer.", "learner_on"),
  Stop("protocol/learner.py", "reports",
       "The reducer counts the step and reports the steps since the last sync.", "Report"),
  Stop("protocol/messages.py", "Report",
       "A report is a message of a few integers for each fragment.", "Report"),
  Stop("protocol/syncer.py", "_on_report",
       "The owner bounds the report's claims, and marks fragments that are due.", "mark_dirty"),
  Stop("protocol/states.py", "SyncerState.is_due",
       "A fragment is due where a learner has made about H steps since its last sync.", "is_due"),
  Stop("protocol/rounds.py", "start_rounds",
       "When a quorum is due, a round starts: every available learner is sent a pull.", "Pull"),
  # The learner copies the fragment out and pushes its delta.
  Stop("protocol/learner.py", "_answer_pulls",
       "At the next boundary the learner decides to send a push; the role makes its payload.",
       "Outstanding"),
  Stop("protocol/states.py", "Outstanding",
       "The state remembers the push until a publish answers it.", "Push"),
  Stop("roles/learner.py", "Exchange._copy_out",
       "The step thread starts the copy and hands the rest to the background thread.", "copy_out"),
  Stop("training/island.py", "Island.copy_out",
       "The fragment's pieces are copied on the devices, and start on their way to the host.",
       "copy_out"),
  Stop("training/island.py", "lower_piece",
       "A compiled program copies each piece; pieces of one kind share it.", "Piece"),
  Stop("core/fragments.py", "split_flat",
       "The plan says where in a flat vector of the host each piece lies.", "split_flat"),
  Stop("training/island.py", "Island.to_host",
       "The background thread waits for the pieces and puts them into that vector.", "to_host"),
  Stop("roles/learner.py", "Exchange._push",
       "The background thread makes the payload, flushes the log and sends.", "push"),
  Stop("core/delta.py", "Deltas.push",
       "delta = base - local; the learner keeps it as the shard will decode it.", "encode_chunk"),
  Stop("core/codec.py", "encode_chunk",
       "The delta is rounded to the wire codec, chunk by chunk.", "payload"),
  # Over the network.
  Stop("protocol/messages.py", "encode",
       "The push becomes a checked header; the payload stays as it is.", "encode"),
  Stop("network/transport.py", "Endpoint.send",
       "The endpoint counts the message and gives it to the peer, its object for that shard.",
       "post"),
  Stop("network/peers.py", "Peer.post",
       "Each connection to the shard gets its part of the payload.", "Parcel"),
  Stop("network/peers.py", "FrameSocket._write",
       "The connection's thread gives the bytes to the kernel, encrypted with keys.", "room"),
  Stop("network/peers.py", "Incoming.room",
       "The shard checks the header before it allocates memory for the payload.", "arrived"),
  Stop("network/peers.py", "FrameSocket._parse",
       "The payload is received straight into that memory.", "arrived"),
  Stop("network/peers.py", "Channel.arrived",
       "The connection belongs to the sender; this part of the payload is there.", "arrived"),
  Stop("network/peers.py", "Incoming.arrived",
       "With the last part the message goes to the inbox, with the time of its arrival.", "put"),
  Stop("network/transport.py", "Endpoint.put",
       "The header is decoded and checked; the message waits for its sender's turn.", "receive"),
  # The shard merges.
  Stop("roles/syncer.py", "Syncer._measure",
       "The reducer wants the push measured; the worker does that in the background.", "take_in"),
  Stop("core/delta.py", "Merger.take_in",
       "The push is measured, and stays in the wire codec.", "squares"),
  Stop("core/passes.py", "squares",
       "The push's squared norm in each piece is summed, chunk by chunk.", "share"),
  Stop("roles/syncer.py", "Syncer.handle",
       "The measured push goes to the reducer.", "syncer_on"),
  Stop("protocol/syncer.py", "syncer_on",
       "The shard takes in all waiting messages, then a tick decides.", "keep_push"),
  Stop("protocol/rounds.py", "keep_push",
       "The first valid push of each asked learner is kept.", "push_fault"),
  Stop("protocol/rules.py", "push_fault",
       "A push that claims more steps or tokens than are possible is rejected.", "push_fault"),
  Stop("protocol/rounds.py", "advance_rounds",
       "The round ends when all have answered, or there is a quorum and the grace is over.",
       "decide"),
  Stop("protocol/rules.py", "decide",
       "Whether the round is over, with the reason.", "screen"),
  Stop("protocol/rounds.py", "end_round",
       "Bad pushes are screened; if a quorum is left, the round commits, else it is abandoned.",
       "_commit"),
  Stop("protocol/rounds.py", "_commit",
       "The reducer decides which pushes make the new version.", "Commit"),
  Stop("core/delta.py", "commit",
       "Weights, merge, outer step, and the update for the learners.", "combine"),
  Stop("core/delta.py", "combine",
       "The merge rule: a weighted sum, and a factor for each piece.", "Coefficients"),
  Stop("core/outer.py", "Coefficients",
       "The coefficient of each push, by radial-directional averaging.", "pieces"),
  Stop("core/passes.py", "squares",
       "The first pass adds the pushes, chunk by chunk, for the length of their sum.", "step"),
  Stop("core/passes.py", "_step",
       "The second pass makes the outer step and the update for the learners.", "update"),
  Stop("core/outer.py", "update",
       "SGD with momentum on the merged delta.", "config"),
  Stop("roles/syncer.py", "Syncer._merged",
       "The new version is stored and logged before another role hears of it.", "_publish"),
  Stop("roles/syncer.py", "Syncer._with_payload",
       "The worker adds payload and seal to each publish.", "Sealer"),
  Stop("checkpoint/buddy.py", "Sealer.seal",
       "The seal proves later that the value is this shard's.", "held"),
  Stop("checkpoint/buddy.py", "Replication.when_safe",
       "The new version goes out, the same way back, when another shard has a copy of it.",
       "Publish"),
  # The learner applies.
  Stop("protocol/learner.py", "_on_publish",
       "The learner decides how to apply the version: overwrite, mix or rebase.", "Stage"),
  Stop("roles/learner.py", "Exchange._stage",
       "The background thread decodes the version and brings it to the devices.", "stage"),
  Stop("core/delta.py", "Deltas.stage",
       "The vector to add: the new value, minus what the parameters have of it.", "included"),
  Stop("protocol/learner.py", "_apply_ready",
       "The staged version is applied at the next boundary; tokens are counted once.", "Apply"),
  Stop("roles/learner.py", "Exchange._apply",
       "local <- keep * local + staged.", "apply"),
  Stop("training/island.py", "Island.apply",
       "The compiled program writes the result into the parameters, in place.", ""),
)  # fmt: skip


@functools.cache
def places(file: str) -> dict[str, tuple[int, int]]:
  """First and last line of each function and class of a file, methods as "Class.name"."""
  found = {}
  for node in ast.parse((ROOT / file).read_text()).body:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
      found[node.name] = _lines(node)
    if isinstance(node, ast.ClassDef):
      methods = (each for each in node.body if isinstance(each, ast.FunctionDef))
      found |= {f"{node.name}.{each.name}": _lines(each) for each in methods}
  return found


def _lines(node: ast.stmt) -> tuple[int, int]:
  return node.lineno, node.end_lineno or node.lineno


def files() -> dict[str, int]:
  """Every file of the journey, in order of its first stop, with its lines."""
  return {stop.file: (ROOT / stop.file).read_text().count("\n") for stop in JOURNEY}


def main() -> int:
  options = common.options(__doc__, brief=False)
  found = files()
  for number, stop in enumerate(() if options.brief else JOURNEY, 1):
    first, last = stop.lines
    place = f"{stop.file}:{first}  {stop.function}, {last - first + 1} lines"
    print(f"{number:3}  {place}: {stop.what}")
  for number, (file, lines) in enumerate(found.items(), 1):
    print(f"{number:3}  {lines:4} lines  {file}")
  total = {"files": len(found), "lines": sum(found.values())}
  spans = {(stop.file, *stop.lines) for stop in JOURNEY}
  walk = {"stops": len(spans), "lines_of_stops": sum(last - first + 1 for _, first, last in spans)}
  print(json.dumps({**total, "most_files": MOST_FILES, "most_lines": MOST_LINES, **walk}))
  return int(total["files"] > MOST_FILES or total["lines"] > MOST_LINES)


if __name__ == "__main__":
  common.run_script(main)
