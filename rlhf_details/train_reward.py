"""
Reward model: one scalar per response, trained on comparisons of K candidates of which a human found one the best.

1. One loss serves both papers: cross-entropy of the K scores against the best one. K = 4 is lm-human-preferences
   (arXiv 1909.08593). K = 2 is exactly the pairwise loss -log sigmoid(chosen - rejected) of InstructGPT and N+.
2. The score is the head's output at the last real token, found from the mask. Where EOS is appended, this is the EOS.
3. The head is drawn with std 1/sqrt(H + 1), so that scores start near unit size. Dropout is off.
4. Scores are only defined up to a constant. After training they are shifted to mean 0 over the training candidates, or
   over the reference responses of --reference_dataset (N+). Or samples of the reference policy set them
   (lm-human-preferences): to std 1 before training, to mean 0 and std 1 after it.
   The saved head holds the scale, and `reward_bias` in the saved configuration is the shift.
5. The saved folder is an ordinary sequence-classification model, whose padding token is never EOS.
6. lm-human-preferences' own labels are read as they are: rows of GPT-2's token ids without their padding. Nothing is
   tokenised again, and no EOS is appended.

Left out on purpose: other kinds of labels (ratings), ensembles, and a margin.

Shapes    B: comparisons of a minibatch   K: candidates of one   M: comparisons of a micro-batch   H: hidden size
          L: tokens of a row, left-padded   N: rows
Masks     True marks a real token. Nothing is found by looking for a pad token.

One process:   python rlhf_details/train_reward.py
N processes:   accelerate launch --num_processes N rlhf_details/train_reward.py
Your data:     python rlhf_details/train_reward.py --dataset rows.jsonl --sft_model_path gpt2
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from rlhf_details import utils
from rlhf_details.plumbing import console
from rlhf_details.plumbing.inputs import cli, comparisons, data, flags, models, stop_tokens
from rlhf_details.plumbing.machine import candidates, engines
from rlhf_details.plumbing.outputs.run import Run


@dataclass
class Args(flags.RunArgs):  # inherits the shared flags
    exp_name: str = "train_reward"
    output_dir: str = "models/reward"

    # data
    dataset: str = "toy"
    """comparisons: "toy", a file, a folder, a Hub data set or FILE.py:FUNCTION, with rows of `prompt`, `chosen`,
    `rejected` (where these begin with the prompt it may be left out), or `prompt`, `candidates`, `best`, or token ids:
    `query`, `sample0` .. and `best` (lm-human-preferences), `query_token`, `chosen_token` and `rejected_token` (N+). A
    name may end in [:4992], its start"""
    eval_dataset: str | None = None
    """held-out comparisons, evaluated after training; None: no evaluation"""
    max_length: int | None = None
    """drop rows whose prompt and a candidate have more tokens than this; the number of dropped rows is printed"""
    num_comparisons: int = 3072
    """toy: how many comparisons the imaginary human labels"""

    # models
    sft_model_path: str | None = None
    """the causal language model whose weights it starts from, and the policy that normalisation samples (required
    unless --dataset is toy)"""

    # algorithm
    num_train_epochs: int = 1
    """passes over the comparisons; the papers make one"""
    batch_size: int = 32
    """comparisons per optimiser step, over all processes (B)"""
    normalization: Literal["none", "mean_shift", "gain_bias"] = "mean_shift"
    """none; mean 0 on candidates or on references (N+); mean 0 and std 1 on samples, std 1 also before training
    (lm-human-preferences)"""
    reference_dataset: str | None = None
    """mean_shift: rows of `prompt` and `completion`; None: the candidates of the training comparisons"""
    normalize_samples: int = 256
    """gain_bias: responses to sample from the policy at sft_model_path, before training and again after it"""

    # sampling, for the embedded task's comparisons and gain_bias
    response_length: int = 53
    """most tokens a sampled response may have (R)"""
    temperature: float = 0.7
    """sampling temperature"""

    # optimiser
    learning_rate: float = 5e-5
    """peak learning rate of AdamW"""
    lr_schedule: Literal["linear", "cosine", "constant"] = "cosine"
    """learning-rate schedule over the steps"""
    warmup_ratio: float = 0.0
    """share of the steps over which the learning rate rises linearly"""
    adam_eps: float = 1e-5
    """AdamW's epsilon"""
    tf_adam: bool = False
    """place epsilon as TensorFlow does (lm-human-preferences)"""
    weight_decay: float = 0.01
    """AdamW's weight decay"""
    max_grad_norm: float | None = None
    """clip the gradient's global norm; None: only log it"""

    # memory and speed: never changes the result
    micro_batch_size: int = 8
    """comparisons that a device puts through one forward and backward pass"""


