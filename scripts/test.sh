#!/usr/bin/env bash
# Makes .venv with the test extra and passes the tests. Arguments go to pytest: scripts/test.sh tests/core -k merge
. "$(dirname "$0")/venv.sh" test
exec .venv/bin/python -m pytest "$@"
