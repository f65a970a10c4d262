"""What a run costs, by the prices that were given."""

import pytest

from ddiloco.config import ConfigError
from ddiloco.launch.costs import costs, in_words, prices_of, require_known
from tests.launch.placed import placed

MADE = placed(["v5p:4x4x4", "v5p:2x2x2", "v6e:8x8"])


def test_chips_and_machines_by_the_hour():
  found = costs(MADE, {"v5p": 4.0, "v6e": 2.5, "shard": 1.0}, machines=3)
  assert [(each.count, each.hourly) for each in found] == [(72, 288.0), (64, 160.0), (3, 3.0)]
  text = "\n".join(in_words(found, hours=10))
  assert "Together 451.00 $ an hour, 4,510.00 $ in 10 h." in text and "Not counted" in text
  require_known(found, hours=10)


def test_what_has_no_price_is_said_to_have_none_and_is_not_spent():
  found = costs(MADE, prices_of(["v5p=4.2"]), machines=3)
  text = "\n".join(in_words(found, hours=0))
  assert "64 v6e chips: price not given" in text
  assert "Together 302.40 $ an hour and what has no price; for how long: --hours" in text
  with pytest.raises(ConfigError, match=r"--prices = 'v6e chips': has no price.*Fix: "):
    require_known(found, hours=10)
  known = costs(MADE, prices_of(["v5p=4", "v6e=2", "shard=0"]), machines=3)
  with pytest.raises(ConfigError, match=r"--hours = 0.0: .*Fix: "):
    require_known(known, hours=0.0)


@pytest.mark.parametrize("text", ["v5p", "v5p=", "=3", "v5p=-1", "v5p=nan", "v5p=inf", "v5p=two"])
def test_what_is_no_price_is_refused(text):
  with pytest.raises(ConfigError, match=r"--prices = .*Fix: "):
    prices_of([text])
