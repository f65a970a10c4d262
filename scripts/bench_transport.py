"""How fast fragments travel on loopback, and how fast control is beside them.

One process sends a fragment of 1, 32 and 256 MB to another, which answers when it has the whole
fragment; in turn over the in-process queues (a thread instead of a process, payloads by reference),
plain connections, connections with keys (one, two and four for a fragment), and a raw socket that
copies the same bytes into memory that exists already. Reported are medians; `plain_vs_socket` is
the median of the ratios of neighbouring transfers of 32 MB. Then fragments of 32 MB keep the link
busy, and round trips of control messages are measured: on loopback one every 2 ms, and on a link of
10 Mbit/s one every 20 ms for 15 s, in which the link's rate is measured three times (tc tbf in a
network namespace of its own, which needs root; null without).

  python scripts/bench_transport.py [--rounds=12] [--quick]

Last line: {"gbps": {way: {MB: n}} (GB/s), "plain_vs_socket", "secured_gbps" (one connection, 256
MB), "control_rtt_ms_under_load", "control_rtt_ms_slow_link"}; the last two are medians.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import common
import numpy as np

from ddiloco.config import NetworkConfig
from ddiloco.network.endpoint import NetworkEndpoint, RunIdentity
from ddiloco.network.keys import Keys, make_keys
from ddiloco.network.transport import Endpoint, Hub, learner_address
from ddiloco.protocol.messages import Pull, Push, RequestMoments

RUN = RunIdentity("bench", "plan", max_payload_bytes=1 << 30, queue_bytes=2 << 30)
SHARD, LEARNER = "syncer-0", "learner-0"
SECONDS = 60.0
STREAMS = (1, 2, 4)  # connections for a fragment
MBIT = 10  # of the slow link
FIRST_CONTROL = 1_000_000  # number of the first control message; fragments have smaller ones
SLOW_EVERY = 0.02  # seconds between messages there
SLOW = f"""
ip link set lo mtu 1500 && ip link set lo up &&
tc qdisc add dev lo root tbf rate {MBIT}mbit burst 10kb latency 1s && exec "$0" "$@"
"""


def serve(endpoint, stop: Callable[[], bool]) -> None:
  """A shard that answers every push and every ask with a pull of the same number."""
  while not stop():
    arrived = endpoint.receive(0.2)
    if arrived is not None:
      message = arrived[1]
      number = message.round if isinstance(message, Push) else message.fragments[0]
      endpoint.send(arrived.sender, Pull(0, 0, 0, 0, number, 0, 0))


def serve_socket(listener: socket.socket, most_bytes: int) -> None:
  """Copies all that arrives into the same memory, answers with a byte."""
  connection, _ = listener.accept()
  memory = memoryview(bytearray(most_bytes))
  while header := connection.recv(8, socket.MSG_WAITALL):
    left = memory[: int.from_bytes(header, "big")]
    while left:
      left = left[connection.recv_into(left) :]
    connection.sendall(b"!")


def far_end(pipe, folder: Path, most_bytes: int) -> None:
  """The other process: two shards, plain and with keys, and a raw socket."""
  plain, secured = (
    NetworkEndpoint(SHARD, 0, RUN, NetworkConfig(), bind="tcp://127.0.0.1:0", keys=keys)
    for keys in (None, Keys.load(folder, SHARD))
  )
  listener = socket.create_server(("127.0.0.1", 0))
  pipe.send([plain.bound, secured.bound, listener.getsockname()[1]])
  for target, *arguments in (
    (serve, plain, lambda: False),
    (serve, secured, lambda: False),
    (serve_socket, listener, most_bytes),
  ):
    threading.Thread(target=target, args=arguments, daemon=True).start()
  pipe.recv()  # until the bench is over


def over(endpoint: Endpoint, learner: int = 0) -> Callable[[np.ndarray], None]:
  """Sends a payload over `endpoint` and waits for the shard's answer."""
  numbers = itertools.count(1)

  def transfer(payload: np.ndarray) -> None:
    number = next(numbers)
    endpoint.send(SHARD, push(learner, number, payload))
    assert answered(endpoint) == number, "the fragment was lost"

  return transfer


def push(learner: int, number: int, payload: np.ndarray) -> Push:
  return Push(learner, 0, 0, number, 0, 1, 1, 0, 0, "f32", payload)


def over_socket(connection: socket.socket) -> Callable[[np.ndarray], None]:
  def transfer(payload: np.ndarray) -> None:
    connection.sendall(payload.nbytes.to_bytes(8, "big"))
    connection.sendall(payload.data)
    assert connection.recv(1) == b"!"

  return transfer


def dial(url: str, keys: Keys | None, streams: int = 2, learner: int = 0) -> NetworkEndpoint:
  settings = NetworkConfig(streams=streams)
  endpoint = NetworkEndpoint(learner_address(learner), 0, RUN, settings, keys=keys)
  endpoint.dial(SHARD, url)
  deadline = time.monotonic() + SECONDS
  while endpoint.links()[SHARD]["state"] != "up":
    assert time.monotonic() < deadline, endpoint.links()
    time.sleep(0.01)
  return endpoint


def answered(endpoint: Endpoint, seconds: float = SECONDS) -> int | None:
  """The round that the next answer names; None: there was none in so many seconds."""
  delivery = endpoint.receive(seconds)
  if delivery is None:
    return None
  answer: Any = delivery.message
  return answer.round


