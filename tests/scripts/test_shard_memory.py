"""The bytes a parameter of `docs/design.md`, "Merging", on a shard's real process."""

import pytest

from tests.waits import wait_for

VALUES, LEARNERS = 16_000_000, 2
UPDATE = 0.5 + 4 / 256  # bytes a value in int4
REST = 12 + UPDATE  # value, published value, momentum; the newest update
SLACK = 1.5  # 24 MB of what is no vector; 19 have been seen


@pytest.fixture
def bench_shard(script, monkeypatch):
  # Memory that is freed goes back: without it glibc keeps some MB, which are nothing at full size.
  monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(1 << 20))
  return script("bench_shard")


@pytest.mark.parametrize("shards, copies", [(1, 0), (2, 8)])
def test_a_shard_has_the_vectors_of_the_table_and_no_others(shards, copies, bench_shard):
  """`copies`: bytes a value that it holds for its neighbour."""
  bench = bench_shard.Bench(shards, VALUES, shards, LEARNERS)

  def bytes_a_value():
    resident, peak, _ = bench.shards.memory()
    return [(each - bench.shards.before[0]) / VALUES for each in (resident, peak)]

  try:
    for _ in range(3):
      bench.round()
    wait_for(lambda: bytes_a_value()[0] <= REST + copies + SLACK, bytes_a_value)
    rest, peak = bytes_a_value()
  finally:
    bench.end()
  print(f"{rest:.2f} bytes a value at rest, {peak:.2f} at most")
  assert REST + copies - 0.1 < rest < REST + copies + SLACK
  if shards == 1:  # its pushes, which may be asked for twice; the update that is being made
    assert peak < REST + UPDATE * (2 * LEARNERS + 1) + SLACK
