"""Which role runs where, what it is told, and the config that all of them share. PURE."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from ddiloco.checks import require
from ddiloco.config import Config
from ddiloco.launch.shapes import Shape, shape_of

SHARD_PORT, ISLAND_PORT, PROBE_PORT = 7000, 7001, 8080
TERM_STATUS = 143  # of a role that left when asked to: no scheduler takes it for the end of the run
# Of the 15 seconds that GKE gives a pod on a spot machine that is taken away.
SPOT_DRAIN_SECONDS = 10.0
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,28}[a-z0-9])?")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclasses.dataclass(frozen=True)
class PlacedIsland:
  """One island: its learner's number, its slice, and the cluster (a context) or zone it is in."""

  learner: int
  where: str
  shape: Shape

  @property
  def role(self) -> str:
    return f"learner-{self.learner}"


@dataclasses.dataclass(frozen=True)
class Placement:
  """A run in a cloud.

  Attributes:
    name: of the run, and the beginning of the names of all that is made for it.
    config: of every role; islands know how many devices and hosts they have.
    islands: in the order of learners.
    image: of the containers, with ddiloco, and libtpu for the islands.
    spot: islands are on machines that may be taken away at any time, with little notice.
    max_restarts: failures of an island, or of a shard, after which it is given up; what is
      taken away does not count.
  """

  name: str
  config: Config
  islands: tuple[PlacedIsland, ...]
  image: str
  spot: bool
  max_restarts: int

  @property
  def shards(self) -> range:
    return range(self.config.sync.num_shards)


def place(
  config: Config,
  name: str,
  places: Sequence[str],
  bucket: str,
  image: str,
  spot: bool = False,
  max_restarts: int = 10,
) -> Placement:
  """Puts every island on a slice of its `islands.topology`.

  Args:
    config: the experiment's.
    name: of the run.
    places: of `--place`, "WHERE=0,2-3"; empty: all islands where the program's own default is.
    bucket: gs://..., where snapshots go.
    image: and the rest as of `Placement`.

  Raises:
    ConfigError: something cannot be placed so.
  """
  rule = "must be 1 to 30 small letters, digits and dashes, and begin with a letter"
  require(_NAME.fullmatch(name) is not None, "--name", name, rule, "for example --name=regions-12b")
  rule = "must be a bucket that all roles reach"
  require(bucket.startswith("gs://"), "--bucket", bucket, rule, "give --bucket=gs://BUCKET/FOLDER")
  fix = "build one (docs/launch.md) and give --image=REGION-docker.pkg.dev/PROJECT/REPO/NAME:TAG"
  require(bool(image), "--image", image, "is what all roles run in", fix)
  rule = "roles of their own meet at a syncer shard"
  require(config.sync.num_shards > 0, "sync.num_shards", 0, rule, "set it to 1 or more")
  for section in ("model", "data", "inner"):
    custom = getattr(config, section).custom
    rule = "is a file of this machine, which no other has"
    fix = "name a module that is installed in the image, PACKAGE.MODULE:NAME"
    require(".py:" not in custom, f"{section}.custom", custom, rule, fix)
  count = config.islands.num_learners
  where = _where(places, count)
  shapes = []
  for learner in range(count):
    topology, field = config.islands.island(learner).topology, f"islands.topology of {learner}"
    fix = "set it, or give --config.islands.topology=v6e:8x8, for example"
    require(bool(topology), field, topology, "a slice needs a topology", fix)
    shapes.append(shape_of(topology, field))
  overrides = {str(k): dict(v) for k, v in config.islands.overrides.items()}
  for learner, shape in enumerate(shapes):
    own = {"devices": shape.chips, "hosts": shape.hosts}
    overrides[str(learner)] = overrides.get(str(learner), {}) | own
  network = config.network
  if spot:
    drain_seconds = min(network.drain_seconds, SPOT_DRAIN_SECONDS)
    network = dataclasses.replace(network, drain_seconds=drain_seconds)
  config = dataclasses.replace(
    config,
    islands=dataclasses.replace(config.islands, overrides=overrides),
    network=network,
    checkpoint=dataclasses.replace(config.checkpoint, path=bucket),
  )
  islands = (PlacedIsland(m, where[m], shape) for m, shape in enumerate(shapes))
  return Placement(name, config, tuple(islands), image, spot, max_restarts)


def _where(places: Sequence[str], count: int) -> list[str]:
  """Of every learner; "" if nothing was said."""
  if not places:
    return [""] * count
  found: dict[int, str] = {}
  for text in places:
    where, _, learners = text.rpartition("=")
    ranges = [_RANGE.fullmatch(part) for part in learners.split(",")]
    fix = "write --place=WHERE=0,1 or --place=WHERE=0-3, once for each cluster or zone"
    require(bool(where) and all(ranges), "--place", text, "must say who is where", fix)
    for match in filter(None, ranges):
      for learner in range(int(match[1]), int(match[2] or match[1]) + 1):
        twice = f"learner {learner} has a place already ({found.get(learner)})"
        require(learner not in found, "--place", text, twice, "name each learner once")
        rule = f"there is no learner {learner}: islands.num_learners = {count}"
        require(learner < count, "--place", text, rule, "drop it")
        found[learner] = where
  missing = [m for m in range(count) if m not in found]
  rule = f"learners {missing} have no place"
  require(not missing, "--place", " ".join(places), rule, "name them too")
  return [found[m] for m in range(count)]


def role_command(
  placement: Placement, role: str, syncers: Sequence[str], folder: str, workdir: str
) -> list[str]:
  """What starts `role`, "learner-3", on its machine; its number is the last part of its name.

  Args:
    placement: of the run.
    role: to be started.
    syncers: urls of all shards, as this role reaches them.
    folder: on that machine, with config.json and keys.
    workdir: on that machine.
  """
  kind, _, number = role.partition("-")
  flags = {
    "config": f"{folder}/config/config.json",
    "workdir": workdir,
    "run_id": placement.name,
    "keys": f"{folder}/keys",
    "syncers": ",".join(syncers),
    "http": f"0.0.0.0:{PROBE_PORT}",
    "term_status": TERM_STATUS,
  }
  if kind == "learner":
    flags["learner"] = number
  elif kind == "syncer":
    flags |= {"shard": number, "bind": f"tcp://0.0.0.0:{SHARD_PORT}"}
  return ["ddiloco", kind, *(f"--{name}={value}" for name, value in flags.items())]


def host_flags(shape: Shape, host: str, leader: str) -> list[str]:
  """For each host of an island of several: its number, and where host 0 is. Else nothing."""
  return [f"--host={host}", f"--hosts=tcp://{leader}:{ISLAND_PORT}"] if shape.hosts > 1 else []
