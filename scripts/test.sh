#!/usr/bin/env bash
# Makes .venv with the test extra and passes the tests: all of them in two processes, since many wait more than they
# compute; or, in one, what the arguments to pytest say: scripts/test.sh tests/core -k merge
. "$(dirname "$0")/venv.sh" test
[ $# -gt 0 ] || set -- --numprocesses=2 --dist=loadfile --no-loadscope-reorder
exec .venv/bin/python -m pytest "$@"