def control_under_load(
  endpoint: NetworkEndpoint, payload: np.ndarray, count: int, every: float = 0.002
) -> list[float]:
  """Seconds of round trips of control, one begun `every` so many seconds whether or not those
  before are over, while two fragments are always under way."""
  begun: list[float] = []
  seconds: list[float] = []
  pushes, answers = 0, 0
  while len(seconds) < count:
    while pushes - answers < 2:
      endpoint.send(SHARD, push(0, pushes, payload))
      pushes += 1
    left = begun[0] + len(begun) * every - time.perf_counter() if begun else 0.0
    if left <= 0 and len(begun) < count:
      begun.append(time.perf_counter())
      endpoint.send(SHARD, RequestMoments(0, 0, (FIRST_CONTROL + len(begun) - 1,)))
      continue
    number = answered(endpoint, left if len(begun) < count else SECONDS)
    if number is None:
      continue
    if number < FIRST_CONTROL:
      answers += 1
    else:
      seconds.append(time.perf_counter() - begun[number - FIRST_CONTROL])
  return seconds


def slow_link(count: int) -> float | None:
  """Median milliseconds of a round trip of control on a slow link, beside fragments; None without
  root."""
  command = ["unshare", "--net", "sh", "-c", SLOW, sys.executable, __file__, f"--slow={count}"]
  try:
    said = subprocess.check_output(command, text=True, timeout=4 * SECONDS)
  except (OSError, subprocess.CalledProcessError) as error:
    print(f"no slow link: {error}")
    return None
  told, median = said.splitlines()
  print(told)
  return json.loads(median)


def on_slow_link(count: int) -> None:
  """The process that `slow_link` starts behind that link: prints milliseconds."""
  shard = NetworkEndpoint(SHARD, 0, RUN, NetworkConfig(), bind="tcp://127.0.0.1:0")
  threading.Thread(target=serve, args=(shard, lambda: False), daemon=True).start()
  learner = dial(shard.bound, None)
  seconds = control_under_load(learner, np.zeros(32 * 10**6, np.uint8), count, SLOW_EVERY)
  slowest = 1e3 * statistics.quantiles(seconds, n=100)[-1]
  print(f"slow link: {count} round trips, the slowest hundredth {slowest:.0f} ms and longer")
  print(round(1e3 * statistics.median(seconds), 3))
  sys.stdout.flush()
  os._exit(0)


def measure(
  ways: Mapping[str, Callable[[np.ndarray], None]], sizes: Sequence[int], rounds: int
) -> dict[str, dict[int, list[float]]]:
  """GB/s of every round, by way and size in MB; the ways take turns."""
  rates: dict[str, dict[int, list[float]]] = {way: {} for way in ways}
  for megabytes in sizes:
    payload = np.random.default_rng(0).integers(0, 256, megabytes * 10**6, np.uint8)
    for turn in range(rounds + 1):
      for way, transfer in ways.items():
        before = time.perf_counter()
        transfer(payload)
        rate = payload.nbytes / (time.perf_counter() - before) / 1e9
        if turn:  # the first one warms up
          rates[way].setdefault(megabytes, []).append(rate)
    shown = {way: f"{statistics.median(rates[way][megabytes]):.2f}" for way in ways}
    print(f"{megabytes:4d} MB, GB/s: {shown}", flush=True)
  return rates


def main() -> None:
  slow = {"type": int, "help": argparse.SUPPRESS}  # of the process behind the slow link
  args = common.options(__doc__, {"rounds": 2}, rounds=(12, "of each size and way"), slow=slow)
  if args.slow:
    return on_slow_link(args.slow)
  sizes, count = ([1, 32], 20) if args.quick else ([1, 32, 256], 300)
  with common.folder() as folder:
    make_keys(folder, learners=1 + len(STREAMS), shards=1)
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    child = context.Process(target=far_end, args=(other, folder, sizes[-1] * 10**6), daemon=True)
    child.start()
    plain_url, secured_url, port = pipe.recv()
    plain = dial(plain_url, None, 1)
    secured = {
      streams: dial(secured_url, Keys.load(folder, learner_address(m)), streams, m)
      for m, streams in enumerate(STREAMS, 1)
    }
    hub = Hub()
    shard = hub.connect(SHARD)
    stop = threading.Event()
    threading.Thread(target=serve, args=(shard, stop.is_set), daemon=True).start()
    ways = {
      "socket": over_socket(socket.create_connection(("127.0.0.1", port))),
      "in_process": over(hub.connect(LEARNER)),
      "plain": over(plain),
      **{f"secured_{n}": over(each, m) for m, (n, each) in enumerate(secured.items(), 1)},
    }
    rates = measure(ways, sizes, args.rounds)
    ratios = [p / s for p, s in zip(rates["plain"][32], rates["socket"][32])]
    seconds = control_under_load(plain, np.zeros(32 * 10**6, np.uint8), count)
    stop.set()
    for endpoint in (plain, *secured.values()):
      endpoint.close(0)
    pipe.send("over")
    child.join(10)
  medians = {
    way: {str(mb): common.middle(each, 3) for mb, each in by.items()} for way, by in rates.items()
  }
  result = {
    "gbps": medians,
    "plain_vs_socket": round(statistics.median(ratios), 3),
    "secured_gbps": medians["secured_1"][str(sizes[-1])],
    "control_rtt_ms_under_load": round(1e3 * statistics.median(seconds), 3),
    "control_rtt_ms_slow_link": slow_link(20 if args.quick else 750),
  }
  print(json.dumps(result))


if __name__ == "__main__":
  common.run_script(main)
