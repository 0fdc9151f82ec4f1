"""
What each detail is worth: the embedded task with one detail off or swapped, over seeds, beside the same run with it.

    python benchmark/studies/ablations.py run --tag TAG --seeds 1 2 3 4 5 6 7 8 9 10 --workers 2
    python benchmark/studies/ablations.py run --tag TAG --seeds 1 2 3 4 5 --workers 2 --times 4
    python benchmark/studies/ablations.py draw --tags TAG [TAG ..]

`run` takes hours and goes on where it stopped. With --times 4 it makes runs four times as long, of the variants in
LONG. `draw` writes static/ablations.svg, results/TAG/ablations.md and results/worth.toml; of several tags it takes for
each variant that with most of its seeds. A detail that has a flag is switched by it. Any other is changed in a copy of
the package, in the one statement that has its tag (mutations.py does it), so that the scripts have no switches for the
sake of a study. Unless it is this that is changed, a variant starts from the same SFT and reward model as the base that
it is compared with, and meets the same prompts and the same noise. The effect is the mean over seeds of the paired
difference, with Student's 95 % interval.
"""

import hashlib
import json
import re
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

sys.path.extend(str(Path(__file__).resolve().parents[1] / room) for room in (".", "checks"))
from intervals import ROOT, holm, last, mean_interval, prediction_interval, read_seeds, words
from mutations import DATA, LAYOUT, NORMAL, PPO, READ, RLOO, RM, SFT, UNBIASED, UTILS, mutate
from plot import blank, save

from benchmark import MODELS, STAGES, Run, StudyArgs, code_hash, git_tag, run_command, run_study, stage_runs

RUN = "--num_sample_generations 0 --checkpoint_every 0 --output_dir policy --batch_size 128"
SHORT_RLOO = f"train_rloo.py {RUN} --total_episodes 3200"
SHORT_PPO = f"train_ppo.py {RUN} --total_episodes 1536"
GPT2 = f"--sft_model_path {MODELS}/gpt2_sft --reward_model_path {MODELS}/gpt2_reward"
UNIT = f"--sft_model_path {MODELS}/sft --reward_model_path {MODELS}/reward_unit"
FIXED = "--stop_token none --truncate_token eos --truncate_after 8 --missing_eos_mode replace"  # of the recipe's toml
BASES = {  # name: (what, script and arguments)
    "rloo": ("RLOO, 25 updates of 32 prompts x 4", f"{SHORT_RLOO} {STAGES}"),
    "rloo2": ("rloo with 2 passes over each batch", f"{SHORT_RLOO} {STAGES} --num_ppo_epochs 2"),
    "rloo_short": ("rloo with responses of at most 20 tokens", f"{SHORT_RLOO} {STAGES} --response_length 20"),
    "rloo_token": ("rloo with a KL for each token", f"{SHORT_RLOO} {STAGES} --token_level_kl"),
    "rloo_gpt2": ("rloo on a GPT-2, whose positions are learnt", f"{SHORT_RLOO} {GPT2}"),
    "rloo_cold": ("rloo at temperature 0.7", f"{SHORT_RLOO} {STAGES} --temperature 0.7"),
    "rloo_few": ("rloo on 128 prompts, so that 25 updates are 6 passes over them", f"{SHORT_RLOO} {STAGES} --take 128"),
    "rloo_mini": ("rloo with 4 minibatches", f"{SHORT_RLOO} {STAGES} --num_mini_batches 4"),
    "rloo_unit": ("rloo, scores of mean 0 and deviation 1 (`--normalization gain_bias`)", f"{SHORT_RLOO} {UNIT}"),
    "rloo_bf16": ("rloo under bf16 autocast", f"{SHORT_RLOO} {STAGES}"),
    "ppo": ("PPO (N+), 12 updates of 128 episodes x 4 passes", f"{SHORT_PPO} {STAGES}"),
    "ppo_shared": ("ppo with a value head on the policy's trunk", f"{SHORT_PPO} {STAGES} --value_model shared"),
    "ppo_white": ("ppo with whitened rewards", f"{SHORT_PPO} {STAGES} --whiten_rewards"),
    "ppo_mini": ("ppo with 4 minibatches", f"{SHORT_PPO} {STAGES} --num_mini_batches 4"),
    "ppo_adaptive": (
        "ppo with an adaptive KL, target 6, horizon 500 episodes",
        f"{SHORT_PPO} {STAGES} --adaptive_kl --kl_horizon 500",
    ),
    "ppo_async": ("ppo sampled one update ahead (`--overlap`)", f"{SHORT_PPO} {STAGES} --overlap"),
    "ppo_fixed": ("ppo on 36 tokens each, read up to the first EOS from place 8 on", f"{SHORT_PPO} {STAGES} {FIXED}"),
    "ppo_short": (
        "ppo with responses of at most 20 tokens, where a missing EOS replaces the score",
        f"{SHORT_PPO} {STAGES} --response_length 20 --missing_eos_mode replace",
    ),
}

LAUNCH = {"rloo_bf16": "ACCELERATE_MIXED_PRECISION=bf16 python"}  # where it is not "python"


@dataclass
class Variant:
    name: str
    base: str
    tags: str  # of the details that it measures; none: a setting, a feature
    what: str  # what is changed
    flags: str = ""
    mutations: tuple = ()  # (file, tag, old, new), in the statement with the tag; tag "": anywhere, once
    sft: tuple = ()  # mutations of SFT, or flags of it: an SFT model of its own
    reward: tuple = ()  # mutations of the reward model's training, or flags of it: a reward model of its own
    runs: str = ""  # the base whose runs are this variant's
    measure: bool = False  # whether the change would measure the policy too: then the scripts as they are evaluate it
    note: str = ""  # what else there is to say of it, in the table


