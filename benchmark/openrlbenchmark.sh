#!/usr/bin/env bash
# Makes a Python environment with openrlbenchmark 0.3.1, which draws runs that were tracked with --track.
#
#     bash benchmark/openrlbenchmark.sh ENVIRONMENT        (docs/evidence/6_comparing_versions.md has a command to draw)
set -euo pipefail
ENVIRONMENT=${1:?usage: openrlbenchmark.sh ENVIRONMENT}
# openrlbenchmark 0.3.1 asks for ranges. pandas 3 breaks arch, which rliable imports; the others are those that this was run with.
PINS=(
    openrlbenchmark==0.3.1 pandas==2.3.3 numpy==2.4.6 scipy==1.17.1 matplotlib==3.11.2 seaborn==0.13.2 wandb==0.31.0
    wandb-workspaces==0.4.13 peewee==4.5.3 expt==0.4.2 rliable==1.2.0 arch==7.2.0 statsmodels==0.15.0 tyro==0.9.35
    dotmap==1.3.30 tabulate==0.9.0 rich==13.9.4 pillow==13.0.0
)
if ! "$ENVIRONMENT/bin/python" -c "import openrlbenchmark" 2> /dev/null; then
    "${PYTHON:-python}" -m venv "$ENVIRONMENT"
    "$ENVIRONMENT/bin/python" -m pip install --quiet "${PINS[@]}"
fi
