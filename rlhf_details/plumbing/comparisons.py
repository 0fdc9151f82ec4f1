"""
Comparisons, the rows that train_reward.py and train_dpo.py train on: a prompt, K candidates, and which of them a human
found the best.

They are read from `prompt`, `chosen`, `rejected`; from `prompt`, `candidates`, `best`; from the token ids of
lm-human-preferences (`query`, `sample0` .., `best`) and of N+ (`query_token`, `chosen_token`, `rejected_token`).
Those of the embedded task are made up: the SFT policy writes the candidates, and an imaginary human chooses.
"""

import re

from torch import nn

from rlhf_details import toy, utils
from rlhf_details.plumbing import cli, data, engines, models
from rlhf_details.plumbing.chat import RowError, is_messages

# What responses are sampled for, a coordinate of their noise; utils.TRAINING and EVALUATION are those of comparisons.
BEFORE, AFTER = 2, 3
LABEL_PAD = 50259  # fills up the rows of lm-human-preferences; it is no id of GPT-2, whose vocabulary has 50257 tokens


def check(args):
    """Exits with an error if the data flags contradict each other."""
    for flag in ("dataset", "eval_dataset"):
        name = (getattr(args, flag) or "").partition(":")[0]
        if name in toy.TASKS and name != "toy":
            cli.fail(f"--{flag} {getattr(args, flag)}: has no comparisons; its reward is a function")
    for flag in ("take", "prompt_template", "max_prompt_length"):
        if getattr(args, flag) is not None and args.dataset.partition(":")[0] == "toy":
            hint = "not for the embedded task, whose comparisons are sampled; --num_comparisons"
            cli.fail(f"--{flag} {getattr(args, flag)}: {hint}")


def load(args, tokenizer, model, accelerator):
    """(Comparisons of --dataset, those of --eval_dataset or none), both as data.Prompts.

    Args: model, the page's module, whose `model` limits tokens and context.
    """

    def load_one(flag, num, purpose):
        name, _, split = getattr(args, flag).partition(":")
        if name == "toy":
            engines.use_one_thread(model)  # before it samples, which may take longer than training
            asked = f"the SFT policy answers {num:,} prompts four times, and an imaginary human chooses"
            cli.say(f"--{flag} {getattr(args, flag)}: {asked}")

            policy, key = load_sampled(args, accelerator), (args.seed, utils.REWARD_DATA, purpose)
            with accelerator.autocast():
                rows = toy.comparisons(split or "train", num, policy, tokenizer, key, args.response_length, progress)
        else:
            rows = with_candidates(data.read_rows(args, flag, ""), args, flag)
        return data.encode(args, flag, rows, tokenizer, models.context(model), "candidates")

    train = load_one("dataset", args.num_comparisons, utils.TRAINING)
    held_out = load_one("eval_dataset", 512, utils.EVALUATION) if args.eval_dataset else data.Prompts()
    K, eval_K = (len(rows[0].answers) for rows in (train, held_out or train))
    if eval_K != K:
        cli.fail(f"--eval_dataset {args.eval_dataset}: {eval_K} candidates a row, but {K} in --dataset {args.dataset}")
    return train, held_out


def load_references(args, tokenizer, reward, train):
    """Lists of token ids whose mean score "mean_shift" sets to 0: the rows of --reference_dataset, each a prompt with
    its completion, or else the training candidates. Exits with an error if "gain_bias" cannot sample from prompts.
    """
    context = models.context(reward)
    if args.normalization == "gain_bias":
        engines.use_one_thread(reward)
        first = train[: 2 * args.normalize_samples]
        if empty := [row.number for row in first if not row.ids]:
            cli.fail(f"--dataset {args.dataset}: the prompt of row {empty[0]} is empty, and gain_bias samples from it")
        problem = f"--response_length {args.response_length} leaves no more for a prompt (--normalization gain_bias)"
        room = context - args.response_length
        data.fitting(first, "prompt", room, f"{problem}; --max_prompt_length drops such rows")
    flag = "reference_dataset"
    rows = data.read(args, flag, "sft", with_answers=True)
    references = data.encode(args, flag, rows, tokenizer, context, "completion") if rows else train
    return [ids for row in references for ids in row.candidates]


