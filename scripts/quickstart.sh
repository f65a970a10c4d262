#!/usr/bin/env bash
# Four islands on this machine's CPU train one small language model; one island is killed on the way.
# Makes .venv, installs ddiloco, trains in runs/quickstart, prints a sample and the report's path.
. "$(dirname "$0")/venv.sh" ""  # else it would take the arguments of the run for its own
exec "$venv"/bin/ddiloco train --config=configs/quickstart.py --workdir=runs/quickstart --overwrite --cpu "$@"