# Presets replace the defaults above: an embedded task's by name (default: "toy"), else those of the smallest number
# above the model's parameter count. docs/guides/1_your_data.md has their sources.
presets = {
    "toy": dict(
        eval_dataset="toy:test",
        sft_model_path="models/toy/sft",
        output_dir="models/toy/reward",
        batch_size=16,
        response_length=36,
        temperature=1.0,
        learning_rate=2e-3,
        warmup_ratio=0.05,
        max_grad_norm=1.0,
        micro_batch_size=128,
    ),
    20e6: dict(num_train_epochs=2, batch_size=16, learning_rate=1e-3, max_grad_norm=1.0, micro_batch_size=32),
    500e6: {},  # the defaults above
    math.inf: dict(learning_rate=3e-6),
}


# ---- model: what is trained runs inside `forward`, so that DDP, FSDP and DeepSpeed see all parameters ----------------
class Reward(nn.Module):
    """Scores: gain * head(the state of a row's last real token). There is no bias, because the loss cannot see one."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        # The scale of all scores is trained as well. A trained bias would get no gradient. [RM-5]
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, tokens, mask):
        """Args: tokens [N, L]; mask [N, L] bool. Returns: scores [N] fp32."""
        hidden = models.hidden_states(self.model, tokens, mask, utils.positions_from_mask(mask))  # [N, L, H]
        # The mask says which token is the last, since pad may equal EOS. [RM-4]
        last = (mask * torch.arange(mask.size(1), device=mask.device)).argmax(1)  # [N]
        hidden = hidden[torch.arange(len(hidden), device=mask.device), last]  # [N, H]
        # In bf16 the scores between 2 and 4 would lie 1/64 apart. [RM-6]
        with torch.autocast(hidden.device.type, enabled=False):
            return self.gain * self.model.score(hidden.float()).squeeze(-1)


def load_model(args, device):
    """Returns (tokenizer, reward model): the trunk of --sft_model_path with a new head, in fp32 and without dropout."""
    tokenizer = models.load_tokenizer(args.sft_model_path, "--sft_model_path", args)
    model = models.load_scalar_model(args.sft_model_path, "--sft_model_path", args)
    model = utils.disable_dropout(model)
    # The library has drawn a head already, so what is drawn here depends on the library, and not on the seed alone.
    # The state has H entries of variance near 1, so the score has a variance near 1 as well. [RM-1]
    nn.init.normal_(model.score.weight, std=1 / math.sqrt(model.score.in_features + 1))
    if tokenizer.pad_token_id in (None, tokenizer.eos_token_id):
        # transformers reads a score at the last token that is not padding. If pad were EOS, it would skip EOS. [RM-3]
        tokenizer.add_special_tokens({"pad_token": "[PAD]"})
        if tokenizer.pad_token_id >= model.get_input_embeddings().num_embeddings:
            model.resize_token_embeddings(tokenizer.pad_token_id + 1)
    model.config.pad_token_id = tokenizer.pad_token_id
    model = models.add_adapters(model, args.lora_rank)
    return tokenizer, Reward(model).to(device)


# ---- from token ids to scores ----------------------------------------------------------------------------------------
def samples_to_normalise(args, accelerator, tokenizer, train, purpose):
    """Rows of token ids, each a training prompt and what the policy at --sft_model_path answers."""
    first = args.normalize_samples * (purpose == candidates.AFTER)  # Prompts and noise are others than BEFORE.
    prompts = [train[(first + i) % len(train)].ids for i in range(args.normalize_samples)]
    # With lm-human-preferences' labels the samples are whole responses, which no EOS ends. [RM-11]
    ends = "none" if comparisons.are_token_ids(train) else "eos"
    stop_ids = stop_tokens.stop_ids(tokenizer, ends, "--normalization")
    responses = candidates.sample(args, accelerator, prompts, purpose, stop_ids.to(accelerator.device))
    return [query + response for query, response in zip(prompts, responses, strict=True)]


@torch.no_grad()
def score_rows(reward, rows, size, accelerator):
    """Scores [N] fp32 of rows of token ids, `size` rows in a forward. Call it on every process; each takes a share."""
    reward.eval()
    # The shares are filled up, so that all processes have as many rows.
    _, mine = data.my_share(rows, accelerator)
    slices = [mine[m] for m in utils.slices(len(mine), size)]
    with accelerator.autocast():
        parts = console.progress("scoring rows, slice by slice", slices)
        scores = torch.cat([reward(*utils.left_pad(part, accelerator.device)) for part in parts])
    return accelerator.gather(scores)[: len(rows)]


# ---- equations -------------------------------------------------------------------------------------------------------
def best_of_k_loss(scores, best):
    """Cross-entropy of K scores against the best candidate. For K = 2 it is -log sigmoid(chosen - rejected).

    Args: scores [M, K]; best [M] int64. Returns: [M]. Source: lm-human-preferences, label_types.py (PickBest).
    """
    # Where all scores are equal, a comparison costs log K. [RM-7]
    return nn.functional.cross_entropy(scores, best, reduction="none")


def is_correct(scores, best):
    """Whether the best candidate's score is strictly the highest, [M] bool. Args: scores [M, K]; best [M] int64."""
    best = best.unsqueeze(1)  # [M, 1]
    others = scores.scatter(1, best, -math.inf)
    # A tie is wrong, so that a constant model has an accuracy of 0. [RM-8]
    return scores.gather(1, best).squeeze(1) > others.amax(1)


