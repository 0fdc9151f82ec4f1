#!/usr/bin/env bash
# Curves by openrlbenchmark 0.3.1 from local runs, without an account. A network is needed to make its environment alone.
#
#     bash benchmark/openrlbenchmark.sh ENVIRONMENT OUT NAME ...      NAME: runs/<name>, or STUDY:EXP of benchmark/results
#     bash benchmark/openrlbenchmark.sh ENVIRONMENT                   makes the environment; docs/evidence/6 has a command for tracked runs
#
# Each exp_name among the runs is a curve: the mean of its seeds. Writes OUT.png, .svg and .pdf, and tables beside them.
# METRICS says of what.
set -euo pipefail
ENVIRONMENT=${1:?usage: openrlbenchmark.sh ENVIRONMENT [OUT NAME ...]}
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export MPLBACKEND=Agg
# openrlbenchmark 0.3.1 asks for ranges. pandas 3 breaks arch, which rliable imports; the others are those that this was run with.
PINS=(
    openrlbenchmark==0.3.1 pandas==2.3.3 numpy==2.4.6 scipy==1.17.1 matplotlib==3.11.2 seaborn==0.13.2 wandb==0.31.0
    wandb-workspaces==0.4.13 peewee==4.5.3 expt==0.4.2 rliable==1.2.0 arch==7.2.0 statsmodels==0.15.0 tyro==0.9.35
    dotmap==1.3.30 tabulate==0.9.0 rich==13.9.4 pillow==13.0.0
)
tool=$ENVIRONMENT/bin/python
if ! "$tool" -c "import openrlbenchmark" 2> /dev/null; then
    "${PYTHON:-python}" -m venv "$ENVIRONMENT"
    "$tool" -m pip install --quiet "${PINS[@]}"
fi
[[ $# -gt 2 ]] || exit 0
OUT=$2
shift 2
{ read -ra datasets && read -ra curves; } < <("$tool" "$HERE/openrlbenchmark_offline.py" "$@") || exit 2
read -ra metrics <<< "${METRICS:-objective/scores objective/gold objective/kl val/sequence_lengths}"
"$tool" -m openrlbenchmark.rlops_multi_metrics --offline --scan-history --env-ids "${datasets[@]}" --output-filename "$OUT" \
    --filters "?we=local&wpn=rlhf_details&ceik=dataset&cen=exp_name&xaxis=episode$(printf '&metrics=%s' "${metrics[@]}")" \
    "${curves[@]}" --pc.ncols 2 --pc.rolling 1 --pc.xlabel Episodes --metric-last-n-average-window 10
