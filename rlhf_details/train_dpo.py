"""
DPO: a policy trained on comparisons alone, without a reward model and without sampling (arXiv 2305.18290).

1. The score of a response is beta * (its log-prob under the policy - that under the initial policy). The policy that is
   best for a reward, at the price beta for the KL, has exactly this reward, up to a constant of the prompt.
2. So the loss is the reward model's: cross-entropy of the K scores against the best one. K = 2 is the paper's loss,
   -log sigmoid(chosen - rejected). Only the scores differ from train_reward.py, and that is the lesson.
3. A log-prob is the sum over the completion's tokens, EOS among them. The prompt's tokens have none.
4. The initial policy's log-probs are computed once, before training. No second model stays in memory.
5. `--label_smoothing` takes some labels for wrong (cDPO). `--loss ipo` asks for a margin, not for as much as possible.

Left out on purpose: a reference model other than the initial policy, other f-divergences, several losses at once, and
packed candidates (train_rloo.py has packed rows).

A tag such as [DPO-1] marks an implementation detail: benchmark/checks/details.md has its source, test and effect.

Shapes    B: comparisons of a minibatch   K: candidates of one   M: comparisons of a micro-batch   H: hidden size
          L: tokens of a row, left-padded   C: columns that are read   N: rows or comparisons   V: vocabulary
Masks     True marks a real token. Nothing is found by looking for a pad token.

One process:   python rlhf_details/train_dpo.py
N processes:   accelerate launch --num_processes N rlhf_details/train_dpo.py
Your data:     python rlhf_details/train_dpo.py --dataset rows.jsonl --sft_model_path gpt2
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from rlhf_details import utils
from rlhf_details.plumbing import console
from rlhf_details.plumbing.inputs import cli, comparisons, data, flags, models
from rlhf_details.plumbing.machine import candidates, engines
from rlhf_details.plumbing.outputs.run import Run


@dataclass
class Args(flags.RunArgs):  # inherits the shared flags
    exp_name: str = "train_dpo"
    output_dir: str = "models/dpo"

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
    """the policy that training starts from and is compared with (required unless --dataset is toy)"""

    # algorithm
    beta: float = 0.05
    """price of the KL (sigmoid), or the inverse of twice the margin that is asked for (ipo)"""
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """the loss of DPO, or that of IPO, whose log-probs are means over tokens"""
    label_smoothing: float = 0.0
    """sigmoid: the share of labels that are taken for wrong (cDPO)"""
    num_train_epochs: int = 1
    """passes over the comparisons"""
    batch_size: int = 64
    """comparisons per optimiser step, over all processes (B)"""

    # sampling, for the embedded task's comparisons
    response_length: int = 53
    """most tokens a sampled response may have"""
    temperature: float = 0.7
    """sampling temperature; the loss is always that of temperature 1"""

    # optimiser
    learning_rate: float = 1e-5
    """peak learning rate of AdamW"""
    lr_schedule: Literal["linear", "cosine", "constant"] = "cosine"
    """learning-rate schedule over the steps"""
    warmup_ratio: float = 0.0
    """share of the steps over which the learning rate rises linearly"""
    adam_eps: float = 1e-5
    """AdamW's epsilon"""
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
        output_dir="models/toy/dpo",
        beta=0.5,
        batch_size=16,
        response_length=36,
        temperature=1.0,
        learning_rate=1e-3,
        warmup_ratio=0.05,
        max_grad_norm=1.0,
        micro_batch_size=128,
    ),
    20e6: dict(
        beta=0.3,
        num_train_epochs=2,
        batch_size=16,
        learning_rate=3e-4,
        max_grad_norm=1.0,
        micro_batch_size=32,
    ),
    500e6: {},  # the defaults above
    math.inf: dict(learning_rate=3e-6),
}


