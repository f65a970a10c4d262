"""Small runs in a cloud, for tests."""

from __future__ import annotations

from ddiloco.config import Config, from_dict
from ddiloco.launch.placement import Placement, place

BUCKET = "gs://bucket/run"


def config(topologies: list[str], shards: int = 2, **more) -> Config:
  overrides = {str(m): {"topology": topology} for m, topology in enumerate(topologies)}
  islands = {"num_learners": len(topologies), "batch_size": 64, "overrides": overrides}
  return from_dict({"islands": islands, "sync": {"num_shards": shards}, **more})


def placed(topologies: list[str], places: tuple[str, ...] = (), **more) -> Placement:
  spot = more.pop("spot", False)
  return place(config(topologies, **more), "run", places, BUCKET, spot)
