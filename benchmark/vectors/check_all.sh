#!/usr/bin/env bash
# Checks the four libraries in a fresh environment, and prints the table: bash benchmark/vectors/check_all.sh [FOLDER]
# With OLD=1 it then checks the versions before and after five faults were mended.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=${1:-$(mktemp -d)}
[ -d "$folder/env" ] || python3 -m venv "$folder/env"
python=$folder/env/bin/python
mkdir -p "$folder/ours"
git -C "$here/../.." archive HEAD | tar -x -C "$folder/ours"
"$python" -m pip install -q torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 datasets==5.2.0 \
    rich tyro peft deepspeed wandb dill pandas scipy setuptools "$folder/ours"
export OMP_NUM_THREADS=1 TRL_EXPERIMENTAL_SILENCE=1 DS_ACCELERATOR=cpu

library() {  # package, version, what check.py is given
    [ -d "$folder/$1-$2" ] || "$python" -m pip install -q --no-deps --target "$folder/$1-$2" "$1==$2"
    (cd "$here" && PYTHONPATH="$folder/$1-$2" "$python" check.py "$3" 2>/dev/null | tail -n 1)
}

(cd "$here" && "$python" check.py ours)
library trl 1.16.0 trl_1_16
library trl 0.11.4 trl_0_11
library verl 0.9.1 verl
library openrlhf 0.11.2 openrlhf
(cd "$here" && "$python" check.py table)
[ -z "${OLD:-}" ] || while read -r package before after adapter vector issue; do
    echo "$issue: $package $before $(library "$package" "$before" "$adapter=$vector")"
    echo "$issue: $package $after $(library "$package" "$after" "$adapter=$vector")"
done <"$here/old_versions.txt"
