#!/usr/bin/env bash
# TL;DR summaries with Pythia, from the base model to a judged policy: SFT, reward model, PPO (N+) and RLOO (TRL's documentation), four
# seeds, each with stages of its own, as in "The N+ Implementation Details of RLHF with PPO" (arXiv 2403.17031), which judges samples
# of temperature 0.01.
#
#     bash benchmark/tldr.sh                                       8 GPUs, a network, OPENAI_API_KEY for the judge
#     SIZE=6.9b LAUNCH="--config_file benchmark/accelerate/zero3.yaml" bash benchmark/tldr.sh
#
# Goes through what is not trained yet, seed by seed. It has not been run by us. Environment variables:
#     SIZE (1b)   of EleutherAI/pythia-SIZE-deduped      SEEDS (44413 55513 66613 77713: N+'s)      POLICIES (ppo rloo)
#     FLAGS   of their training, say "--rloo_k 4"
#     LAUNCH (--num_processes 8 --mixed_precision bf16)  JUDGE (gpt-4o-mini)    DRY_RUN   print the commands
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
read -ra launch <<<"${LAUNCH:---num_processes 8 --mixed_precision bf16}"
read -ra seeds <<<"${SEEDS:-44413 55513 66613 77713}"
read -ra policies <<<"${POLICIES:-ppo rloo}"
read -ra flags <<<"${FLAGS:-}"
POSTS=trl-lib/tldr COMPARISONS=trl-lib/tldr-preference

# run WORDS...: runs them, or prints them as they could be typed
run() {
    if [[ -n ${DRY_RUN:-} ]]; then echo "${@@Q}"; else "$@"; fi
}

# stage SCRIPT FOLDER FLAGS...: trains what is not in FOLDER yet
stage() {
    local script=$1 folder=$2
    shift 2
    [[ -e $folder/config.json ]] || run accelerate launch "${launch[@]}" "rlhf_details/$script.py" --seed "$seed" --output_dir "$folder" \
        --track --wandb_tags tldr "$@"
}

for seed in "${seeds[@]}"; do
    models=models/tldr_${SIZE:-1b}/$seed
    stage train_sft "$models/sft" --base_model "EleutherAI/pythia-${SIZE:-1b}-deduped" \
        --dataset $POSTS:train --eval_dataset $POSTS:validation
    stage train_reward "$models/reward" --sft_model_path "$models/sft" \
        --dataset $COMPARISONS:train --eval_dataset $COMPARISONS:validation
    for policy in "${policies[@]}"; do
        stage "train_$policy" "$models/$policy" --config "benchmark/configs/${policy}_tldr_1b.toml" \
            --sft_model_path "$models/sft" --reward_model_path "$models/reward" "${flags[@]}"
        run python rlhf_details/evaluate.py --dataset $POSTS:validation --num_examples 1000 --policy_path "$models/$policy" \
            --ref_model_path "$models/sft" --reward_model_path "$models/reward" --temperature 0.01 \
            --judge llm --judge_model "${JUDGE:-gpt-4o-mini}"
    done
done
