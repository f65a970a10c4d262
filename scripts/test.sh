#!/usr/bin/env bash
# Checks style, and runs all tests but the slow ones; --all: every test, as continuous integration does.
# tests/test_types.py checks types.
# Makes .venv with the test extra first. Other arguments go to pytest: scripts/test.sh tests/core -k merge
. "$(dirname "$0")/venv.sh" test
# Images for containers often forbid Python to keep what it compiled. Each of pytest's processes would
# rewrite the assertions of Hypothesis and of all tests again, for ten seconds.
unset PYTHONDONTWRITEBYTECODE
if [ $# -gt 0 ] && [ "$1" != --all ]; then
  exec "$venv"/bin/python -m pytest "$@"
fi
"$venv"/bin/ruff check .
"$venv"/bin/ruff format --check .
marks="not slow"
[ "${1:-}" != --all ] || marks=""
# Else all processes of the tests, which begin together, would compile the package.
"$venv"/bin/python -m compileall -q -x '/test_' ddiloco scripts tests
# More processes than cores, since tests wait: on two cores a third of the time, and slow ones more.
exec "$venv"/bin/python -m pytest --numprocesses=4 --dist=loadfile --no-loadscope-reorder -m "$marks"