def are_token_ids(rows):
    """Whether rows hold token ids that are trained on as they are, without EOS: the labels of lm-human-preferences."""
    prompt = rows[0].columns["prompt"]
    return type(prompt) is list and not is_messages(prompt)


def end_with_eos(rows, tokenizer):
    """Whether a text must be given EOS to be read as these rows are. A chat template writes its own end of a turn."""
    first = rows[0]
    return not is_messages(first.columns["prompt"]) and first.answers[0][-1:] == [tokenizer.eos_token_id]


# ---- responses: candidates of the embedded task, and those on which a reward model's scores are normalised -----------
class NextToken(nn.Module):
    """What `utils.sample` calls: next-token logits of a causal model's softmax(logits / temperature), in fp32."""

    def __init__(self, model, temperature):
        super().__init__()
        self.model, self.temperature, self.head = model, temperature, models.lm_head(model)

    def forward(self, tokens, mask, positions, index, cache):
        """Args: tokens, mask, positions [N, L]; index [C], columns to read. Returns: logits / temperature [N, C, V]."""
        hidden = models.hidden_states(self.model, tokens, mask, positions, cache)[:, index]  # [N, C, H]
        return self.head(hidden).float() / self.temperature


def load_sampled(args, accelerator):
    """The policy at --sft_model_path, to sample from."""
    model = utils.disable_dropout(models.load_policy(args.sft_model_path, "--sft_model_path", args))
    return NextToken(model, args.temperature).to(accelerator.device).eval()


def progress(slices):
    """The slices, and where they take long, how far it is."""
    return cli.progress("sampling responses, slice by slice", slices)


def sample_responses(args, accelerator, prompts, purpose, stop_ids):
    """A response of the policy at --sft_model_path to each prompt; every process samples all of them.

    Args: prompts, lists of token ids; purpose, e.g. BEFORE, so that the noise differs; stop_ids [S].
    Returns: a list of token ids for each.
    """
    policy, key = load_sampled(args, accelerator), (args.seed, utils.REWARD_DATA, purpose)
    with accelerator.autocast():
        return utils.sample_rows(policy, prompts, 1, args.response_length, stop_ids, key, progress)


# ---- rows -> prompt, candidates, best --------------------------------------------------------------------------------
def with_candidates(rows, args, flag):
    """The rows of any form, each with its `prompt`, its `candidates` and the number from 0 of the `best` of them.

    Source of the labels' form: lm-human-preferences, label_types.py (PickBest) and language/encodings.py (padding).
    """
    first, columns = rows[0], set().union(*rows)
    labels = sorted(name for name in first if re.fullmatch(r"sample\d", name))
    names = labels or [name for name in ("chosen_token", "rejected_token") if name in first] or ["chosen", "rejected"]
    is_listed = "candidates" in first

    def cells_of(row):
        if not is_listed:
            return {name: row.get(name) for name in names}
        found = row.get("candidates")
        return {f"candidates[{k}]": x for k, x in enumerate(found if isinstance(found, list) else ())}

    K = len(cells_of(first))

    def complete(row):
        row = data.with_prompt(row | ({"prompt": row.get("query")} if labels else {}), args, columns)
        cells, best = cells_of(row), row.get("best") if labels or is_listed else 0
        if len(cells) != K or K < 2:
            raise RowError(f"column 'candidates': must hold {max(2, K)} strings, in every row alike")
        if best not in range(K):
            raise RowError(f"column 'best': {best!r} is no index of its candidates")
        prompt, candidates = row["prompt"], [data.after(row["prompt"], data.value_of(cells, name)) for name in cells]
        if labels:  # Padding is dropped wherever it stands, because it is no token of the model. [DATA-4]
            prompt, *candidates = ([i for i in ids if i != LABEL_PAD] for ids in (prompt, *candidates))
        return row | {"prompt": prompt, "candidates": candidates, "best": best}

    return data.of_each(complete, rows, args, flag)
