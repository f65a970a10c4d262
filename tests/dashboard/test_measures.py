"""What a model measures beside its loss is said wherever the held-out loss is."""

import pytest

from ddiloco.dashboard.status import exposition, status
from ddiloco.observe.live import plain_line, render, scalars
from ddiloco.observe.report import key_numbers, summarise
from ddiloco.observe.run_state import RunState

MEASURES = {"text_loss": 1.5, "image_loss": 0.25}


@pytest.fixture
def events(make):
  newest = make.event(2.0, "evaluator", "evaluation", loss=1.0, measures=MEASURES)
  return [make.run_started(), make.event(1.0, "evaluator", "evaluation", loss=5.0), newest]


def test_in_the_terminal(events):
  view = RunState().read(events)
  said = "held-out loss 1.000 (text loss 1.500, image loss 0.250)"
  assert said in plain_line(view, 3.0)
  assert said in next(iter(render(view, 3.0, 120).renderables)).plain


def test_on_the_page_and_for_prometheus(events):
  found = status(RunState().read(events), 2.0, None, "")
  assert found["heldout_measures"] == MEASURES
  text = exposition(found)
  for name, value in MEASURES.items():
    assert f'ddiloco_heldout_measure{{measure="{name}"}} {value}' in text


def test_in_the_report(events):
  rows = dict(key_numbers(summarise(events)))
  assert rows["held-out image loss, merged model"] == "0.250"
  assert rows["held-out text loss, merged model"] == "1.500"


def test_on_tensorboard(events):
  assert scalars(events[-1])[1] == {
    "heldout/loss": 1.0,
    "heldout/text_loss": 1.5,
    "heldout/image_loss": 0.25,
  }


def test_a_model_that_measures_its_loss_alone_says_no_more(events):
  view = RunState().read(events[:-1])
  assert plain_line(view, 1.0).count("(") == 0
  assert "heldout_measures_last" not in summarise(events[:-1])
  assert "heldout_measure{" not in exposition(status(view, 1.0, None, ""))
