"""Small runs in a cloud, for tests."""

from __future__ import annotations

from ddiloco.config import Config, from_dict
from ddiloco.launch.placement import Placement, place

BUCKET, IMAGE = "gs://bucket/run", "us-docker.pkg.dev/p/r/ddiloco:1"


def config(topologies: list[str], shards: int = 2, **more) -> Config:
  overrides = {str(m): {"topology": topology} for m, topology in enumerate(topologies)}
  islands = {"num_learners": len(topologies), "batch_size": 64, "overrides": overrides}
  return from_dict({"islands": islands, "sync": {"num_shards": shards}, **more})


def placed(topologies: list[str], places: tuple[str, ...] = (), **more) -> Placement:
  options = {name: more.pop(name) for name in ("spot", "max_restarts") if name in more}
  return place(config(topologies, **more), "run", places, BUCKET, IMAGE, **options)
