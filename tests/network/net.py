"""Network endpoints of one process on loopback, found by their address like those of a `Hub`."""

from __future__ import annotations

import ctypes
import dataclasses
import socket
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ddiloco.config import NetworkConfig
from ddiloco.engines.role_spec import free_urls
from ddiloco.network.endpoint import NetworkEndpoint, RunIdentity
from ddiloco.network.host_links import HostLink
from ddiloco.network.keys import Keys, make_keys
from ddiloco.network.peers import FrameSocket
from ddiloco.protocol.messages import Push, RequestMoments
from tests import says
from tests.waits import wait_for

QUICK = NetworkConfig(streams=2, hello_seconds=0.1)
SECONDS = 20.0
SO_ATTACH_FILTER = 26  # Linux; Python has no name for it


def hello(incarnation: int = 0) -> RequestMoments:
  """Learner 0's."""
  return says.request(0, incarnation)


def push(number: int, size: int) -> Push:
  """A push of random bytes, the same for the same number."""
  payload = np.random.default_rng(number).integers(0, 256, size, np.uint8)
  return says.push(0, 0, 0, number, 0, 1, 1, "f32", payload)


def blackhole(*connections: FrameSocket | HostLink) -> None:
  """Nothing arrives here any more, and nobody is told: a filter drops every packet."""
  drop_all = ctypes.create_string_buffer(struct.pack("=HBBI", 6, 0, 0, 0))
  program = struct.pack("@HP", 1, ctypes.addressof(drop_all))
  for each in connections:
    each._socket.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


class Net:
  """`connect` waits until the new endpoint can talk to all that are there already."""

  def __init__(
    self,
    run_id: str,
    plan_id: str,
    max_bulk_bytes: int = 1 << 30,
    secure: bool = False,
    settings: NetworkConfig = QUICK,
  ):
    self.run = RunIdentity(run_id, plan_id, max_payload_bytes=1 << 30, queue_bytes=max_bulk_bytes)
    self.settings = settings
    self.endpoints: dict[str, NetworkEndpoint] = {}
    self.all: list[NetworkEndpoint] = []
    self.urls: dict[str, str] = {}  # where shards listen, or what stands before them
    self._incarnations: dict[str, int] = {}
    self._folder = tempfile.TemporaryDirectory() if secure else None
    if self._folder:
      make_keys(self.folder, learners=4, shards=2)

  @property
  def folder(self) -> Path:
    """Of the keys."""
    assert self._folder is not None
    return Path(self._folder.name)

  def keys(self, address: str) -> Keys | None:
    return Keys.load(self.folder, address) if self._folder else None

  def url(self, address: str) -> str:
    if address not in self.urls:
      (self.urls[address],) = free_urls(1)
    return self.urls[address]

  def open(
    self, address: str, incarnation: int, keys: Keys | None = None, **changes
  ) -> NetworkEndpoint:
    """An endpoint that knows nobody yet; a shard listens."""
    endpoint = NetworkEndpoint(
      address,
      incarnation,
      dataclasses.replace(self.run, **changes),
      self.settings,
      bind=self.url(address) if address.startswith("syncer-") else None,
      keys=keys or self.keys(address),
    )
    self.all.append(endpoint)
    return endpoint

  def dial(
    self, address: str, incarnation: int, *given, to: str = "syncer-0", url: str = "", **changes
  ) -> NetworkEndpoint:
    """An endpoint that dials a shard, at another url if one is given."""
    endpoint = self.open(address, incarnation, *given, **changes)
    endpoint.dial(to, url or self.url(to))
    return endpoint

  def connect(self, address: str) -> NetworkEndpoint:
    incarnation = self._incarnations[address] = self._incarnations.get(address, -1) + 1
    if address.startswith("syncer-") and address in self.endpoints:
      self.endpoints[address].close()  # or its port is taken
    endpoint = self.endpoints[address] = self.open(address, incarnation)
    if not address.startswith("syncer-"):
      endpoint.dial("syncer-0", self.url("syncer-0"))
    shard = self.endpoints.get("syncer-0")
    if shard is not None:
      for each in self.endpoints.values():
        if each is not shard:
          self.wait_up(each, "syncer-0")
    return endpoint

  def wait_up(self, endpoint: NetworkEndpoint, peer: str) -> None:
    self.wait_until(lambda: endpoint.links()[peer]["state"] == "up")

  def wait_until(self, done: Callable[[], bool]) -> None:
    links = lambda: {e.address: e.links() for e in self.all}
    wait_for(done, links)

  def close(self) -> None:
    for endpoint in self.all:
      endpoint.close(linger_seconds=0)
    if self._folder:
      self._folder.cleanup()
