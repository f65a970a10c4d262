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
marks="not slow"
[ "${1:-}" != --all ] || marks=""
# Where Python may not keep what it compiled, each process of the tests would compile the package again.
.venv/bin/python -m compileall -q -x '/test_' ddiloco scripts tests
# In three processes on two cores, since many tests wait more than they compute.
exec .venv/bin/python -m pytest --numprocesses=3 --dist=loadfile --no-loadscope-reorder -m "$marks"
