#!/usr/bin/env bash
# Checks style, and runs all tests but the slow ones; --all: every test, as continuous integration does.
# tests/test_types.py checks types.
# Makes .venv with the test extra first. Other arguments go to pytest: scripts/test.sh tests/core -k merge
. "$(dirname "$0")/venv.sh" test
if [ $# -gt 0 ] && [ "$1" != --all ]; then
  exec .venv/bin/python -m pytest "$@"
fi
.venv/bin/ruff check .
.venv/bin/ruff format --check .
marks="not slow" processes=3
[ "${1:-}" != --all ] || marks="" processes=2
# In several processes, since many tests wait more than they compute; with one more, real kills strike late and tests fail.
exec .venv/bin/python -m pytest --numprocesses=$processes --dist=loadfile --no-loadscope-reorder -m "$marks"
