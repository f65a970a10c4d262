# Sourced by the other scripts: makes .venv beside setup.py and installs ddiloco into it.
# Usage: . scripts/venv.sh [EXTRA]     for example: . scripts/venv.sh test
# VENV names another folder, CONSTRAINTS a file of versions for pip.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extra="${1:-}"
venv="${VENV:-.venv}"
python=""
for candidate in "${PYTHON:-}" python3 python3.14 python3.13 python3.12 python3.11 python; do
  if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; then
    python="$candidate"
    break
  fi
done
if [ -z "$python" ]; then
  echo "ddiloco needs Python 3.11 to 3.14; set PYTHON=/path/to/python3 if it is not on your PATH." >&2
  exit 1
fi
# Nothing to do if it is installed already for this setup.py and extra.
stamp="$venv/installed-${extra:-base}-$(cksum < setup.py | tr -d ' ')"
if [ ! -f "$stamp" ]; then
  echo "Installing ddiloco${extra:+[$extra]} into $venv with $($python --version) (about a minute)"
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile \
    ${CONSTRAINTS:+--constraint="$CONSTRAINTS"} -e ".${extra:+[$extra]}"
  # On all cores, where pip compiles on one; a sixth of it are tests, which nobody imports. Some
  # packages have files for other versions of Python.
  "$venv/bin/python" -m compileall -q -j 0 -x 'site-packages/.*/tests/' "$venv/lib" \
    > /dev/null 2>&1 || true
  touch "$stamp"
fi
