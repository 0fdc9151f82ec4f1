#!/usr/bin/env bash
# TL;DR summaries with Pythia, from the base model to a judged policy: SFT and reward model (N+), PPO (N+) and RLOO (TRL's
# documentation), four seeds, each with stages of its own. N+ is "The N+ Implementation Details of RLHF with PPO" (arXiv 2403.17031),
# vwxyzjn/summarize_from_feedback_details: sft.py, reward.py, tldr_dataset.py and sbatches/.
#
# As in N+: nothing clips the gradient (N+ pins accelerate 0.25.0 and DeepSpeed 0.12.6, which clip only if they are told to), ROUGE-L and
# the judge read samples of temperature 0.01, the comparisons are N+'s own data set, and the reward model's scores are shifted to mean 0
# over the summaries that SFT learns. trl-lib/tldr-preference would be the wrong set: it leaves out the empty lines of the posts, which
# the posts of SFT have, and its `validation` holds news articles (CNN/DM) as well.
#
# Different here:
# * The posts of SFT, of the policies and of the evaluation are N+'s, but whole (trl-lib/tldr). N+ cuts those above 512 tokens at a
#   paragraph, which its comparisons are, too.
# * A row is the prompt's tokens and then the answer's; N+ tokenises both as one text.
# * SFT's loss is the mean over the tokens of a batch. N+ takes the mean of a row, and then the mean over the 128 rows.
# * The judge is the one of TRL's documentation; N+'s was gpt-3.5-turbo-0125.
# * N+ stops after 92,832 of the 92,858 comparisons.
#
#     bash benchmark/recipes/tldr.sh                                       8 GPUs, a network, OPENAI_API_KEY for the judge
#     SIZE=6.9b LAUNCH="--config_file benchmark/recipes/accelerate/zero3.yaml" bash benchmark/recipes/tldr.sh
#
# Goes through what is not trained yet, seed by seed. We have not run it at its size. Each process of the reward model's training needs
# more than 10 GB of main memory to read the comparisons (reckoned from 2,000 rows of their kind). Environment variables:
#     SIZE (1b)   of EleutherAI/pythia-SIZE-deduped      SEEDS (44413 55513 66613 77713: N+'s)      POLICIES (ppo rloo)
#     FLAGS   of their training, say "--rloo_k 4"
#     LAUNCH (--num_processes 8 --mixed_precision bf16)  JUDGE (gpt-4o-mini)    DRY_RUN   print the commands
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
read -ra launch <<<"${LAUNCH:---num_processes 8 --mixed_precision bf16}"
read -ra seeds <<<"${SEEDS:-44413 55513 66613 77713}"
read -ra policies <<<"${POLICIES:-ppo rloo}"
read -ra flags <<<"${FLAGS:-}"
POSTS=trl-lib/tldr COMPARISONS=vwxyzjn/summarize_from_feedback_oai_preprocessing_1706381144

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
        --dataset $POSTS:train --eval_dataset $POSTS:validation --max_grad_norm None --temperature 0.01 --learning_rate 3e-6
    stage train_reward "$models/reward" --sft_model_path "$models/sft" \
        --dataset $COMPARISONS:train --eval_dataset $COMPARISONS:validation --reference_dataset $POSTS:train \
        --batch_size 64 --learning_rate 3e-6
    for policy in "${policies[@]}"; do
        stage "train_$policy" "$models/$policy" --config "benchmark/recipes/${policy}_tldr_1b.toml" \
            --sft_model_path "$models/sft" --reward_model_path "$models/reward" "${flags[@]}"
        run python rlhf_details/evaluate.py --dataset $POSTS:validation --num_examples 1000 --policy_path "$models/$policy" \
            --ref_model_path "$models/sft" --reward_model_path "$models/reward" --temperature 0.01 \
            --judge llm --judge_model "${JUDGE:-gpt-4o-mini}"
    done
done
