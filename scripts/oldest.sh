#!/usr/bin/env bash
# Runs the quick tests with the oldest versions that setup.py allows, on Python 3.11 if it is here, in .venv-oldest.
# scripts/test.sh uses the newest versions, in .venv (jax 0.11 and newer need Python 3.12). Arguments go to pytest.
VENV=.venv-oldest
PYTHON="${PYTHON:-python3.11}"
CONSTRAINTS="$(mktemp)"
trap 'rm -f "$CONSTRAINTS"' EXIT
grep -oE '"[A-Za-z_-]+(\[[a-z-]+\])?>=[0-9.]+' "$(dirname "$0")/../setup.py" | sed -E 's/^"//; s/\[.*\]//; s/>=/==/' | sort -u > "$CONSTRAINTS"
. "$(dirname "$0")/venv.sh" test
if [ $# -eq 0 ]; then
  set -- --numprocesses=3 --dist=loadfile -m "not slow"
fi
"$VENV/bin/python" -m pytest "$@"
