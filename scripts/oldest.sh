#!/usr/bin/env bash
# Runs the quick tests of the packages that use JAX, with the oldest versions that setup.py allows, in .venv-oldest.
# scripts/test.sh uses the newest versions, in .venv (jax 0.11 and newer need Python 3.12). Arguments go to pytest.
VENV=.venv-oldest
CONSTRAINTS="$(mktemp)"
trap 'rm -f "$CONSTRAINTS"' EXIT
for package in flax grain jax msgspec numba numpy optax orbax-checkpoint; do
  sed -n "s/^ *\"\($package\)>=\([0-9.]*\).*/\1==\2/p" "$(dirname "$0")/../setup.py"
done > "$CONSTRAINTS"
. "$(dirname "$0")/venv.sh" test
if [ $# -eq 0 ]; then
  set -- -m "not slow" tests/{checkpoint,config,core,models,protocol,roles,trace,training}
fi
"$VENV/bin/python" -m pytest "$@"
