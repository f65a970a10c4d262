"""Each role's place, machines and cost, and the config that all roles share. PURE.

Google Cloud has three names for one slice: GKE selects nodes by accelerator and topology, a node
pool is made of machines of a type, and the TPU API takes an accelerator type that counts cores.
GPUs are on GKE only, and an island of them is one host, whose GPUs need no network.
Sources: "Plan TPUs in GKE", "TPU versions" and "About GPUs in GKE" of its documentation, read in
November 2026.

There is no table of prices here: they differ by region, agreement and week. Google's are at
https://cloud.google.com/tpu/pricing and https://cloud.google.com/compute/all-pricing.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from ddiloco.checks import require
from ddiloco.config import Config
from ddiloco.environment import TERMINATED

# --- The cloud's names of a topology


@dataclasses.dataclass(frozen=True)
class Kind:
  """One generation of TPUs, or one kind of GPU."""

  gke_accelerator: str  # selects GKE's nodes, of TPUs together with the topology
  machine: str  # machine type in GKE, with {} for the chips of a host
  dimensions: int  # of a topology
  one_host: tuple[str, ...]  # topologies of slices with one host; of GPUs their numbers
  accelerator: str = ""  # accelerator type of the TPU API, without the number of cores
  runtime: str = ""  # image of TPU VMs; "": the TPU API has no such chips
  cores_per_chip: int = 1
  devices_per_chip: int = 1  # of JAX: mostly a chip's cores are one device
  # Whether GKE places the hosts of a slice by a workload policy, and not by --tpu-topology.
  by_policy: bool = False
  platform: str = "tpu"  # of JAX

  @property
  def gpu(self) -> bool:
    return self.platform == "cuda"


KINDS = {
  "v5e": Kind(
    *("tpu-v5-lite-podslice", "ct5lp-hightpu-{}t", 2, ("1x1", "2x2", "2x4")),
    *("v5litepod", "v2-alpha-tpuv5-lite"),
  ),
  "v5p": Kind("tpu-v5p-slice", "ct5p-hightpu-{}t", 3, ("2x2x1",), "v5p", "v2-alpha-tpuv5", 2),
  "v6e": Kind(
    *("tpu-v6e-slice", "ct6e-standard-{}t", 2, ("1x1", "2x2", "2x4")),
    *("v6e", "v2-alpha-tpuv6e"),
  ),
  "tpu7x": Kind("tpu7x", "tpu7x-standard-{}t", 3, ("2x2x1",), "tpu7x", "", 2, 2, by_policy=True),
  "a100": Kind("nvidia-a100-80gb", "a2-ultragpu-{}g", 1, tuple("1248"), platform="cuda"),
  "h100": Kind("nvidia-h100-80gb", "a3-highgpu-{}g", 1, tuple("1248"), platform="cuda"),
  "h200": Kind("nvidia-h200-141gb", "a3-ultragpu-{}g", 1, ("8",), platform="cuda"),
}
CHIPS_PER_HOST = 4  # of a slice of several hosts
_TOPOLOGY = re.compile(r"(?P<kind>\w+):(?P<shape>[1-9]\d{0,4}(x[1-9]\d{0,4})*)")


@dataclasses.dataclass(frozen=True)
class Shape:
  """A slice, with the cloud's names of it."""

  name: str  # of its kind, "v5p"
  topology: str  # "4x4x4", chips along each axis; of GPUs "8"
  chips: int  # in all
  hosts: int  # machines, each with an even share of the chips

  @property
  def kind(self) -> Kind:
    return KINDS[self.name]

  @property
  def chips_per_host(self) -> int:
    return self.chips // self.hosts

  @property
  def devices(self) -> int:
    """As JAX counts them, in all."""
    return self.chips * self.kind.devices_per_chip

  @property
  def machine_type(self) -> str:
    """Of a node pool in GKE."""
    return self.kind.machine.format(self.chips_per_host)

  @property
  def accelerator_type(self) -> str:
    """The TPU API's name of the slice, by its cores: v5p and TPU7x have two a chip."""
    return f"{self.kind.accelerator}-{self.chips * self.kind.cores_per_chip}"