ALONE = "(rewards.sum(1, keepdim=True) - rewards) / (k - 1)"
FORWARD, ROUNDED = "in_slices(response_logprobs, policy, batch, size, n)", "(sampled_logprobs.bfloat16().float(), 0)"
PPO_FORWARD = "old_logprobs, _, values = in_slices(response_logprobs, policy, batch, size)"
PPO_ROUNDED = "_, _, values = in_slices(response_logprobs, policy, batch, size)"
PPO_ROUNDED += "; old_logprobs = sampled_logprobs.bfloat16().float()"
SAMPLED_POSITIONS = (UTILS, "GEN-6", "position + t", "Q + t + 0 * position")
POSITIONS = (
    (UTILS, "DATA-6", "mask.cumsum(-1)", "mask.new_ones(mask.shape).cumsum(-1)"),
    SAMPLED_POSITIONS,
    (RLOO, "RLOO-10", "query_mask.sum(1, keepdim=True) + step", "Q + 0 * query_mask.sum(1, keepdim=True) + step"),
)
UNTRIED = (LAYOUT, "RLOO-12", "if gap < 0.001", "if True")  # packed rows that are wrong are used all the same
SHIFT = (RLOO, "REW-1", "getattr(model.config, 'reward_bias', 0.0)", "getattr(model.config, 'reward_bias', 0.0) + 10")
UNIT_FLAG = "--normalization gain_bias"
RATE = "passes = args.num_ppo_epochs; optimizer.param_groups[0]['lr'] = "  # of the next step within an update
RATE += "utils.learning_rate_at((update - 1) * passes + epoch + 2, num_updates * passes, args)"
HOT = "token_logprobs(lambda x: self.logits(x) * self.temperature, "
VARIANTS = [
    # ---- the size of what can go wrong
    Variant("no_kl", "rloo", "MODEL-4", "no KL in the reward", "--kl_coef 0",
        note="to which a reference comes that is the policy itself, since its KL is 0"),
    Variant("greedy", "rloo", "GEN-1", "no noise: k equal responses", measure=True,
        note="advantages are then rounding noise, which AdamW scales to whole steps", mutations=(
        (UTILS, "GEN-1", "logits + gumbel_noise(fold(keys, t), logits.size(-1))", "logits"),)),
    Variant("added_keys", "rloo", "GEN-4", "coordinates added, not hashed", measure=True, mutations=(
        (UTILS, "GEN-4", "fold(keys, coordinate)", "keys + coordinate"),)),
    Variant("no_stop", "rloo", "GEN-5", "what follows EOS is part of the response", measure=True, mutations=(
        (UTILS, "GEN-5", "~torch.isin(token, stop_ids)", "(token == token)"),)),
    Variant("last_column", "rloo", "REW-2", "score read in the last column, padding or not", mutations=(
        (RLOO, "REW-2", "batch.response_mask.sum(1)", "torch.ones_like(batch.response_mask).sum(1)"),)),
    Variant("right_padding", "rloo", "DATA-5", "prompts padded on the right", measure=True, mutations=(
        (UTILS, "DATA-5", "[0] * (width - len(row)) + list(row)", "list(row) + [0] * (width - len(row))"),
        (UTILS, "", "[False] * (width - len(row)) + [True] * len(row)",
         "[True] * len(row) + [False] * (width - len(row))"))),
    # ---- positions
    Variant("positions_rope", "rloo", "DATA-6", "positions count padding (rotary)", measure=True, mutations=POSITIONS),
    Variant("positions_gpt2", "rloo_gpt2", "DATA-6", "positions count padding (learnt)", measure=True,
        mutations=POSITIONS),
    Variant("sampler_positions_gpt2", "rloo_gpt2", "GEN-6", "sampled responses' positions count padding (learnt)",
        measure=True, mutations=(
        SAMPLED_POSITIONS,)),
    Variant("dropout", "rloo2", "MODEL-1 MODEL-2", "dropout 0.1 in the policy", note="both details at once", mutations=(
        (UTILS, "MODEL-1", "module.p = 0.0", "module.p = 0.1"),
        (UTILS, "MODEL-2", "setattr(module, name, 0.0)", "setattr(module, name, 0.1)"))),
    Variant("shifted_index", "rloo", "GEN-7", "log-probs read one column late, in the token's own", measure=True,
        mutations=(
        (RLOO, "GEN-7", "column[Q:] - 1", "column[Q:]"),)),
    Variant("unmasked", "rloo", "REW-6", "log-probs of what stands behind the end count", measure=True, mutations=(
        (RLOO, "REW-6", " * batch.response_mask", ""),)),
    Variant(
        "untrained_head", "rloo", "MODEL-5", "the reward model is the SFT model, with the random head that it gets",
        f"--reward_model_path {MODELS}/sft --allow_untrained_reward_model",
    ),
    Variant("bf16_weights", "rloo", "MODEL-3", "weights rounded to bf16 after each step", mutations=(
        (RLOO, "", 'means.add({"policy/grad_norm": norm})',
         'means.add({"policy/grad_norm": norm}); [p.data.copy_(p.data.bfloat16()) for p in policy.parameters()]'),)),
    Variant("sampled_hot", "rloo_cold", "GEN-2", "sampled at temperature 1, all log-probs but the sampler's at 0.7",
        measure=True, mutations=(
        (RLOO, "", "return self.logits(hidden)", "return self.logits(hidden) * self.temperature"),)),
    Variant("trained_hot", "rloo_cold", "GEN-3", "sampled at temperature 0.7, all log-probs but the sampler's at 1",
        measure=True, mutations=(
        (RLOO, "", "token_logprobs(self.logits, ", HOT),)),
    # ---- data and SFT
    Variant("sft_no_eos", "rloo", "DATA-2", "SFT on texts without EOS", sft=(
        (UTILS, "DATA-2", "[*answer, tokenizer.eos_token_id]", "answer"),)),
    Variant("sft_completions", "rloo", "SFT-1", "SFT on completions alone", sft=("--completion_only",)),
    Variant("sft_micro_means", "rloo", "SFT-3", "SFT's loss: mean of the means of micro-batches of 4", sft=(
        "--micro_batch_size 4", (SFT, "SFT-3", "losses.sum() / num_targets", "losses.mean() / len(micro_batches)"))),
    Variant("same_order", "rloo_few", "DATA-7", "the prompts in the same order in every pass", mutations=(
        (DATA, "DATA-7", "seed, epoch", "seed"),)),
    # ---- packed rows
    Variant("plain_rows", "rloo", "", "one response a row, nothing is shared", "--no_share_prompts"),
    Variant("siblings_seen", "rloo", "RLOO-9", "packed responses see the siblings before them", mutations=(
        (RLOO, "RLOO-9", "(owner == 0) | (owner.unsqueeze(1) == owner)", "owner >= 0"),
        UNTRIED)),
    Variant("packed_positions", "rloo", "RLOO-10", "packed responses placed one behind the other", mutations=(
        (RLOO, "RLOO-10", "query_mask.sum(1, keepdim=True) + step",
         "query_mask.sum(1, keepdim=True) + torch.arange(n * R, device=device)"),
        UNTRIED)),
    Variant("blind_padding", "rloo", "RLOO-11", "padding in packed rows sees nothing", mutations=(
        (RLOO, "RLOO-11", " | torch.eye(len(column), dtype=torch.bool, device=device)", ""),)),
    Variant("siblings_apart", "rloo", "RLOO-1", "a prompt's responses not adjacent (plain rows): baselines of others",
        "--no_share_prompts", mutations=(
        (RLOO, "RLOO-1", "for prompt in prompts.of_update(update, B // k, args.seed) for _ in range(k)",
         "for _ in range(k) for prompt in prompts.of_update(update, B // k, args.seed)"),)),
    Variant("single_responses", "rloo_mini", "RLOO-8", "single responses shuffled and split (plain rows)",
        "--no_share_prompts", mutations=(
        (RLOO, "", "utils.permutation(num_prompts, *coordinates)", "utils.permutation(num_prompts * k, *coordinates)"),
        (RLOO, "RLOO-8", "(prompts.unsqueeze(1) * k + torch.arange(k, device=device)).reshape(-1)", "prompts"))),
    Variant("logits_in_pieces", "rloo", "GEN-8", "logits in pieces of 2^14 numbers", mutations=(
        (RLOO, "", "logits_at_once = 2**24", "logits_at_once = 2**14"),)),
    # ---- EOS
    Variant("no_eos_penalty_short", "rloo_short", "REW-3", "nothing is paid for a missing EOS",
        "--missing_eos_penalty None"),
    Variant("eos_replace_short", "rloo_short", "REW-3", "a missing EOS replaces the score",
        "--missing_eos_mode replace"),
    # ---- RLOO's estimator
    Variant("no_baseline", "rloo", "RLOO-3", "no baseline", mutations=(
        (RLOO, "RLOO-3", ALONE, "torch.zeros_like(rewards)"),)),
    Variant("shifted", "rloo", "", "scores shifted by 10, to which the baseline is blind", mutations=(SHIFT,)),
    Variant("shifted_no_baseline", "rloo", "RLOO-3", "scores shifted by 10, no baseline", mutations=(
        SHIFT, (RLOO, "RLOO-3", ALONE, "torch.zeros_like(rewards)"))),
    Variant("group_mean", "rloo", "RLOO-3", "baseline: the group's mean (three quarters of the same advantage)",
        mutations=(
        (RLOO, "RLOO-3", ALONE, "rewards.mean(1, keepdim=True)"),)),
    Variant("group_std", "rloo", "RLOO-3", "group's mean, over the group's deviation (GRPO)", mutations=(
        (RLOO, "RLOO-3", ALONE,
         "rewards - (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)"),)),
    Variant("mean_kl", "rloo", "RLOO-2", "KL of a response: its tokens' mean (a penalty 25 times as low)", mutations=(
        (RLOO, "RLOO-2", "kl.sum(1)", "kl.sum(1) / response_mask.sum(1).clamp(min=1)"),)),
    Variant("mean_logprob", "rloo", "RLOO-5", "log-probs of a response averaged over its tokens",
        note="with one step a rollout the ratio is 1 anyway: this measures the weight 1 / length in the gradient",
        mutations=(
        (RLOO, "RLOO-5", "logratio.sum(1)", "logratio.sum(1) / mask.sum(1).clamp(min=1)"),)),
    Variant("token_kl", "rloo", "", "REINFORCE++: each token pays for the KL from itself on", runs="rloo_token"),
    Variant("whole_kl", "rloo_token", "RLOO-4", "each token pays for all of the response's KL", mutations=(
        (RLOO, "RLOO-4", "kl.flip(1).cumsum(1).flip(1)", "kl.sum(1, keepdim=True).expand(kl.shape)"),)),
    Variant("k2_kl", "rloo", "REW-5", "KL in the reward: d^2/2", mutations=(
        (RLOO, "REW-5", "old_logprobs - ref_logprobs", "(old_logprobs - ref_logprobs) ** 2 / 2"),)),
    Variant("whiten_scores", "rloo", "RLOO-13", "REINFORCE++: scores whitened over the batch", "--normalize_reward"),
    Variant("whiten_advantages", "rloo", "RLOO-14", "REINFORCE++: advantages whitened", "--normalize_advantage"),
    Variant("k_2", "rloo", "", "k = 2, as many responses in all", "--rloo_k 2"),
    Variant("k_8", "rloo", "", "k = 8, as many responses in all", "--rloo_k 8"),
    # ---- RLOO's optimisation
    Variant("two_passes", "rloo", "", "2 passes over each batch", runs="rloo2"),
    Variant("no_clip", "rloo2", "RLOO-6", "the ratio is not clipped", "--cliprange 1e9"),
    Variant("sampler_logprobs", "rloo2", "GEN-9", "old log-probs: the sampler's, rounded to bf16",
        note="in the KL as well", mutations=(
        (RLOO, "GEN-9", FORWARD, ROUNDED),)),
    Variant("constant_lr", "rloo", "OPT-1", "the learning rate stays", "--lr_schedule constant"),
    Variant("adam_eps", "rloo", "OPT-4", "AdamW's epsilon 1e-5 in place of 1e-8", "--adam_eps 1e-5",
        note="the weight decay is not measured"),
    Variant("no_grad_clip", "rloo", "OPT-8", "the gradient's norm is not clipped", "--max_grad_norm None"),
    Variant("eighth", "rloo", "OPT-6", "an eighth of the gradient, as averaged over 8 processes", mutations=(
        (RLOO, "OPT-6", "loss * world", "loss * world / 8"),)),
    Variant("bf16_ratio", "rloo_bf16", "RLOO-7", "one step, but the ratio is against the sampler's log-probs",
        mutations=(
        (RLOO, "RLOO-7", "logprobs.detach() if one_step else old_logprobs[m]", "old_logprobs[m]"),)),
    Variant("bf16_head", "rloo_bf16", "RM-6", "the reward model's head in bf16", mutations=(
        (RLOO, "RM-6", "enabled=False", "enabled=True"),)),
    # ---- the reward model
    Variant("rm_other_head", "rloo", "RM-2", "another draw of the head than the seed's", reward=(
        (RM, "RM-2", "engines.start(args)", "engines.start(args); torch.manual_seed(args.seed + 1000)"),)),
    Variant("rm_fixed_gain", "rloo", "RM-5", "the gain is not trained", reward=(
        (RM, "RM-5", "torch.ones(1)", "torch.ones(1), requires_grad=False"),)),
    Variant("rm_pairs", "rloo", "RM-7", "pairwise losses, the best against each other one (InstructGPT)", reward=(
        (RM, "RM-7", "nn.functional.cross_entropy(scores, best, reduction='none')",
         "nn.functional.softplus(scores - scores.gather(1, best.unsqueeze(1))).sum(1) / 3"),)),
    Variant("rm_in_order", "rloo", "RM-14", "comparisons in the order of the data", reward=(
        (RM, "", "utils.permutation(len(train), args.seed, epoch)", "range(len(train))"),)),
    Variant("rm_not_before", "rloo_unit", "RM-9", "the gain starts at 1", reward=(
        UNIT_FLAG, (RM, "RM-9", f"{NORMAL}[0]", "1.0"))),
    Variant("rm_not_after", "rloo_unit", "RM-10", "not normalised again after training", reward=(
        UNIT_FLAG, (RM, "RM-10", NORMAL, "(1.0, 0.0)"))),
    Variant("rm_whole_samples", "rloo_unit", "RM-11", "the samples to normalise run on after EOS", reward=(
        UNIT_FLAG, (RM, "RM-11", "'none' if comparisons.are_token_ids(train) else 'eos'", "'none'"))),
    Variant("rm_gain_not_saved", "rloo_unit", "RM-13", "the trained gain is missing in the saved head", reward=(
        UNIT_FLAG, (RM, "RM-13", " * weights['gain']", ""))),
    Variant("rm_unit", "rloo", "", "scores of mean 0 and deviation 1", runs="rloo_unit"),
    Variant("head_std_1", "rloo", "RM-1", "the reward head starts with standard deviation 1", reward=(
        (RM, "RM-1", "1 / math.sqrt(model.score.in_features + 1)", "1.0"),)),
    Variant("rm_last_but_one", "rloo", "RM-4", "trained on the state before the last token, scored at the last",
        reward=(
        (RM, "RM-4", ".argmax(1)", ".argmax(1) - 1"),)),
    Variant("rm_shift", "ppo_short", "RM-12 REW-1", "reference responses score -3 in the mean, not 0", mutations=(
        (PPO, "REW-1", "getattr(model.config, 'reward_bias', 0.0)", "getattr(model.config, 'reward_bias', 0.0) - 3"),),
        note="an ordinary end pays as little as a missing one; a stress, not the shift that training found"),
    # ---- PPO
    Variant("ppo_no_kl", "ppo", "", "no KL in the reward", "--kl_coef 0"),
    Variant("ppo_k3", "ppo", "PPO-7", "a token pays k3, exp(-d) - 1 + d", "--kl_penalty k3"),
    Variant("ppo_adaptive_kl", "ppo", "PPO-15", "adaptive KL, target 6, horizon 500 episodes", runs="ppo_adaptive"),
    Variant("ppo_few_kl", "ppo_adaptive", "PPO-16", "adapted by the KL of 16 of the 128 responses", mutations=(
        (PPO, "PPO-16", "logged_kl.mean().item()", "logged_kl[:16].mean().item()"),)),
    Variant("ppo_score_in_last_place", "ppo", "PPO-6", "the score in the last column, behind the padding", mutations=(
        (PPO, "PPO-6", "value_mask(response_mask).sum(1, keepdim=True) - 1",
         "response_mask.new_ones(response_mask.shape).sum(1, keepdim=True) - 1"),)),
    Variant("ppo_no_state_after", "ppo", "PPO-5", "the state after EOS has no value; the score stands on EOS",
        mutations=(
        (PPO, "PPO-5", " | nn.functional.pad(response_mask, (1, 0), value=True)[:, :-1]", ""),)),
    Variant("ppo_whiten_rewards", "ppo", "", "rewards whitened, their mean kept", runs="ppo_white"),
    Variant("ppo_shift_mean", "ppo_white", "PPO-8", "the whitened rewards' mean is subtracted", mutations=(
        (PPO, "PPO-8", "shift_mean=False", "shift_mean=True"),)),
    Variant("ppo_raw_advantages", "ppo", "PPO-10", "advantages are not whitened", "--no_normalize_advantage"),
    Variant("ppo_whiten_padding", "ppo", "PPO-10", "what is behind the response counts where advantages are whitened",
        mutations=(
        (PPO, "PPO-10", "response_mask)", "torch.ones_like(response_mask)) * response_mask"),)),
    Variant("ppo_lam_1", "ppo", "PPO-9", "GAE with lambda 1", "--lam 1"),
    Variant("ppo_value_head", "ppo", "PPO-1", "the value model's head starts at zero",
        note="on the reward model's trunk", mutations=(
        (PPO, "PPO-1", "copy.deepcopy(reward_model)",
         "copy.deepcopy(reward_model); nn.init.zeros_(critic.model.score.weight)"),)),
    Variant("ppo_shared_value", "ppo", "", "a value head on the policy's trunk", runs="ppo_shared"),
    Variant("ppo_detached", "ppo_shared", "PPO-3", "the value loss does not reach the trunk", mutations=(
        (PPO, "PPO-3", "hidden.float()", "hidden.detach().float()"),)),
    Variant("ppo_frozen_value", "ppo", "PPO-4", "the value model is not trained",
        note="its gradients, never cleared, still count in the clipping", mutations=(
        (PPO, "PPO-4", "policy.parameters()", "policy.model.parameters()"),)),
    Variant("ppo_value_init", "ppo_shared", "PPO-2", "the shared value head starts at random", mutations=(
        (PPO, "PPO-2", "nn.init.zeros_(critic.weight)", "critic.weight"),)),
    Variant("ppo_vf_coef", "ppo", "PPO-14", "the value loss weighs 1 in place of 0.1", "--vf_coef 1"),
    Variant("ppo_no_clip", "ppo", "PPO-12", "the ratio is not clipped", "--cliprange 1e9"),
    Variant("ppo_no_value_clip", "ppo", "PPO-13", "the value is not clipped", "--cliprange_value 1e9"),
    Variant("ppo_one_pass", "ppo", "", "1 pass over each batch", "--num_ppo_epochs 1"),
    Variant("ppo_sampler_logprobs", "ppo", "GEN-9", "old log-probs: the sampler's, rounded to bf16",
        note="in the KL as well", mutations=(
        (PPO, "GEN-9", PPO_FORWARD, PPO_ROUNDED),)),
    Variant("ppo_one_ahead", "ppo", "GEN-10", "sampled one update ahead", runs="ppo_async"),
    Variant("ppo_async_ratio", "ppo_async", "GEN-11", "the ratio is against the weights before the first step",
        mutations=(
        (PPO, "GEN-11", "old_logprobs = sampled_logprobs", "old_logprobs = old_logprobs"),)),
    Variant("ppo_truncated_anywhere", "ppo_fixed", "GEN-12", "the first EOS ends what is read, wherever it stands",
        "--truncate_after 0"),
    Variant("ppo_all_scored", "ppo_fixed", "GEN-14", "the reward model reads what follows EOS", mutations=(
        (PPO, "GEN-14", READ, f"(response_mask, {READ}[1])"),)),
    Variant("ppo_ratio_threshold", "ppo", "PPO-17", "no step above a mean ratio of 10 (TRL)", "--ratio_threshold 10"),
    Variant("ppo_unbiased", "ppo", "PPO-11", "advantages whitened by the unbiased variance", mutations=(
        (UTILS, "PPO-11", "masked_mean((x - mean) ** 2, mask)", UNBIASED),)),
    Variant("ppo_white_shares", "ppo", "REW-7", "advantages whitened in eighths, as 8 processes would alone",
        mutations=(
        (PPO, "PPO-10", "utils.masked_whiten(advantages, response_mask)",
         "torch.cat([utils.masked_whiten(a, m) for a, m in zip(advantages.chunk(8), response_mask.chunk(8))])"),)),
    Variant("ppo_lr_by_step", "ppo", "OPT-2", "the learning rate falls from step to step", mutations=(
        (PPO, "", 'means.add({"policy/grad_norm": norm})', 'means.add({"policy/grad_norm": norm}); ' + RATE),)),
    Variant("ppo_same_order", "ppo_mini", "OPT-9", "the same minibatches in every pass", mutations=(
        (PPO, "OPT-9", "update, epoch", "update"),)),
    Variant("ppo_target_kl", "ppo", "PPO-18", "no further pass above 0.003 (--target_kl 0.002)", "--target_kl 0.002"),
    Variant("ppo_scaled_scores", "ppo", "PPO-19", "scores by running mean and deviation",
        "--score_norm --score_scaling"),
    Variant("ppo_tf_adam", "ppo", "OPT-3", "TensorFlow's epsilon", "--tf_adam"),
    Variant("ppo_micro_means", "ppo", "OPT-5", "policy loss: mean of the means of micro-batches of 16",
        "--micro_batch_size 16", mutations=(
        (PPO, "OPT-5", "losses.sum() / num_actions", "losses.sum() / response_mask[m].sum() / len(micro_batches)"),)),
]  # fmt: skip
# the variants that put in what is off by default
OPTIONS = "eos_replace_short token_kl whiten_scores whiten_advantages ppo_one_ahead ppo_k3 ppo_adaptive_kl".split()
OPTIONS += "rm_unit ppo_ratio_threshold ppo_whiten_rewards ppo_shared_value ppo_target_kl".split()
OPTIONS += ["ppo_scaled_scores", "ppo_tf_adam"]
# the variants whose batches are other texts, or are read otherwise, before anything is learnt
OWN_BATCHES = {variant.name for variant in VARIANTS if variant.measure} | {"ppo_one_ahead", "ppo_all_scored"}
# the variants of the longer runs: those that matter in the short ones, and others
LONG = "greedy no_stop dropout shifted_index unmasked bf16_weights sampled_hot sft_no_eos siblings_seen".split()
LONG += "shifted_no_baseline token_kl two_passes constant_lr untrained_head rm_not_after rm_shift ppo_k3".split()
LONG += "ppo_shift_mean ppo_shared_value ppo_vf_coef ppo_no_clip ppo_no_value_clip ppo_one_pass ppo_one_ahead".split()
LONG += "ppo_async_ratio ppo_all_scored ppo_scaled_scores".split()
LONG += "no_kl ppo_no_kl no_eos_penalty_short positions_gpt2 sampler_positions_gpt2 no_baseline no_clip".split()
LONG += "ppo_raw_advantages ppo_whiten_rewards ppo_value_head ppo_value_init ppo_tf_adam".split()
COLUMNS = ["update", "objective/gold", "objective/scores", "objective/kl"]
COLUMNS += [f"eval/objective/{name}" for name in ("gold", "scores", "kl", "ended", "length")]


