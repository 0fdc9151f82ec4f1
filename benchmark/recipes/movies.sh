#!/bin/bash
# Real text, real human labels: movie-review snippets, a reward model that prefers the positive ones, RLOO and PPO against it.
# From the repository root: bash benchmark/recipes/movies.sh DATA_DIR [OUT_DIR]   (benchmark/recipes/movies_data.py makes DATA_DIR; with DRY_RUN it
# prints the commands, which the study movies runs over seeds)
set -euo pipefail
run() {
    if [[ -n ${DRY_RUN:-} ]]; then echo "${@@Q}"; else "$@"; fi
}
DATA=$1
OUT=${2:-models/movies}

run python rlhf_details/train_sft.py \
    --dataset "$DATA/sft_train.jsonl" \
    --eval_dataset "$DATA/sft_test.jsonl" \
    --base_model scratch \
    --vocab_size 4096 \
    --hidden_size 128 \
    --num_layers 2 \
    --num_train_epochs 6 \
    --batch_size 32 \
    --micro_batch_size 32 \
    --learning_rate 2e-3 \
    --warmup_ratio 0.05 \
    --weight_decay 0.1 \
    --response_length 32 \
    --output_dir "$OUT/sft"

run python rlhf_details/train_reward.py \
    --dataset "$DATA/preference_train.jsonl" \
    --eval_dataset "$DATA/preference_test.jsonl" \
    --sft_model_path "$OUT/sft" \
    --num_train_epochs 2 \
    --batch_size 32 \
    --micro_batch_size 32 \
    --learning_rate 1e-3 \
    --warmup_ratio 0.1 \
    --weight_decay 0.1 \
    --max_grad_norm 1.0 \
    --output_dir "$OUT/reward"

run python rlhf_details/train_rloo.py \
    --dataset "$DATA/prompts_train.jsonl" \
    --eval_dataset "$DATA/prompts_test.jsonl" \
    --sft_model_path "$OUT/sft" \
    --reward_model_path "$OUT/reward" \
    --response_length 32 \
    --missing_eos_penalty 5.0 \
    --kl_coef 0.5 \
    --rloo_k 4 \
    --total_episodes 19200 \
    --batch_size 64 \
    --num_mini_batches 1 \
    --num_ppo_epochs 1 \
    --micro_batch_size 64 \
    --learning_rate 3e-4 \
    --output_dir "$OUT/rloo"

run python rlhf_details/train_ppo.py \
    --dataset "$DATA/prompts_train.jsonl" \
    --eval_dataset "$DATA/prompts_test.jsonl" \
    --sft_model_path "$OUT/sft" \
    --reward_model_path "$OUT/reward" \
    --response_length 32 \
    --missing_eos_penalty 5.0 \
    --kl_coef 0.5 \
    --total_episodes 9600 \
    --batch_size 128 \
    --micro_batch_size 128 \
    --learning_rate 3e-4 \
    --weight_decay 0 \
    --max_grad_norm 1.0 \
    --output_dir "$OUT/ppo"

run python rlhf_details/train_dpo.py \
    --dataset "$DATA/preference_train.jsonl" \
    --eval_dataset "$DATA/preference_test.jsonl" \
    --sft_model_path "$OUT/sft" \
    --beta 0.3 \
    --response_length 32 \
    --num_train_epochs 2 \
    --batch_size 32 \
    --micro_batch_size 32 \
    --learning_rate 3e-4 \
    --max_grad_norm 1.0 \
    --output_dir "$OUT/dpo"

for policy in rloo ppo dpo; do
    run python rlhf_details/evaluate.py \
        --dataset "$DATA/prompts_test.jsonl" \
        --policy_path "$OUT/$policy" \
        --opponent_path "$OUT/sft" \
        --ref_model_path "$OUT/sft" \
        --reward_model_path "$OUT/reward" \
        --judge reward_model \
        --temperature 0.7
done