def gain_and_bias(scores, mean=0.0, std=1.0):
    """(gain, bias), scalar tensors, that give these raw scores [N] the wanted mean and (biased) std.

    Equal scores have the gain inf. Source: lm-human-preferences, rewards.py.
    """
    gain = std / scores.std(correction=0)
    return gain, mean - gain * scores.mean()


# ---- held-out evaluation and normalisation ---------------------------------------------------------------------------
def evaluate(reward, held_out, size, accelerator):
    """{"eval/rm/..": mean over the held-out comparisons}; call it on every process."""
    if not held_out:
        return {}
    rows = [row for comparison in held_out for row in comparison.candidates]
    scores = score_rows(reward, rows, size, accelerator).reshape(len(held_out), -1)  # [N, K]
    best = torch.tensor([comparison.best for comparison in held_out], device=scores.device)
    accuracy, loss = is_correct(scores, best).float().mean(), best_of_k_loss(scores, best).mean()
    return {"eval/rm/accuracy": accuracy, "eval/rm/loss": loss}


def normalise(scores):
    """`gain_and_bias` of the scores of sampled responses [N], as floats. It says what the scores were."""
    gain, bias = (x.item() for x in gain_and_bias(scores))
    if not math.isfinite(gain):
        console.fail(f"--normalization gain_bias: the {len(scores)} sampled responses all score {scores[0].item():.4g}")
    console.say(f"mean {scores.mean():.3f} and std {scores.std(correction=0):.3f} of {len(scores)} samples -> 0 and 1")
    return gain, bias


# ---- the loop --------------------------------------------------------------------------------------------------------
def check(args):
    """Ends the program where arguments contradict each other."""
    cli.check(args)
    comparisons.check(args)
    if args.batch_size % console.world_size():
        console.fail(f"--batch_size {args.batch_size}: not divisible by the {console.world_size()} processes")