@dataclass(kw_only=True)
class RunArgs(StudyArgs):
    """Trains what is missing: SFT and reward models of each seed, bases, variants."""

    times: Literal[1, 4] = 1
    """how much longer than in the table the runs are"""
    only: tuple[str, ...] = ()
    """names of bases and variants; none: all, or with --times 4 those in LONG"""
    columns: tuple[str, ...] = tuple(COLUMNS)


def hash_of(x):
    """Eight digits of what a Python object prints as."""
    return hashlib.sha256(repr(x).encode()).hexdigest()[:8]


def code_of(name, mutations, tag):
    """A copy of the scripts with the mutations in it."""
    folder = ROOT / "runs" / "benchmark" / tag / "code" / f"{name}_{code_hash()}_{hash_of(mutations)}"
    if folder.exists():  # a run of it may be on its way
        return folder
    shutil.copytree(ROOT / "rlhf_details", folder / "rlhf_details", ignore=shutil.ignore_patterns("__pycache__"))
    for file, of, old, new in mutations:
        path = folder / "rlhf_details" / file
        source = path.read_text(encoding="utf-8")
        if not of and source.count(old) != 1:
            raise ValueError(f"{old!r} is there {source.count(old)} times in {file}")
        path.write_text(mutate(source, of, old, new) if of else source.replace(old, new), encoding="utf-8")
    return folder


