#!/usr/bin/env bash
# RLOO and PPO on the embedded task, several seeds each, drawn over each other by openrlbenchmark 0.3.1.
#
#     bash benchmark/openrlbenchmark.sh ENVIRONMENT OUT [RUN_FOLDER ...]
#     PICTURE=static/openrlbenchmark.png bash benchmark/openrlbenchmark.sh ENV OUT benchmark/results/TAG/trl/runs.csv:ours_{rloo,ppo}
#
# ENVIRONMENT: the tool's Python environment, made if it is missing; with no OUT that is all. OUT: figures (png, svg, pdf) and
# tables (csv, md). RUN_FOLDERs hold runs of train_rloo.py and train_ppo.py, or are FOLDER/runs.csv:EXP,
# an experiment that benchmark.py has kept of such runs; with none, SEEDS of both are trained first, WORKERS at a time, by benchmark.py. No account is needed, and a network only to make the environment. Environment variables:
#     PICTURE   where the small picture goes (OUT/openrlbenchmark.png)      PYTHON   Python of this repository (python)
#     LAST      updates at the end that the tables average (10)             ROLLING  width of smoothing, of 10,000 points (1: none)
#     ENTITY    draw the runs that were tracked with --track, project rlhf_details of this Weights & Biases account, in place of
#               folders; TAG=... takes those of one tag only (without ENTITY: the tag of what is trained)
#     DRY_RUN   print the commands
set -euo pipefail
ENVIRONMENT=${1:?usage: openrlbenchmark.sh ENVIRONMENT OUT [RUN_FOLDER ...]}
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-python}
export MPLBACKEND=Agg
# openrlbenchmark 0.3.1 asks for ranges. pandas 3 breaks arch, which rliable imports; the others are those that this was run with.
PINS=(
    openrlbenchmark==0.3.1 pandas==2.3.3 numpy==2.4.6 scipy==1.17.1 matplotlib==3.11.2 seaborn==0.13.2 wandb==0.31.0
    wandb-workspaces==0.4.13 peewee==4.5.3 expt==0.4.2 rliable==1.2.0 arch==7.2.0 statsmodels==0.15.0 tyro==0.9.35
    dotmap==1.3.30 tabulate==0.9.0 rich==13.9.4 pillow==13.0.0
)

# run WORDS...: runs them, or prints them as they could be typed
run() {
    if [[ -n ${DRY_RUN:-} ]]; then echo "${@@Q}"; else "$@"; fi
}

tool=$ENVIRONMENT/bin/python
if [[ -z ${DRY_RUN:-} ]] && ! "$tool" -c "import openrlbenchmark" 2>/dev/null; then
    "$PYTHON" -m venv "$ENVIRONMENT"
    "$tool" -m pip install --quiet "${PINS[@]}"
fi
[[ $# == 1 ]] && exit
OUT=$2
shift 2

if [[ -n ${ENTITY:-} ]]; then
    offline=() tag=${TAG:+&tag=$TAG}
else
    offline=(--offline) tag=
    if [[ $# == 0 ]]; then
        name=${TAG:-$(git -C "$ROOT" describe --tags --always --dirty)}
        read -ra seeds <<<"${SEEDS:-1 2 3 4 5}"
        run "$PYTHON" "$ROOT/benchmark/benchmark.py" --tag "$name" --study openrlbenchmark --exp rloo ppo \
            --command "python rlhf_details/train_rloo.py" "python rlhf_details/train_ppo.py" \
            --seeds "${seeds[@]}" --workers "${WORKERS:-1}"
        for seed in "${seeds[@]}"; do
            set -- "$@" "$ROOT/runs/benchmark/$name/openrlbenchmark/"{rloo,ppo}"_s$seed/runs/run"
        done
    fi
    run "$PYTHON" "$ROOT/benchmark/openrlbenchmark_offline.py" "$@" --python "$tool" --replace
fi

where="?we=${ENTITY:-local}&wpn=rlhf_details&ceik=dataset&cen=exp_name&xaxis=episode"
metrics=(objective/scores objective/gold objective/kl objective/rlhf_reward policy/entropy_avg val/sequence_lengths)
runs=("train_rloo?cl=RLOO$tag" "train_ppo?cl=PPO$tag")
options=(--env-ids toy --scan-history "${offline[@]}" --metric-last-n-average-window "${LAST:-10}")
options+=(--pc.rolling "${ROLLING:-1}" --pc.xlabel Episodes)
run "$tool" -m openrlbenchmark.rlops --filters "$where&metric=objective/scores" "${runs[@]}" "${options[@]}" \
    --pc.ncols 1 --pc.ylabel objective/scores --output-filename "$OUT/scores"
run "$tool" -m openrlbenchmark.rlops_multi_metrics --filters "$where$(printf '&metrics=%s' "${metrics[@]}")" "${runs[@]}" \
    "${options[@]}" --pc.ncols 3 --output-filename "$OUT/all"

PICTURE=${PICTURE:-$OUT/openrlbenchmark.png}
small="import sys; from PIL import Image; Image.open(sys.argv[1]).convert('RGB').quantize(64).save(sys.argv[2], optimize=True)"
[[ -n ${DRY_RUN:-} ]] || { "$tool" -c "$small" "$OUT/all.png" "$PICTURE" && echo "$PICTURE"; }