def main(args: Args):
    """Trains; returns {"before" and "after": held-out metrics at the end, "metrics": the last row, "run": folder}."""
    check(args)
    # One process, DDP, FSDP2 or DeepSpeed. It trains missing toy stages, and seeds before the head is drawn. [RM-2]
    accelerator = engines.start(args)
    device, world, rank = accelerator.device, accelerator.num_processes, accelerator.process_index
    B, size = args.batch_size, args.micro_batch_size

    # ---- model, comparisons, optimiser
    tokenizer, reward = load_model(args, device)
    engines.use_one_thread(reward)  # before the candidates are sampled, which may take longer than training
    train, held_out = comparisons.load(args, tokenizer, reward, candidates.of_toy(args, accelerator, tokenizer))
    references = comparisons.load_references(args, tokenizer, reward, train)
    if len(train) < B:
        console.fail(f"--batch_size {B}: more than the {len(train)} rows of --dataset {args.dataset}")
    K = len(train[0].candidates)
    steps_per_epoch = len(train) // B  # The rest of an epoch's shuffle is left out, other rows in each epoch.
    num_steps = args.num_train_epochs * steps_per_epoch
    if args.normalization == "gain_bias":
        samples = samples_to_normalise(args, accelerator, tokenizer, train, candidates.BEFORE)
        # Their scores get std 1 before training, so that the loss starts from scores neither huge nor tiny. [RM-9]
        reward.gain.data.fill_(normalise(score_rows(reward, samples, size * K, accelerator))[0])
    model = reward.model
    optimizer = utils.adamw(model, args.learning_rate, args.adam_eps, args.weight_decay)
    optimizer.add_param_group({"params": [reward.gain], "weight_decay": 0.0})
    run = Run(args, accelerator, tokenizer, num_steps, train, [held_out, references, model])
    reward, optimizer = engines.prepare(args, accelerator, reward, optimizer)
    run.resume(reward, optimizer)

    for step in range(run.first_update, num_steps + 1):
        lr = utils.learning_rate_at(step, num_steps, args.learning_rate, args.lr_schedule, args.warmup_ratio)
        for group in optimizer.param_groups:
            group["lr"] = lr
            if args.tf_adam:
                # TensorFlow adds eps before it corrects the second moment's bias, which at first
                # makes it 32 times as large. [OPT-3]
                group["eps"] = args.adam_eps / math.sqrt(1 - 0.999**step)

        # ---- 1. Minibatch --------------------------------------------------------------------------------------------
        epoch, place = divmod(step - 1, steps_per_epoch)
        order = utils.permutation(len(train), args.seed, epoch)  # Each epoch has its own order.
        minibatch = [train[i] for i in order[place * B : (place + 1) * B]]
        # All processes have the same order, so every world-th comparison makes disjoint shares. [RM-14]
        mine = minibatch[rank::world]

        # ---- 2. Optimise ---------------------------------------------------------------------------------------------
        reward.train()  # Gradient checkpointing needs it.
        means = utils.Means(device)
        micro_batches = [mine[m] for m in utils.slices(len(mine), size)]
        for micro_batch in engines.accumulate(accelerator, reward, micro_batches):
            tokens, mask = utils.left_pad([row for c in micro_batch for row in c.candidates], device)  # [M * K, L]
            best = torch.tensor([comparison.best for comparison in micro_batch], device=device)  # [M]
            scores = reward(tokens, mask).reshape(-1, K)  # [M, K]
            losses = best_of_k_loss(scores, best)  # [M]
            # Dividing by the whole minibatch's count makes micro-batches add up to its gradient. [OPT-5]
            loss = losses.sum() / B
            accelerator.backward(loss * world)  # The engines average over processes. [OPT-6]
            means.add({"train/rm/loss": losses, "train/rm/accuracy": is_correct(scores, best)})
        norm = engines.clip_and_step(accelerator, reward, optimizer, args.max_grad_norm, run)
        run.lap("optimise")

        # ---- 3. Log --------------------------------------------------------------------------------------------------
        metrics = means.reduce(accelerator)
        metrics |= {"epoch": step / steps_per_epoch, "train/rm/lr": lr, "policy/grad_norm": norm}
        if run.is_eval_due(step):
            metrics |= evaluate(reward, held_out, size * K, accelerator)
        run.log(step, metrics)
        run.checkpoint_if_due(step, reward, optimizer)

    # ---- normalise: the saved model's score is gain * score + bias ---------------------------------------------------
    gain, bias = 1.0, 0.0
    if args.normalization == "gain_bias":
        samples = samples_to_normalise(args, accelerator, tokenizer, train, candidates.AFTER)
        # Training has moved the scores. kl_coef is a price in points of score, so set them again. [RM-10]
        gain, bias = normalise(score_rows(reward, samples, size * K, accelerator))
    if args.normalization == "mean_shift":
        # A candidate scores 0 in the mean, or with --reference_dataset, as in N+, a reference response. [RM-12]
        bias = -score_rows(reward, references, size * K, accelerator).mean().item()
        which = "reference responses" if args.reference_dataset else "candidates"
        console.say(f"mean score {-bias:.3f} on {len(references)} {which} -> 0")
    weights = run.full_weights(reward)
    if accelerator.is_main_process:
        # The head takes the gain, because other libraries know none. [RM-13]
        weights["model.score.weight"] = weights["model.score.weight"] * weights["gain"] * gain
        model.config.reward_bias = bias
        # Other programs read a text as the saved folder says: with EOS at its end, and with no sigmoid of the score.
        model.config.problem_type = "regression"
        if comparisons.end_with_eos(train, tokenizer):
            models.append_eos(tokenizer)
    return run.finish(reward, weights)


if __name__ == "__main__":
    cli.main(main, Args)
