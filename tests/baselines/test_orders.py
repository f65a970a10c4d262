"""Messages arrive whole, however the stream is cut."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from ddiloco.baselines.orders import END, READY, Lines, Order, line

ORDER = Order(3, 1, 2, 5000, 1.5e9, "states/000000007.npz", 7, True)


@given(st.lists(st.integers(0, 400), max_size=8))
def test_lines_come_whole(cuts):
  messages = [READY, END, 12, vars(ORDER)]
  data = b"".join(map(line, messages))
  bounds = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
  lines, taken = Lines(), []
  for start, end in itertools.pairwise(bounds):
    taken += lines.take(data[start:end])
  assert taken == messages
  assert Order(**taken[-1]) == ORDER
