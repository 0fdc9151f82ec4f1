#!/usr/bin/env bash
# What a tag is worth: the checks that take too long for CI. It needs the .venv that .ci/run makes.
#
#     bash benchmark/checks/release.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export OMP_NUM_THREADS=1
python=$PWD/.venv/bin/python

# the lowest supported versions, with the fast suite but for what reads texts and recipes
python3 -m venv "$scratch/lowest"
"$scratch/lowest/bin/pip" install -q -c constraints-lowest.txt -e ".[test]"
"$scratch/lowest/bin/python" -m pytest -n 2 --ignore tests/cli/test_docs.py --ignore tests/cli/test_recipes.py

"$python" -m pytest -m slow tests/slow/test_example.py    # the guide's commands on the example's data
"$python" -m pytest -m slow benchmark/tests/test_openrlbenchmark.py    # the tool from PyPI draws local runs
"$python" benchmark/checks/mutations.py                   # every mutant dies
git clone -q . "$scratch/clone"                           # forty kills, and memory, on models that are made there
cd "$scratch/clone" && export PYTHONPATH=$PWD
"$python" rlhf_details/train_rloo.py --total_episodes 256
"$python" benchmark/checks/kill_resume.py --kills 20
"$python" benchmark/checks/memory.py