def random_gpt2(seed):
    """A GPT-2 of the embedded task's size with random weights and its tokenizer; its dropout is the library's 0.1."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from rlhf_details import toy

    folder = ROOT / "models" / "bench" / str(seed) / "gpt2"
    if not (folder / "config.json").exists():
        tokenizer = toy.tokenizer()
        torch.manual_seed(seed)
        end = tokenizer.eos_token_id
        ids = dict(bos_token_id=end, eos_token_id=end, pad_token_id=tokenizer.pad_token_id)
        config = GPT2Config(vocab_size=len(tokenizer), n_positions=128, n_embd=64, n_layer=2, n_head=4, **ids)
        GPT2LMHeadModel(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def stages(seeds, tag, variants=()):
    """[runs that can go side by side, ...]: what the policies of these seeds start from."""
    reward, first, second = "python rlhf_details/train_reward.py", {}, {}
    if any("gpt2" in variant.base for variant in variants):
        for seed in seeds:
            random_gpt2(seed)
        command = f"python rlhf_details/train_sft.py --output_dir {MODELS}/gpt2_sft --base_model {MODELS}/gpt2"
        first["gpt2_sft"] = (command, None)
        second["gpt2_reward"] = (f"{reward} --sft_model_path {MODELS}/gpt2_sft --output_dir {MODELS}/gpt2_reward", None)
    if any(variant.base == "rloo_unit" for variant in variants):
        command = f"{reward} --sft_model_path {MODELS}/sft --output_dir {MODELS}/reward_unit {UNIT_FLAG}"
        second["reward_unit"] = (command, None)
    for variant in variants:
        for stage, changes, batch in (("sft", variant.sft, first), ("reward", variant.reward, second)):
            if changes:
                flags = " ".join(x for x in changes if isinstance(x, str))
                mutations = [x for x in changes if not isinstance(x, str)]
                name = f"{stage}_{variant.name}"
                command = f"python rlhf_details/train_{stage}.py --output_dir {MODELS}/{name} {flags}"
                command += f" --sft_model_path {MODELS}/sft" if stage == "reward" else ""
                batch[name] = (command, code_of(name, mutations, tag) if mutations else None)
    return stage_runs(seeds, tag, first, second)


def longer(command, times):
    """A command with so many times as many episodes."""
    return re.sub(r"(?<=--total_episodes )\d+", lambda found: str(int(found[0]) * times), command)


def run(args: RunArgs):
    """Returns the names of the runs that failed."""
    tag, study, only = args.tag or git_tag(), "ablations", args.only
    if args.times > 1:
        study, only = f"ablations_{args.times}", only or LONG
    variants = [v for v in VARIANTS if not only or v.name in only]
    bases = {name for v in variants for name in (v.base, v.runs)} | (set(only) & set(BASES))
    failed = []
    for seed in args.seeds:
        runs = [
            Run(name, longer(f"{LAUNCH.get(name, 'python')} rlhf_details/{script}", args.times), seed, tag, study)
            for name, (_, script) in BASES.items()
            if name in bases
        ]
        measured = []
        for variant in [v for v in variants if not v.runs]:
            script, _, arguments = BASES[variant.base][1].partition(" ")
            command = f"{LAUNCH.get(variant.base, 'python')} rlhf_details/{script} {arguments} {variant.flags}"
            for stage, changes in (("sft", variant.sft), ("reward", variant.reward)):
                if changes:
                    model = f"--{stage}_model_path {MODELS}/{stage}_{variant.name}"
                    command = re.sub(rf"--{stage}_model_path \S+", lambda _, model=model: model, command)
            code = code_of(variant.name, variant.mutations, tag) if variant.mutations else None
            runs.append(Run(variant.name, longer(command, args.times), seed, tag, study, code))
            if variant.measure:
                policy = "{root}/runs/benchmark/" + f"{tag}/{study}/{variant.name}_s" + "{seed}/policy"
                kind = "gpt2_" if "gpt2" in variant.base else ""
                command = f"python benchmark/studies/held_out.py --policy {policy} --sft {MODELS}/{kind}sft"
                command += f" --reward {MODELS}/{kind}reward" + " --temperature 0.7" * (variant.base == "rloo_cold")
                measured.append(Run(f"{variant.name}_measured", command, seed, tag, study))
                runs[-1].makes = None if measured[-1].is_done() else runs[-1].folder / "policy"
        failed += run_study(stages((seed,), tag, variants), runs, args, tag)
        failed += run_study([], measured, args, tag) if measured else []
    return failed


UNPRICED = {  # reason: tags that have no row
    "there is nothing to swap it for: otherwise the run fails, or its numbers are plainly wrong (a mutant shows it)":
        "SFT-2",
    "it concerns what is saved or reported, not what is learnt":
        "RM-8 LOG-1 LOG-2 LOG-3 LOG-4 LOG-5 LOG-6 EVAL-1 EVAL-2 EVAL-3 EVAL-4 EVAL-5",
    "it acts on data or models that the embedded task does not have":
        "DATA-1 DATA-3 DATA-4 RM-3 REW-4 GEN-13 GEN-16 RLOO-12",
    "it concerns how much processes say to each other, not results": "OPT-7",
    "the runs are whole batches": "OPT-10",
    "a study of distillation is planned, and not made yet":
        "DISTILL-1 DISTILL-2 DISTILL-3 DISTILL-4 DISTILL-5 DISTILL-6 DISTILL-7",
}  # fmt: skip


@dataclass
class DrawArgs:
    """Draws the figure and writes the tables from the CSV files."""

    tags: tuple[str, ...]
    """folders of the results; a variant is taken from the one with most of its seeds, the first of equals"""
    output: str = "static/ablations.svg"
    """the figure"""


def outcome(seed):
    """On held-out prompts at the end: gold, KL and the share that EOS ended. Gold over the updates as well."""
    return {
        "gold": last(seed["eval/objective/gold"]),
        "kl": last(seed["eval/objective/kl"]),
        "ended": last(seed["eval/objective/ended"]),
        "course": seed["objective/gold"][~np.isnan(seed["objective/gold"])].mean(),
    }


NAMES = {"gold": "gold", "course": "gold over the run", "kl": "KL", "ended": "share ended"}
MEASURES = tuple(NAMES)
VERDICTS = ("matters", "perhaps", "does not show here", "changes nothing")


def differences(folder, variant):
    """({seed: {measure: variant less base}}, {seed: {measure: base}}) of one folder; FileNotFoundError."""
    base, changed = (
        {number: outcome(seed) for number, seed in read_seeds(folder, name).items()}
        for name in (variant.base, variant.runs or variant.name)
    )
    if variant.measure:
        held_out = read_seeds(folder, f"{variant.name}_measured")
        ends = {n: {m: last(x[f"eval/objective/{m}"]) for m in ("gold", "kl", "ended")} for n, x in held_out.items()}
        changed = {n: changed[n] | ends[n] for n in set(changed) & set(ends)}
    common = sorted(set(base) & set(changed))
    return {n: {m: changed[n][m] - base[n][m] for m in MEASURES} for n in common}, base


def effects(folders):
    """What each variant changes, and what its base reaches, of the variants that have results.

    Returns: {name: {"base": (name, its tag), "seeds": {seed: {measure: value}}, measure: (mean, low, high, p)}}, of the
    paired differences, variant less base; and the bases' own in the same form, {(name, tag): ..}.
    """
    found, bases = {}, {}
    for variant in VARIANTS:
        of_folders = {}
        for folder in folders:
            with suppress(FileNotFoundError):
                of_folders[folder.parent.name] = differences(folder, variant)
        if not of_folders:
            print(f"{variant.name}: not run", file=sys.stderr)
            continue
        tag = max(of_folders, key=lambda tag: len(of_folders[tag][0]))
        base = variant.base, tag
        for result, name, seeds in ((found, variant.name, of_folders[tag][0]), (bases, base, of_folders[tag][1])):
            result[name] = {m: mean_interval([x[m] for x in seeds.values()]) for m in MEASURES}
            result[name] |= {"base": base, "seeds": seeds}
    return found, bases


def repeated(found, folder):
    """Lines of a table: variants taken from another folder, beside what fewer seeds of this one say; and a count.

    "outside": a mean that is not in the 95 % prediction interval which the seeds of the first give for it.
    """
    lines = ["| what is changed | base | seeds | gold at the end | again | KL | again | outside |"]
    lines += ["|---|---|---:|---:|---:|---:|---:|---|"]
    outside, figures = 0, 0
    for v in VARIANTS:
        if v.name not in found or found[v.name]["base"][1] == folder.parent.name:
            continue
        try:
            seeds, _ = differences(folder, v)
        except FileNotFoundError:
            continue
        known, more = found[v.name]["seeds"].values(), seeds.values()
        means, names = {m: np.mean([x[m] for x in more]) for m in MEASURES}, []
        for m in MEASURES:
            least, most = prediction_interval([one[m] for one in known], len(more))
            is_outside = not least - 5e-5 <= means[m] <= most + 5e-5  # rounding of what is kept
            names += [NAMES[m]] if is_outside else []
            figures += is_outside or least < most  # Where no seed differs there is nothing to predict.
        outside += len(names)
        cells = [f"{found[v.name][m][0]:+.2f} | {means[m]:+.2f}" for m in ("gold", "kl")]
        head = named(v), v.base, f"{len(known)}, {len(more)}"
        lines.append(f"| {' | '.join([*head, *cells])} | {', '.join(names)} |")
    return lines, f"{outside} of {figures}"


def tested(name):
    """The figures of a variant that count as evidence."""
    return [m for m in MEASURES if m != "course" or name not in OWN_BATCHES]


def verdicts(found):
    """{variant: verdict}: "matters" where one of its p values is below 0.05 after Holm's correction over all of the
    table, "perhaps" where one of its intervals excludes 0, "changes nothing" where all differences are exactly 0; and
    the set of (variant, measure) with such a p value. Gold over the run is not tested where it differs by construction.
    """
    keys = [(name, m) for name in found for m in tested(name)]
    adjusted = dict(zip(keys, holm([found[name][m][3] for name, m in keys]), strict=True))
    sure, result = {key for key in keys if adjusted[key] < 0.05}, {}
    for name, effect in found.items():
        if all(effect[m][:3] == (0, 0, 0) for m in MEASURES):
            result[name] = "changes nothing"
        elif any(key in sure for key in keys if key[0] == name):
            result[name] = "matters"
        elif any(effect[m][1] > 0 or effect[m][2] < 0 for of, m in keys if of == name):
            result[name] = "perhaps"
        else:
            result[name] = "does not show here"
    return result, sure


def signed(x):
    """An interval (mean, low, high, ..) in words."""
    digits = 2 if max(map(abs, x[1:3])) < 20 else 1
    return words(x, f"+.{digits}f")


def forest(found, verdict, output):
    """The forest plot: a row a variant, the worst for gold at the bottom; beyond +-0.5 the scale is logarithmic."""
    import matplotlib

    names = sorted(found, key=lambda name: found[name]["gold"][0])
    what = {variant.name: variant for variant in VARIANTS}
    colours = dict(zip(VERDICTS, ("#b22222", "#b8860b", "#808080", "#3465a4"), strict=True))
    figure, axes = blank(1, 2, sharey=True, figsize=(10, 0.17 * len(names) + 1), layout="constrained")
    titles = {"gold": "effect on gold, points", "kl": "effect on the KL, nats a response"}
    for axis, (measure, title) in zip(axes, titles.items(), strict=True):
        for row, name in enumerate(names):
            mean, low, high, _ = found[name][measure]
            axis.plot([low, high], [row, row], color=colours[verdict[name]], linewidth=1.2)
            axis.plot(mean, row, "o", color=colours[verdict[name]], markersize=3)
        axis.axvline(0, color="black", linewidth=0.6)
        axis.set_xscale("symlog", linthresh=0.5)
        ticks = [-10, -3, -1, -0.5, 0, 0.5, 1, 3, 10]
        axis.set_xticks(ticks, [f"{x:g}" for x in ticks])
        axis.minorticks_off()
        axis.set_title(title, fontsize=9)
        axis.tick_params(labelsize=6.5)
        axis.grid(alpha=0.2)
    labels = [f"{what[name].what} [{what[name].base.replace('_', ' ')}]" for name in names]
    axes[0].set_yticks(range(len(names)), labels)
    axes[0].set_ylim(-1, len(names))
    for label, colour in colours.items():
        axes[1].plot([], [], color=colour, label=label)
    figure.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=len(colours))
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
    save(figure, output, "ablations")


def levels(rows):
    """Lines of a table of what bases reach. rows: [(base, what it is, its outcomes in the form of `effects`)]."""
    lines = ["| base | what | gold at the end | gold over the run | KL, nats a response | share ended |"]
    lines.append("|---|---|---:|---:|---:|---:|")
    return lines + [f"| {base} | {what} | {' | '.join(words(x[m]) for m in MEASURES)} |" for base, what, x in rows]


def changes(rows, verdict, sure):
    """Lines of a table of effects. rows: [(variant's name, tags, what is changed, base, effect)]."""
    lines = ["| details | what is changed | base | seeds: gold, KL up | gold at the end | gold over the run | KL "]
    lines[-1] += "| share ended | verdict |"
    lines.append("|---|---|---|---:|---:|---:|---:|---:|---|")
    for name, tags, what, base, effect in rows:
        marks = {m: "**" if (name, m) in sure else "" for m in MEASURES}
        cells = " | ".join(f"{marks[m]}{signed(effect[m])}{marks[m]}" for m in MEASURES)
        head = ", ".join(tags.split()), what, base, count_up(effect)
        lines.append(f"| {' | '.join(head)} | {cells} | {verdict[name]} |")
    return lines


def tally(variants, verdict):
    """Lines of a table: how many variants and details have each verdict, and how many "perhaps" chance alone makes.

    Where nothing has an effect, one in twenty of the 95 % intervals excludes 0. So many rows can have one in the mean,
    or fewer where a row has several. Rows that matter, or in which nothing changes, are none of them.
    """
    best = {}  # the verdict on a detail is that of its variant which shows most
    for variant in variants:
        for tag in variant.tags.split():
            best[tag] = min(best.get(tag, VERDICTS[-1]), verdict[variant.name], key=VERDICTS.index)
    figures = sum(len(tested(v.name)) for v in variants if verdict[v.name] in ("perhaps", "does not show here"))
    counts = [[v, *(list(of.values()).count(v) for of in (verdict, best)), ""] for v in VERDICTS]
    counts[VERDICTS.index("perhaps")][-1] = f"{figures / 20:.0f} or fewer, of {figures} figures"
    lines = ["| verdict | variants | details | variants, by chance alone |", "|---|---:|---:|---:|"]
    return lines + [f"| {' | '.join(map(str, x))} |" for x in [*counts, ["all", len(verdict), len(best), ""]]]


def worth(rows, verdict, sure, more=lambda name: ""):
    """The text of a worth.toml: of each tag the effect that shows most. rows as those of `changes`."""
    text = ""
    for tag in sorted({tag for _, tags, *_ in rows for tag in tags.split()}):
        name, _, what, base, effect = min(
            (row for row in rows if tag in row[1].split()),
            key=lambda row: (VERDICTS.index(verdict[row[0]]), -abs(row[4]["gold"][0])),
        )
        shown = [m for m in MEASURES if m in ("gold", "kl") or effect[m][1] > 0 or effect[m][2] < 0]
        numbers = ", ".join(f"{NAMES[m]} {effect[m][0]:+.2f}{'*' * ((name, m) in sure)}" for m in shown)
        text += f"\n[{tag}]\nsays = {json.dumps(f'{what}, {base}: {numbers}{more(name)}; {verdict[name]}')}\n"
    return text


def count_up(effect):
    """ "10: 4, 9": ten seeds, in 4 of which gold rises, in 9 the KL."""
    seeds = effect["seeds"].values()
    return f"{len(seeds)}: {sum(x['gold'] > 0 for x in seeds)}, {sum(x['kl'] > 0 for x in seeds)}"


def seed_by_seed(found, bases):
    """Lines of the table of every seed's gold and KL at the end: the bases' own, and the variants' differences."""
    numbers = sorted({n for effect in found.values() for n in effect["seeds"]})
    lines = ["| | " + " | ".join(f"seed {n}" for n in numbers) + " |", "|---|" + "---:|" * len(numbers)]
    rows = [(", ".join(name), effect, ".2f") for name, effect in bases.items()] + [
        (f"{v.what} [{', '.join(found[v.name]['base'])}]", found[v.name], "+.2f") for v in VARIANTS if v.name in found
    ]
    for label, effect, form in rows:
        pairs = [effect["seeds"].get(n) for n in numbers]
        cells = [f"{x['gold']:{form}}, {x['kl']:{form}}" if x else "" for x in pairs]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return lines


def named(variant):
    """What a variant changes, as the tables say it."""
    return variant.what + " (an option)" * (variant.name in OPTIONS) + (f" ({variant.note})" if variant.note else "")


HEAD = """\
# What each detail is worth

Written by `python benchmark/studies/ablations.py draw --tags {tags}`; `run --tag TAG` makes the runs. A base's name
is followed by the commit whose scripts it and its variants were run with. A variant is always compared with a base of
its own commit, seed and machine.

The embedded task, whose true reward is *gold* (it sees the words of a response, not whether EOS ended it). A seed
changes initialisations, order and samples of every stage; texts, prompts and the noise of the human's choices stay.

Effects are means over seeds of the paired difference, variant less base, with Student's 95 % interval: gold of 512
held-out prompts at the end, gold of the training batches in the mean over the updates, the KL at the end, and the share
of responses that EOS ended. "10: 4, 9" is ten seeds, in 4 of which gold ended higher than in the base and in 9 the KL.
Most variants take a detail away: where gold is negative, the detail helps. "(an option)" marks those that put one in
which is off by default; there it is the other way.

Where a variant changes what would measure it too (the sampler, positions, log-probs), the figures of the end are those
of the scripts as they are; its gold over the run is what its own sampler gave. That differs before anything is learnt,
as it does where the reward model reads what follows EOS, or where batches come one update late: it is no evidence, and
not tested.

*matters*: one of the p values, that of a figure in bold, is below 0.05 after Holm's correction over the whole
table. *perhaps*: one of the intervals excludes 0, which chance alone does in up to one row of five. *does not show
here*: none does. *changes nothing*: the four figures of every seed are the same, to the five digits that are kept.

{tally}

How to read it: the runs end before gold has stopped rising, so that whatever makes steps larger or more numerous
gains, and what hurts late cannot show (see *Longer runs*, below the table, and the study of over-optimisation). In RLOO
every gradient is clipped to norm 1, and AdamW divides by its size: a mere factor on the advantages cannot show. A small
model, short responses, fp32 and one process hide what acts on large ones, long ones, in bf16, and on several.

Before the correction a p value must be below some 0.0002. Ten seeds give that only if differences are normal, as
Student supposes: that ten have one sign has an exact p of 0.002. Where one seed is far out his interval says little,
either way; compare the counts.
"""


LONGER = """\
The same in runs four times as long, of five seeds. A correction of their own; "apart": the intervals of the short and
of the long runs do not overlap. Bold: what passes the correction of the long runs. The verdicts also rest on gold over
the run and on the share ended, which are not shown. Most short runs are of another commit (the table above names it).
"""

REPEATED = """\
The variants of an earlier commit, run again with the scripts of `{tag}` from models of its own, with fewer seeds. Means
over seeds of the paired differences, of both. "outside": the second mean is not in the 95 % prediction interval that
the first seeds give for it; so are {count} figures (these two, gold over the run and the share ended; without those
that no seed changes). Chance alone would take one in twenty, if they were independent, but variants share the few runs
of their base.
"""


def draw(args: DrawArgs):
    """Writes the figure, results/worth.toml and, in the first tag's folder, ablations.md."""
    results = ROOT / "benchmark" / "results"
    found, bases = effects([results / tag / "ablations" for tag in args.tags])
    variants = [variant for variant in VARIANTS if variant.name in found]
    verdict, sure = verdicts(found)
    forest(found, verdict, args.output)

    def reached(bases):
        order = sorted(bases, key=lambda base: (list(BASES).index(base[0]), args.tags.index(base[1])))
        return levels([(", ".join(base), BASES[base[0]][0], bases[base]) for base in order])

    rows = [(v.name, v.tags, named(v), ", ".join(found[v.name]["base"]), found[v.name]) for v in variants]
    head = HEAD.format(tags=" ".join(args.tags), tally="\n".join(tally(variants, verdict)))
    lines = [head, *reached(bases), "", *changes(rows, verdict, sure)]
    long, long_bases = effects([results / args.tags[0] / "ablations_4"])
    if long:
        lines += ["", "## Longer runs", "", LONGER, *table_beside(found, verdict, long, "long")]
        lines += ["", "What their bases reach, in four times as many updates as are named:", "", *reached(long_bases)]
    lines_again, count_again = repeated(found, results / args.tags[0] / "ablations")
    if len(lines_again) > 2:
        lines += ["", "## Repeated", "", REPEATED.format(tag=args.tags[0], count=count_again), *lines_again]
    lines += ["", "## Not measured", "", "| details | why |", "|---|---|"]
    lines += [f"| {', '.join(tags.split())} | {reason} |" for reason, tags in UNPRICED.items()]
    lines += ["", "## Seed by seed", ""]
    lines += ["Gold and KL at the end: the bases', and the variants' differences from them.", ""]
    lines += seed_by_seed(found, bases)
    (results / args.tags[0] / "ablations.md").write_text("\n".join(lines) + "\n")

    def in_longer_runs(name):
        if name not in long or not apart(found[name], long[name]):
            return ""
        return f" (longer runs: gold {long[name]['gold'][0]:+.2f}, KL {long[name]['kl'][0]:+.2f})"

    rows = [(v.name, v.tags, named(v), v.base, found[v.name]) for v in variants]
    text = "# Written by benchmark/studies/ablations.py draw.\n" + worth(rows, verdict, sure, in_longer_runs)
    (results / "worth.toml").write_text(text)
    print("\n".join(lines))


def apart(effect, other):
    """The names of gold and KL, if the intervals of two effects of a variant do not overlap."""
    return [NAMES[m] for m in ("gold", "kl") if effect[m][2] < other[m][1] or other[m][2] < effect[m][1]]


def table_beside(found, verdict, other, name):
    """Lines of a table: what variants do in `other` effects, called `name`, beside what they do in those of `found`,
    and for which measures the two intervals do not overlap ("apart"). Each side has a correction of its own.
    """
    of_other, sure = verdicts(other)
    lines = [f"| details | what is changed | base | {name}: gold, KL up | gold at the end | {name} | KL | {name} "]
    lines[-1] += f"| verdict | {name} | apart |"
    lines += ["|---|---|---|---:|---:|---:|---:|---:|---|---|---|"]
    for v in [v for v in VARIANTS if v.name in other and v.name in found]:
        cells = []
        for m in ("gold", "kl"):
            mark = "**" if (v.name, m) in sure else ""
            cells += [signed(found[v.name][m]), f"{mark}{signed(other[v.name][m])}{mark}"]
        words = verdict[v.name], of_other[v.name], ", ".join(apart(found[v.name], other[v.name]))
        head = ", ".join(v.tags.split()), named(v), v.base, count_up(other[v.name])
        lines.append("| " + " | ".join([*head, *cells, *words]) + " |")
    return lines


COMMANDS = {"run": (RunArgs, run), "draw": (DrawArgs, draw)}

if __name__ == "__main__":
    sys.exit(run_command(COMMANDS))
