#!/usr/bin/env bash
# Runs the quick tests with the oldest or the newest versions that setup.py allows. Other arguments go to pytest.
#   bash scripts/versions.sh oldest|newest [PYTEST ARGUMENTS]
# Oldest: each package at its lower bound, on Python 3.11, in .venv-oldest. Newest: the newest Python that is found on PATH or that
# pyenv has, in .venv-newest; scripts/test.sh takes your python3, and JAX 0.11 and newer need Python 3.12. PYTHON names another one.
set -euo pipefail
end="${1:-}"
if [ "$end" = oldest ]; then
  PYTHON="${PYTHON:-python3.11}"
  CONSTRAINTS="$(mktemp)"
  trap 'rm -f "$CONSTRAINTS"' EXIT
  grep -oE '"[A-Za-z_-]+(\[[a-z-]+\])?>=[0-9.]+' "$(dirname "$0")/../setup.py" | sed -E 's/^"//; s/\[.*\]//; s/>=/==/' | sort -u > "$CONSTRAINTS"
elif [ "$end" = newest ]; then
  for minor in 14 13 12; do
    for candidate in "python3.$minor" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3."$minor".*/bin/python3; do
      if [ -z "${PYTHON:-}" ] && "$candidate" -c "" 2>/dev/null; then PYTHON="$candidate"; fi
    done
  done
  PYTHON="${PYTHON:?needs Python 3.12 to 3.14; set PYTHON=/path/to/python3}"
else
  echo "usage: bash scripts/versions.sh oldest|newest [PYTEST ARGUMENTS]" >&2
  exit 2
fi
shift
VENV=".venv-$end"
. "$(dirname "$0")/venv.sh" test
unset PYTHONDONTWRITEBYTECODE
"$VENV/bin/python" -c "
from importlib.metadata import version
print(*(f'{name} {version(name)}' for name in ('jax', 'flax', 'optax', 'orbax-checkpoint', 'numpy', 'grain')), sep=', ')"
if [ $# -eq 0 ]; then
  set -- --numprocesses=4 --dist=loadfile -m "not slow"
fi
"$VENV/bin/python" -m pytest "$@"
