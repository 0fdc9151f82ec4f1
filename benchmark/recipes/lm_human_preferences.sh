#!/usr/bin/env bash
# The experiment of "Fine-Tuning Language Models from Human Preferences" that lm-human-preference-details repeated: sentiment and
# descriptiveness, GPT-2 124M, ten seeds each, a reward model and then PPO on it, and the curves over those of OpenAI's own runs.
#
#     bash benchmark/recipes/lm_human_preferences.sh train                               8 GPUs, a network, `wandb login`
#     bash benchmark/recipes/lm_human_preferences.sh draw ENVIRONMENT OUT [OPTION ...]   a network, `wandb login`
#
# `train` goes through what is not trained yet, seed by seed; `draw` makes ENVIRONMENT if it is missing (openrlbenchmark.sh) and
# hands OPTIONs on to openrlbenchmark. Neither has been run by us on real runs. Environment variables:
#     SEEDS (1 .. 10), TASKS (sentiment descriptiveness), PROCESSES (8)
#     ENTITY    Weights & Biases account of our runs; draw needs it
#     DRY_RUN   print the commands
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
USAGE="usage: lm_human_preferences.sh train | draw ENVIRONMENT OUT [OPTION ...]"
PROJECT=rlhf_details TAG=lm-human-preferences
read -ra seeds <<<"${SEEDS:-1 2 3 4 5 6 7 8 9 10}"
read -ra tasks <<<"${TASKS:-sentiment descriptiveness}"

# run WORDS...: runs them, or prints them as they could be typed
run() {
    if [[ -n ${DRY_RUN:-} ]]; then echo "${@@Q}"; else "$@"; fi
}

# launch SCRIPT TASK SEED FOLDER FLAGS...: trains what is not in FOLDER yet
launch() {
    local script=$1 task=$2 seed=$3 folder=$4
    shift 4
    [[ -e $folder/config.json ]] && return
    run accelerate launch --num_processes "${PROCESSES:-8}" "rlhf_details/train_$script.py" \
        --config "benchmark/recipes/${script}_$task.toml" --seed "$seed" --output_dir "$folder" "$@" \
        --track --wandb_project_name $PROJECT ${ENTITY:+--wandb_entity "$ENTITY"} --wandb_tags $TAG
}

case ${1:-} in
train)
    for seed in "${seeds[@]}"; do
        for task in "${tasks[@]}"; do
            launch reward "$task" "$seed" "models/$task/$seed/reward"
            launch ppo "$task" "$seed" "models/$task/$seed/ppo" --reward_model_path "models/$task/$seed/reward"
        done
    done
    ;;
draw)
    ENVIRONMENT=${2:?$USAGE} OUT=${3:?$USAGE}
    shift 3
    : "${ENTITY:?the Weights & Biases account of the runs}"
    [[ -n ${DRY_RUN:-} ]] || bash benchmark/openrlbenchmark.sh "$ENVIRONMENT"

    # a line a panel: OpenAI's metric, lm-human-preference-details', ours; the x-axis _step is the update
    metrics=(
        "ppo/objective/score        objective/scores           objective/scores"
        "ppo/objective/kl           objective/kl               objective/kl"
        "ppo/objective/entropy      objective/entropy          objective/entropy"
        "ppo/objective/score_total  objective/score_total      objective/score_total"
        "ppo/objective/kl_coef      objective/kl_coef          objective/kl_coef"
        "ppo/ppo/loss/total         ppo/loss/total             loss/total_avg"
        "ppo/ppo/loss/value         ppo/loss/value             loss/value_avg"
        "ppo/ppo/loss/policy        ppo/loss/policy_avg        loss/policy_avg"
        "ppo/ppo/policy/clipfrac    ppo/policy/clipfrac_avg    policy/clipfrac_avg"
        "ppo/ppo/policy/entropy     ppo/policy/entropy_avg     policy/entropy_avg"
        "ppo/ppo/returns/mean       ppo/returns/mean           returns/mean"
        "ppo/ppo/policy/approxkl    ppo/policy/approxkl_avg    policy/approxkl_avg"
        "ppo/ppo/val/clipfrac       ppo/val/clipfrac_avg       val/clipfrac_avg"
        "ppo/ppo/val/error          ppo/val/error              val/error"
        "ppo/ppo/val/mean           ppo/val/mean               val/mean"
        "ppo/ppo/returns/var        ppo/returns/var            returns/var"
        "ppo/ppo/val/vpred          ppo/val/vpred              val/vpred"
    )
    oai="?we=openrlbenchmark&wpn=lm-human-preferences&xaxis=_step&ceik=task_id&cen=task.value.policy.initial_model"
    details="?we=openrlbenchmark&wpn=lm_human_preference_details&xaxis=_step&ceik=rewards.value.label_dataset&cen=exp_name"
    ours="?we=$ENTITY&wpn=$PROJECT&xaxis=_step&ceik=dataset&cen=exp_name"
    loss="$oai&metrics=train_reward/minibatch/loss" our_loss="$ours&metrics=train/rm/loss"
    for line in "${metrics[@]}"; do
        read -r first second third <<<"$line"
        oai+="&metrics=$first" details+="&metrics=$second" ours+="&metrics=$third"
    done
    prompts=trl-internal-testing/descriptiveness-sentiment-trl-style labels=vwxyzjn/lm-human-preferences
    options=(--scan-history --no-check-empty-runs --pc.ncols-legend 3 --pc.xlabel Updates)
    run "$ENVIRONMENT/bin/python" -m openrlbenchmark.rlops_multi_metrics \
        --filters "$oai" "124M?cl=OpenAI" \
        --filters "$details" "train_policy_accelerate?tag=v0.1.0-58-g4f42012&tag=tf_adam&tag=gpt2&cl=lm-human-preference-details" \
        --filters "$ours" "train_ppo?tag=$TAG&cl=this repository" \
        --env-ids "${tasks[@]}" \
        --env-ids "${tasks[@]/%//offline_5k.json}" \
        --env-ids "${tasks[@]/#/$prompts:}" \
        --pc.ncols 6 --output-filename "$OUT/policy" "${options[@]}" "$@"
    # OpenAI logged reward model and policy in one run, so that its _step may not begin at 0 in both
    reward=("${tasks[@]/%//offline_5k.json[:4992]}")
    run "$ENVIRONMENT/bin/python" -m openrlbenchmark.rlops_multi_metrics \
        --filters "$loss" "124M?cl=OpenAI" \
        --filters "$our_loss" "train_reward?tag=$TAG&cl=this repository" \
        --env-ids "${tasks[@]}" \
        --env-ids "${reward[@]/#/$labels:}" \
        --pc.ncols 2 --output-filename "$OUT/reward" "${options[@]}" "$@"
    ;;
*)
    echo "$USAGE" >&2
    exit 2
    ;;
esac