def shape_of(topology: str, field: str = "islands.topology") -> Shape:
  """The slice "v5p:4x4x4": 64 chips on 16 hosts.

  >>> shape_of("v5p:4x4x4").accelerator_type, shape_of("v5p:4x4x4").hosts
  ('v5p-128', 16)

  Raises:
    ConfigError: there is no such slice.
  """
  match, fix = _TOPOLOGY.fullmatch(topology), "for example v5p:4x4x4, v6e:8x8 or h100:8"
  name = match["kind"] if match else ""
  rule = f"must be a chip ({', '.join(KINDS)}) and a shape"
  require(name in KINDS, field, topology, rule, fix)
  kind, shape = KINDS[name], topology.partition(":")[2]
  sides = [int(side) for side in shape.split("x")]
  rule = f"slices of {name} have {kind.dimensions} dimensions"
  require(kind.gpu or len(sides) == kind.dimensions, field, topology, rule, fix)
  chips, one_host, known = math.prod(sides), shape in kind.one_host, ", ".join(kind.one_host)
  rule = f"an island of GPUs is one host, of {name} with {known} GPUs"
  require(one_host or not kind.gpu, field, topology, rule, fix)
  # The cloud knows a slice by one spelling alone: no node would have the label of another one.
  whole = sides == sorted(sides) and all(side % 2 == 0 for side in sides)
  rule = (
    f"is neither one host ({known}) nor whole hosts of {CHIPS_PER_HOST} chips, whose sides are even"
    " numbers, the smallest first"
  )
  require(one_host or whole, field, topology, rule, fix)
  return Shape(name, shape, chips, hosts=1 if one_host else chips // CHIPS_PER_HOST)


# --- Each role's place and flags

SHARD_PORT, ISLAND_PORT, PROBE_PORT = 7000, 7001, 8080
FOLDER, WORK = "/ddiloco", "/work"  # in every container: config and keys; the workdirs
# GKE gives a pod 15 seconds when its spot machine is taken away; a role drains in 10 of them.
SPOT_DRAIN_SECONDS = 10.0
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,28}[a-z0-9])?")
_RANGE = re.compile(r"(\d{1,12})(?:-(\d{1,12}))?")


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
  """A run in a cloud."""

  name: str  # of the run; names of its objects in the cloud begin with it
  config: Config  # of every role; islands know how many devices and hosts they have
  islands: tuple[PlacedIsland, ...]  # in the order of learners
  image: str  # of the containers, with ddiloco, and libtpu for the islands
  spot: bool  # islands are on machines that may be taken away at any time, with little notice
  # Failures of an island, or of a shard, after which it is given up; the loss of a machine that was
  # taken away does not count.
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
    places: of `--place`, "WHERE=0,2-3"; empty: all islands in kubectl's or gcloud's default place.
    bucket: gs://..., where snapshots go, in a folder of the run's name.
    image: as in `Placement`; so are the others.

  Raises:
    ConfigError: a role cannot be placed so.
  """
  rule = "must be 1 to 30 small letters, digits and dashes, and begin with a letter"
  require(_NAME.fullmatch(name) is not None, "--name", name, rule, "for example --name=regions-12b")
  rule = "must be a bucket that all roles reach, without *, ?, [ or a backslash (docs/limits.md)"
  good = re.fullmatch(r"gs://[a-z0-9][^*?[\\]*", bucket)
  require(good is not None, "--bucket", bucket, rule, "give --bucket=gs://BUCKET/FOLDER")
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
  islands, overrides = [], dict(config.islands.overrides)
  for learner, where in enumerate(_where(places, count)):
    topology, field = config.islands.island(learner).topology, f"islands.topology of {learner}"
    shape = shape_of(topology, field)
    islands.append(PlacedIsland(learner, where, shape))
    own = {"devices": shape.devices, "hosts": shape.hosts}
    overrides[str(learner)] = {**overrides.get(str(learner), {}), **own}
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
  return Placement(name, config, tuple(islands), image, spot, max_restarts)


def _where(places: Sequence[str], count: int) -> list[str]:
  """The place of every learner; "" if `places` is empty."""
  if not places:
    return [""] * count
  named: list[tuple[int, str]] = []
  for text in places:
    where, _, learners = text.rpartition("=")
    ranges = [_RANGE.fullmatch(part) for part in learners.split(",")]
    fix = "write --place=WHERE=0,1 or --place=WHERE=0-3, once for each cluster or zone"
    require(bool(where) and all(ranges), "--place", text, "must say where islands are", fix)
    for match in filter(None, ranges):
      last = int(match[2] or match[1])
      rule = f"there is no learner {last}: islands.num_learners = {count}"
      require(last < count, "--place", text, rule, "drop it")
      named += [(m, where) for m in range(int(match[1]), last + 1)]
  times, found = Counter(m for m, _ in named), dict(named)
  wrong = [m for m in range(count) if times[m] != 1]
  rule = f"must name each learner once, which is not so for {wrong}"
  require(not wrong, "--place", " ".join(places), rule, "name those, in one place each")
  return [found[m] for m in range(count)]


def role_command(placement: Placement, role: str, syncers: Sequence[str]) -> list[str]:
  """The command that starts `role` ("learner-3") in its container; `syncers`: the urls at which it
  reaches all shards."""
  kind, _, number = role.partition("-")
  flags = {
    "config": f"{FOLDER}/config/config.json",
    "workdir": f"{WORK}/{placement.name}",
    "run_id": placement.name,
    "keys": f"{FOLDER}/keys",
    "syncers": ",".join(syncers),
    "http": f"0.0.0.0:{PROBE_PORT}",
    "term_status": TERMINATED,
  }
  if kind == "learner":
    flags["learner"] = number
  elif kind == "syncer":
    flags |= {"shard": number, "bind": f"tcp://0.0.0.0:{SHARD_PORT}"}
  return ["ddiloco", kind, *(f"--{name}={value}" for name, value in flags.items())]


_URL = re.compile(r"tcp://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")
_OWN = re.compile(r"tcp://(localhost|127\.[0-9.]+|0\.0\.0\.0|\[::1?\]):.*")


def require_urls(urls: Sequence[str], flag: str, given: Sequence[str]) -> None:
  """Refuses what was `given` with `flag` (ConfigError) if a shard's url that follows from it is
  none, or is another shard's too."""
  for url, text in zip(urls, given, strict=True):
    good = _URL.fullmatch(url) is not None and 0 < int(url.rpartition(":")[2]) < 65536
    rule, fix = f"must reach a shard, and {url} does not", "give one for each, of shard 0 first"
    require(good, flag, text, f"{rule}: it is not tcp://HOST:PORT", fix)
    elsewhere = _OWN.fullmatch(url) is None
    require(elsewhere, flag, text, f"{rule}: each machine takes it for itself", fix)
    require(urls.count(url) == 1, flag, text, "is given twice", "give each shard its own")