# ---- model: what is trained runs inside `forward`, so that DDP, FSDP and DeepSpeed see all parameters ----------------
class Policy(nn.Module):
    """Log-probs of given tokens, as fp32 numbers."""

    logits_at_once = 2**24  # at most so many exist at a time: 64 MiB in fp32

    def __init__(self, model):
        super().__init__()
        self.model, self.head = model, models.lm_head(model)

    def forward(self, tokens, mask, positions, index, labels):
        """
        Args: tokens, positions [N, L]; mask [N, L] bool; index [C], the columns whose logits are read; labels [N, C],
        the tokens that these predict. Returns: log-probs [N, C] fp32.
        """
        hidden = models.hidden_states(self.model, tokens, mask, positions)[:, index]  # [N, C, H]
        logprobs, _ = utils.token_logprobs(self.logits, hidden, labels, self.logits_at_once // self.head.vocab_size)
        return logprobs

    def logits(self, hidden):
        """Logits [.., V] fp32 of last hidden states [.., H]."""
        return self.head(hidden).float()


def load_model(args, device):
    """Returns (tokenizer, policy), in fp32 and without dropout."""
    tokenizer = models.load_tokenizer(args.sft_model_path, "--sft_model_path", args)
    model = utils.disable_dropout(models.load_policy(args.sft_model_path, "--sft_model_path", args))
    model = models.add_adapters(model, args.lora_rank)
    return tokenizer, Policy(model).to(device)


# ---- from token ids to log-probs -------------------------------------------------------------------------------------
def completion_logprobs(policy, rows, device):
    """Log-probs [N] fp32 of completions, and their lengths [N].

    Args: rows, N pairs (tokens of prompt and completion, how many are the completion's), of `candidate_rows`.
    """
    tokens, mask = utils.left_pad([ids for ids, _ in rows], device)  # [N, L]
    lengths = torch.tensor([length for _, length in rows], device=device)  # [N]
    L = tokens.size(1)
    width = min(max(length for _, length in rows), L - 1)  # of the columns that hold completions, C
    # The column before a token predicts it, EOS among them. Nothing predicts a first token. [SFT-2]
    index = torch.arange(L - width - 1, L - 1, device=device)  # [C]
    # All rows end in the last column, so a completion's tokens are counted from the right.
    is_target = mask[:, index] & (torch.arange(width, 0, -1, device=device) <= lengths.unsqueeze(1))  # [N, C]
    logprobs = policy(tokens, mask, utils.positions_from_mask(mask), index, labels=tokens[:, index + 1])  # [N, C]
    # A sum over the tokens, because the score is that of the whole response. [DPO-1]
    return (logprobs * is_target).sum(1), lengths


def candidate_rows(comparison):
    """The candidates of a comparison, each (its tokens with the prompt's, how many of its own are predicted)."""
    # Behind an empty prompt nothing predicts the first token.
    return [(ids, min(len(ids) - len(comparison.ids), len(ids) - 1)) for ids in comparison.candidates]


@torch.no_grad()
def candidate_logprobs(policy, part, size, accelerator):
    """Log-probs [N, K] fp32 of the candidates of N comparisons. Call it on every process; each takes a share."""
    policy.eval()
    # The shares are filled up, so that all processes have as many comparisons.
    _, share = data.my_share(part, accelerator)
    mine = [candidate_rows(comparison) for comparison in share]
    slices = [[row for rows in mine[m] for row in rows] for m in utils.slices(len(mine), size)]
    with accelerator.autocast():
        parts = console.progress("log-probs, slice by slice", slices)
        found = torch.cat([completion_logprobs(policy, rows, accelerator.device)[0] for rows in parts])
    return accelerator.gather(found.reshape(len(mine), -1))[: len(part)]


# ---- equations -------------------------------------------------------------------------------------------------------
def dpo_loss(scores, best, label_smoothing=0.0):
    """Cross-entropy of K scores against the best candidate. For K = 2 it is -log sigmoid(chosen - rejected).

    Label smoothing gives the others a share of the label: for K = 2, -(1 - e) log sigmoid(d) - e log sigmoid(-d).
    Args: scores [M, K], beta * log-ratios; best [M] int64. Returns: [M].
    Source: arXiv 2305.18290, equation 7, and for K > 2 the first place of the ranking in its appendix A.3; cDPO,
    ericmitchell.ai/cdpo.pdf, equation 3; N+'s dpo.py.
    """
    target = torch.full_like(scores, label_smoothing / (scores.size(1) - 1))
    target = target.scatter(1, best.unsqueeze(1), 1 - label_smoothing)
    # The normaliser of the policy that is best for a reward depends on the prompt alone, so it cancels. [DPO-2]
    return -(target * scores.log_softmax(1)).sum(1)


def ipo_loss(logratios, lengths, best, beta):
    """(d - 1 / (2 beta))^2, with d the difference of mean log-ratios a token, averaged over the K - 1 others.

    Args: logratios, lengths [M, K]; best [M] int64. Returns: [M].
    Source: arXiv 2310.12036, equation 17. The means are TRL 1.16's (dpo_trainer.py); N+'s dpo.py takes sums.
    """
    means = logratios / lengths.clamp(min=1)
    margins = means.gather(1, best.unsqueeze(1)) - means  # [M, K], 0 at the best one
    # The margin has a goal, so labels that all agree do not push it on for ever. [DPO-3]
    losses = (margins - 1 / (2 * beta)) ** 2
    return losses.scatter(1, best.unsqueeze(1), 0).sum(1) / (means.size(1) - 1)


def is_correct(scores, best):
    """Whether the best candidate's score is strictly the highest, [M] bool. Args: scores [M, K]; best [M] int64."""
    best = best.unsqueeze(1)  # [M, 1]
    others = scores.scatter(1, best, -math.inf)
    # A tie is wrong, so that a constant model has an accuracy of 0. [RM-8]
    return scores.gather(1, best).squeeze(1) > others.amax(1)


def losses_and_metrics(logprobs, ref_logprobs, lengths, best, args):
    """The losses [M], and {metric: [M]} by TRL's names. "rejected" is the mean of all candidates but the best.

    Args: logprobs, ref_logprobs, lengths [M, K]; best [M] int64.
    """
    logratios = logprobs - ref_logprobs
    scores, others = args.beta * logratios, logratios.size(1) - 1
    is_ipo = args.loss == "ipo"
    losses = ipo_loss(logratios, lengths, best, args.beta) if is_ipo else dpo_loss(scores, best, args.label_smoothing)
    found = {}
    for name, x in (("rewards", scores.detach()), ("logps", logprobs.detach())):
        found[f"{name}/chosen"] = chosen = x.gather(1, best.unsqueeze(1)).squeeze(1)
        found[f"{name}/rejected"] = (x.sum(1) - chosen) / others
    found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
    return losses, {"rewards/accuracies": is_correct(scores, best).float()} | found


# ---- held-out evaluation ---------------------------------------------------------------------------------------------
def evaluate(policy, held_out, references, size, args, accelerator):
    """{"eval/..": mean over the held-out comparisons}; call it on every process."""
    if not held_out:
        return {}
    logprobs = candidate_logprobs(policy, held_out, size, accelerator)  # [N, K]
    best = torch.tensor([comparison.best for comparison in held_out], device=logprobs.device)
    lengths = torch.tensor([[n for _, n in candidate_rows(c)] for c in held_out], device=logprobs.device)  # [N, K]
    losses, metrics = losses_and_metrics(logprobs, references, lengths, best, args)
    return {f"eval/{name}": x.mean() for name, x in ({"dpo/loss": losses} | metrics).items()}


# ---- the loop --------------------------------------------------------------------------------------------------------
def check(args):
    """Ends the program where arguments contradict each other."""
    cli.check(args)
    comparisons.check(args)
    if args.batch_size % console.world_size():
        console.fail(f"--batch_size {args.batch_size}: not divisible by the {console.world_size()} processes")
    if args.beta == 0 or args.label_smoothing >= 0.5:
        console.fail(f"--beta {args.beta}, --label_smoothing {args.label_smoothing}: above 0, and below 0.5")
    if args.label_smoothing and args.loss == "ipo":
        console.fail(f"--label_smoothing {args.label_smoothing}: IPO has none")


def main(args: Args):
    """Trains; returns {"before" and "after": held-out metrics at the end, "metrics": the last row, "run": folder}."""
    check(args)
    accelerator = engines.start(args)  # for one process, DDP, FSDP2 or DeepSpeed
    device, world, rank = accelerator.device, accelerator.num_processes, accelerator.process_index
    B, size = args.batch_size, args.micro_batch_size

    # ---- model, comparisons, optimiser
    tokenizer, policy = load_model(args, engines.loading_device(accelerator))
    engines.use_one_thread(policy)  # before the candidates are sampled, which may take longer than training
    train, held_out = comparisons.load(args, tokenizer, policy, candidates.of_toy(args, accelerator, tokenizer))
    if len(train) < B:
        console.fail(f"--batch_size {B}: more than the {len(train)} rows of --dataset {args.dataset}")
    steps_per_epoch = len(train) // B  # The rest of an epoch's shuffle is left out, other rows in each epoch.
    num_steps = args.num_train_epochs * steps_per_epoch
    optimizer = utils.adamw(policy, args.learning_rate, args.adam_eps, args.weight_decay)
    run = Run(args, accelerator, tokenizer, num_steps, train, [held_out, policy])
    policy, optimizer = engines.prepare(args, accelerator, policy, optimizer)
    # Before a step, and before a checkpoint is loaded, the policy is the reference. One forward of all the data now,
    # 4 bytes a candidate from now on, and no copy of the model. [DPO-4]
    references = candidate_logprobs(policy, train, size, accelerator)  # [len(train), K]
    held_out_references = candidate_logprobs(policy, held_out, size, accelerator) if held_out else None
    run.resume(policy, optimizer)

    for step in range(run.first_update, num_steps + 1):
        lr = utils.learning_rate_at(step, num_steps, args.learning_rate, args.lr_schedule, args.warmup_ratio)
        optimizer.param_groups[0]["lr"] = lr

        # ---- 1. Minibatch --------------------------------------------------------------------------------------------
        epoch, place = divmod(step - 1, steps_per_epoch)
        order = utils.permutation(len(train), args.seed, epoch)  # Each epoch has its own order.
        # All processes have the same order, so every world-th comparison makes disjoint shares. [RM-14]
        mine = order[place * B : (place + 1) * B][rank::world]

        # ---- 2. Optimise ---------------------------------------------------------------------------------------------
        policy.train()  # Gradient checkpointing needs it.
        means = utils.Means(device)
        micro_batches = [list(mine[m]) for m in utils.slices(len(mine), size)]
        for m in engines.accumulate(accelerator, policy, micro_batches):
            best = torch.tensor([train[j].best for j in m], device=device)  # [M]
            rows = [row for j in m for row in candidate_rows(train[j])]
            logprobs, lengths = (x.reshape(len(m), -1) for x in completion_logprobs(policy, rows, device))  # [M, K]
            losses, metrics = losses_and_metrics(logprobs, references[m], lengths, best, args)
            # Dividing by the whole minibatch's count makes micro-batches add up to its gradient. [OPT-5]
            loss = losses.sum() / B
            accelerator.backward(loss * world)  # The engines average over processes. [OPT-6]
            # At the first step all scores are 0, and rounding alone decides what counts as right.
            means.add({"train/dpo/loss": losses} | metrics)
        norm = engines.clip_and_step(accelerator, policy, optimizer, args.max_grad_norm, run)
        run.lap("optimise")

        # ---- 3. Log --------------------------------------------------------------------------------------------------
        metrics = means.reduce(accelerator)
        metrics |= {"epoch": step / steps_per_epoch, "train/dpo/lr": lr, "policy/grad_norm": norm}
        if run.is_eval_due(step):
            metrics |= evaluate(policy, held_out, held_out_references, size, args, accelerator)
        run.log(step, metrics)
        run.checkpoint_if_due(step, policy, optimizer)
    return run.finish(policy)


if __name__ == "__main__":
    cli.main(main, Args)