def environment_of(shape: Shape) -> dict[str, str]:
  """Variables of an island's container."""
  # Without it JAX would train on the CPU of a host whose chips it cannot open.
  platforms = {"JAX_PLATFORMS": f"{shape.kind.platform},cpu"}
  # GKE mounts the driver's libraries there.
  return platforms | ({"LD_LIBRARY_PATH": "/usr/local/nvidia/lib64"} if shape.kind.gpu else {})


def host_flags(shape: Shape, host: str, leader: str) -> list[str]:
  """Flags of a host, if the island has several: its number, and the address of host 0."""
  return [f"--host={host}", f"--hosts=tcp://{leader}:{ISLAND_PORT}"] if shape.hosts > 1 else []


# --- Costs, by prices that the user gives

NOT_COUNTED = (
  "Not counted: {}what crosses regions (`ddiloco plan` says how many bytes), the bucket, the file"
  " server, load balancers, a cluster's own fee, and whatever waits idle before and after."
)
MACHINES = "machines of shards and evaluator"


def prices_of(texts: Sequence[str]) -> dict[str, float]:
  """The prices in `--prices`: dollars an hour, by kind of chip, and for a machine ("shard").

  Raises:
    ConfigError: a text is not NAME=PRICE.
  """
  found = {}
  for text in texts:
    name, _, value = text.partition("=")
    try:
      price = float(value)
    except ValueError:
      price = math.nan
    rule = "must be NAME=DOLLARS an hour, for a chip or for shard"
    fix = "for example --prices=v5p=4.20,shard=1.10, from your own price list"
    require(bool(name) and 0 <= price < math.inf, "--prices", text, rule, fix)
    found[name] = price
  return found


def paid_for(placement: Placement, machines: int) -> dict[str, int]:
  """How many chips of each kind, and machines for shards and evaluator ("shard"), cost money."""
  found: Counter[str] = Counter()
  for island in placement.islands:
    found[island.shape.name] += island.shape.chips
  return {**dict(sorted(found.items())), **({"shard": machines} if machines else {})}


def cost_lines(counts: Mapping[str, int], prices: Mapping[str, float], hours: float) -> list[str]:
  """The costs as lines to show, with their sum; a missing price is named."""
  lines, total, partly = list[str](), 0.0, ""
  for name, count in counts.items():
    what = MACHINES if name == "shard" else f"{name} chips"
    if name in prices:
      hourly = count * prices[name]
      total += hourly
      lines.append(f"{count:>6} {what}: {prices[name]:,.2f} $/h each = {hourly:,.2f} $/h")
    else:
      lines.append(f"{count:>6} {what}: price not given")
      partly = " and what has no price"
  span = f", {total * hours:,.2f} $ in {hours:g} h" if hours else "; for how long: --hours"
  elsewhere = "" if "shard" in counts else f"the {MACHINES}, "
  together = f"Together {total:,.2f} $ an hour{partly}{span}."
  return [*lines, together, NOT_COUNTED.format(elsewhere)]


def require_prices(counts: Mapping[str, int], prices: Mapping[str, float], hours: float) -> None:
  """Refuses (ConfigError) to start without a known cost: a price or the hours are missing."""
  fix = "give --prices=v5p=DOLLARS,shard=DOLLARS for an hour of a chip and of a shard's machine"
  for name in counts:
    require(name in prices, "--prices", name, "has no price", fix)
  fix = "give --hours, how long you mean to keep it; nothing ends by itself then"
  require(hours > 0, "--hours", hours, "must be greater than 0", fix)
