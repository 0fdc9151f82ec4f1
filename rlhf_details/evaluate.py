"""
Evaluation of a policy: its samples, what they score, how far they are from a reference, and how often they win.

1. The policy gives one response to each prompt, sampled as it was trained: temperature, length and the tokens that end
   a response come from its folder's training_args.json, unless a flag says otherwise.
2. The opponent is another policy, sampled with the same settings and the same noise, or the rows' `completion`. So a
   policy against itself ties everywhere.
3. Scores are the reward model's own. Nothing is taken off where a response did not end.
4. Win rate = (won + tied / 2) / pairs. The reward model, the embedded task's true reward or a language model says who
   wins. The language model reads the two in a random order, and an answer that names neither is no win.
5. KL(policy || reference) is the mean over responses of sum_t (log p - log p_ref). It is unbiased only for responses
   drawn from p, so the KL has samples of its own, drawn at `kl_temperature`. Their noise is that of the training
   scripts' held-out evaluation: with the training's settings, seed and prompts it is that evaluation's KL.
6. Rates have Wilson's 95% interval, which is too wide where there are many ties, and means have +- 1.96 standard
   errors. Both are over prompts: they say nothing of the luck of the seed that the policy was trained with.

Left out on purpose: ties from the language model, and a prompt of the user's own for it.

Shapes    N: prompts, of which each process has its share   Q: prompt tokens, left-padded   V: vocabulary   F: rewards
          R: response tokens, right-padded   M: rows of a forward   L: columns of a row
Masks     True marks a real token. Masks travel with the tokens, and nothing is ever found by looking for a pad token.

One process:   python rlhf_details/evaluate.py
N processes:   accelerate launch --num_processes N rlhf_details/evaluate.py
"""

import math
import time
from dataclasses import dataclass
from typing import Literal

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn

from rlhf_details import utils
from rlhf_details.plumbing import cli, data, evaluation, judge, models, report, rewards
from rlhf_details.utils import EVALUATION, in_slices


@dataclass
class Args:
    # run
    exp_name: str = "evaluate"
    """name of the evaluation, the title of its table"""
    seed: int = 1
    """seed of the samples and of the order in which the judge reads a pair"""
    config: str | None = None
    """TOML file with defaults for these flags; the command line wins"""
    output_dir: str = "runs/evaluate__{policy}"
    """folder of summary.json, samples.csv and judge_cache.jsonl; {policy} stands for policy_path, with _ for /"""
    overwrite: bool = False
    """replace the results of other arguments; the judge's answers are kept"""

    # data and models: all models share the policy's vocabulary
    dataset: str = "toy"
    """prompts: "toy" (its test split), a .jsonl/.json/.csv/.parquet file, a folder or a Hub data set, with :PART"""
    num_examples: int | None = None
    """use only the first so many prompts; None: all"""
    prompt_template: str | None = None
    """the prompt with the row's columns in their places: "Question: {question}\\nAnswer:"; "messages": the messages,
    also beside a column `prompt`; None: column `prompt`, or else the messages"""
    max_prompt_length: int | None = None
    """drop rows whose prompt has more tokens than this; the number of dropped rows is printed"""
    policy_path: str | None = None
    """the policy that is evaluated, a folder or a Hub model"""
    opponent_path: str | None = None
    """the policy it is compared with; None: the rows' `completion`, where a judge needs an opponent"""
    ref_model_path: str | None = None
    """the policy to which the KL is measured; None: no KL"""
    reward_model_path: str | None = None
    """reward model, a sequence-classification model with one label; None: no scores"""
    allow_untrained_reward_model: bool = False
    """accept a reward model without a trained head; the head is drawn at random (dummy runs)"""
    reward_fn: tuple[str, ...] = ()
    """functions f(prompts, completions, **columns) -> rewards, FILE.py:function or package.module:function"""
    trust_remote_code: bool = False
    """run the Python code that comes with a model; only for models whose authors you trust"""

    # sampling; None: as the policy was trained, or else what FALLBACKS says
    response_length: int | None = None
    """most tokens a response may have (R); None: as the policy was trained, or 53"""
    temperature: float | None = None
    """sampling temperature of the responses that are scored and compared; None: as the policy was trained, or 1"""
    kl_temperature: float | None = None
    """temperature of both policies in the KL; None: as the policy was trained, or 1"""
    stop_token: str | None = None
    """a response ends with this token: "eos", "none", or a text; None: as the policy was trained, or eos"""
    truncate_token: str | None = None
    """a response is read up to this token: "eos", "none" (all of it), or a text; None: as trained, or none"""
    truncate_after: int | None = None
    """tokens before this place of the response (from 0) do not truncate it; None: as the policy was trained, or 0"""

    # judging
    judge: Literal["none", "reward_model", "gold", "llm"] = "none"
    """who says which response of a pair is better; gold: the embedded task's true reward, llm: a language model"""
    judge_model: str | None = None
    """name of the language model, as its server knows it"""
    judge_base_url: str | None = None
    """OpenAI-compatible endpoint, e.g. http://localhost:8000/v1; None: OpenAI's. The key is $OPENAI_API_KEY"""

    # memory and speed: never changes the result
    rollout_micro_batch_size: int = 64
    """responses that a device samples or scores at once"""
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] | None = None
    """attention kernel; None: the library's choice for the model"""


COMPARED = 4  # what a sample is drawn for, beside the purposes in utils.py: the responses that are scored and compared
# How a policy is sampled where neither a flag nor its folder says it.
FALLBACKS = dict(temperature=1.0, response_length=53, stop_token="eos", truncate_token="none", truncate_after=0)
FALLBACKS |= {"kl_temperature": 1.0}


# ---- models ----------------------------------------------------------------------------------------------------------
class Policy(nn.Module):
    """Next-token logits, or the log-probs of given tokens, always of softmax(logits / temperature) in fp32."""

    logits_at_once = 2**24  # 64 MiB in fp32

    def __init__(self, model, temperature):
        super().__init__()
        self.model, self.temperature, self.head = model, temperature, models.head_of(model)
        (self.takes_positions,) = models.accepts(model, "position_ids")

    def forward(self, tokens, mask, positions, index, labels=None, cache=None):
        """
        Args: tokens, mask, positions [M, L]; index [N], the columns whose logits are read; labels [M, N], the tokens
        that these predict; cache, a transformers cache, which is extended.
        Returns: log-probs [M, N] fp32, or without labels the logits / T [M, N, V] fp32.
        """
        inputs = {"input_ids": tokens, "attention_mask": mask, "past_key_values": cache, "use_cache": cache is not None}
        inputs |= {"position_ids": positions} if self.takes_positions else {}
        hidden = self.model.base_model(**inputs).last_hidden_state[:, index]  # [M, N, H]
        if labels is None:
            return self.logits(hidden)
        # All logits at once would be M * N * V numbers.
        pieces = [x.flatten(0, 1).split(max(1, self.logits_at_once // self.head.vocab_size)) for x in (hidden, labels)]
        pieces = [self.logits(h).log_softmax(-1).gather(-1, y.unsqueeze(-1)) for h, y in zip(*pieces, strict=True)]
        return torch.cat(pieces).reshape(labels.shape)

    def logits(self, hidden):
        """Tempered logits [.., V] fp32 of last hidden states [.., H]."""
        return self.head(hidden).float() / self.temperature


class Reward(nn.Module):
    """Scores: the head's output at given columns, plus the bias that normalisation left in the configuration."""

    tokenizer = None  # It reads the policy's token ids.

    def __init__(self, model):
        super().__init__()
        self.model = model
        # `reward_bias` is the shift that train_reward.py leaves. Plain loaders ignore it.
        self.bias = getattr(model.config, "reward_bias", 0.0)
        (self.takes_positions,) = models.accepts(model.base_model, "position_ids")

    def forward(self, tokens, mask, positions, index):
        """Args: tokens, mask, positions as Policy's; index [M, n], the columns to read. Returns: scores [M, n] fp32."""
        inputs = {"input_ids": tokens, "attention_mask": mask, "use_cache": False}
        inputs |= {"position_ids": positions} if self.takes_positions else {}
        hidden = self.model.base_model(**inputs).last_hidden_state  # [M, L, H]
        hidden = hidden.gather(1, index.unsqueeze(-1).expand(-1, -1, hidden.size(-1)))  # [M, n, H]
        # The head runs in fp32: between 2 and 4 bf16 scores would lie 1/64 apart.
        with torch.autocast(hidden.device.type, enabled=False):
            return self.model.score(hidden.float()).squeeze(-1) + self.bias


def load_models(args, device):
    """Returns (tokenizer, {path: Policy}, Reward or None), all in fp32. Each folder is loaded once."""
    tokenizer, policies, loaded = models.load_tokenizer(args.policy_path, "--policy_path", args), {}, {}
    for flag in ("policy_path", "opponent_path", "ref_model_path"):
        if path := getattr(args, flag):
            if path not in policies:
                model = models.load_policy(path, f"--{flag}", args).to(device).eval()
                policies[path] = Policy(model, args.temperature)
            loaded[flag] = policies[path].model
    reward_model = None
    if args.reward_model_path:
        torch.manual_seed(args.seed)  # for a head that is drawn at random
        reward_model = Reward(models.load_reward_model(args.reward_model_path, args).to(device).eval())
        loaded["reward_model_path"] = reward_model.model
    evaluation.check_vocabularies(args, tokenizer, loaded)
    return tokenizer, policies, reward_model


# ---- from tokens to log-probs and scores -----------------------------------------------------------------------------
def join(queries, query_mask, responses, response_mask):
    """Rows of a prompt and its response: tokens, mask, positions [M, L], and index [R], the columns that predict it."""
    mask = torch.cat([query_mask, response_mask], 1)  # [M, L]
    # The logits in the column before a token predict it.
    index = torch.arange(responses.size(1), device=mask.device) + queries.size(1) - 1
    return torch.cat([queries, responses], 1), mask, utils.positions_from_mask(mask), index


def response_logprobs(policy, batch):
    """Log-probs [[M, R]] fp32, 0 at padding, of a batch (queries, query_mask, responses, response_mask)."""
    R = batch[2].size(1)
    batch = utils.trim(batch)
    logprobs = policy(*join(*batch), labels=batch[2]) * batch[3]  # [M, width]
    return [nn.functional.pad(logprobs, (0, R - logprobs.size(1)))]


def response_scores(reward_model, batch):
    """Scores [M] fp32: the reward model's output at the last real token of each response."""
    batch = utils.trim(batch)
    tokens, mask, positions, _ = join(*batch)
    # The mask says which token is the last. Pad may equal EOS, so no search for an id can.
    last = batch[0].size(1) + batch[3].sum(1, keepdim=True) - 1  # [M, 1]
    return reward_model(tokens, mask, positions, last).squeeze(1)


def truncate_response(responses, mask, token_id, after):
    """What is read of a response: up to its first `token_id` at place `after` or later, or all of it.

    Args: responses [M, R]; mask [M, R] bool, what was sampled; token_id, or None: all is read and counts as ended.
    Returns: (mask [M, R] of what is read, whether the token was there [M]). Source: lm-human-preferences, lm_tasks.py.
    """
    if token_id is None:
        return mask, mask.any(1)
    # Only real tokens are searched, because the filler, token 0, may be the stop token.
    ends = mask & (responses == token_id)
    ends[:, :after] = False  # A token that stands before this place does not end the response.
    return mask & (ends.cumsum(1) - ends.long() == 0), ends.any(1)  # True where no end stands strictly before


def sample_responses(policy, batch, stop_id, purpose, args):
    """A response to each prompt of a batch: queries, query_mask [M, Q], and the prompts' numbers [M].

    Returns: responses, mask and log-probs, all [M, R].
    """
    sampler_args = 1, args.response_length, stop_id, (args.seed, purpose, 0)
    return in_slices(utils.sample, policy, batch, args.rollout_micro_batch_size, *sampler_args)


# ---- equations -------------------------------------------------------------------------------------------------------
def wilson_interval(wins, n, z=1.96):
    """Wilson's score interval (low, high) of a rate of `wins` (ties may count half) out of n; z = 1.96: 95%.

    Unlike p +- z sqrt(p (1 - p) / n) it stays within [0, 1] and has a width at p = 0 and p = 1.
    Source: E. B. Wilson, 1927.
    """
    p = wins / n
    center, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, (center - half) / (1 + z * z / n)), min(1.0, (center + half) / (1 + z * z / n))


def rate(hits):
    """{"value", "low", "high"}: the mean of numbers in [0, 1], with its Wilson interval."""
    low, high = wilson_interval(sum(hits), len(hits))
    return {"value": sum(hits) / len(hits), "low": low, "high": high}


def average(values):
    """{"value", "low", "high"}: the mean of numbers +- 1.96 standard errors. A single number has no interval."""
    mean = sum(values) / len(values)
    if len(values) == 1:
        return {"value": mean}
    error = math.sqrt(sum((x - mean) ** 2 for x in values) / (len(values) - 1) / len(values))
    return {"value": mean, "low": mean - 1.96 * error, "high": mean + 1.96 * error}


def distinct_n(responses, n):
    """Different n-grams over all n-grams of all responses (lists of token ids), and 0 where there is none.

    It falls as there are more tokens, so compare like with like. Source: Li et al., arXiv 1510.03055.
    """
    ngrams = [tuple(ids[i : i + n]) for ids in responses for i in range(len(ids) - n + 1)]
    return len(set(ngrams)) / max(1, len(ngrams))


def verdict_by_score(score, opponent_score):
    """ "won", "tied" or "lost". Within 1e-4 is a tie, because the same response may score differently by rounding."""
    difference = score - opponent_score
    return "tied" if abs(difference) < 1e-4 else "won" if difference > 0 else "lost"


def win_rate(verdicts):
    """rate() of the verdicts, where a tie is half a win, and how many there are of each."""
    counts = {name: verdicts.count(name) for name in ("won", "tied", "lost", "unparsable")}
    # An answer that cannot be read is a pair that is not won. [EVAL-2]
    return rate([{"won": 1.0, "tied": 0.5}.get(v, 0.0) for v in verdicts]) | {"pairs": len(verdicts)} | counts


def measure(texts, responses, mask, ended, values, score, end_ids):
    """What is known of one side's responses, one by one and on average.

    Args: texts, N strings; responses, mask [N, R]; ended [N] bool or None; values [N, F] of the Scorer `score`;
    end_ids, the tokens that may end a response.
    Returns: ({column: list of N, None where a reward does not apply}, {name: {"value", "low", "high"}}).
    """
    tokens = [response[m].tolist() for response, m in zip(responses, mask, strict=True)]
    columns = {"response": texts, "length": list(map(len, tokens))}  # The length counts the token at the end.
    columns |= {"ended": ended.int().tolist()} if ended is not None else {}
    for name, x in zip(score.names, values.unbind(1), strict=True):
        label = "score" if name == "reward_model" else name if name in score.watched else f"rewards/{name}"
        columns[label] = [None if math.isnan(value) else value for value in x.tolist()]
    given = {label: [x for x in columns[label] if x is not None] for label in columns if label != "response"}
    figures = {label: rate(x) if label in ("ended", "parses") else average(x) for label, x in given.items() if x}
    if verdicts := [x for name in score.boolean for x in given[f"rewards/{name}"]]:
        figures["verifiable_correct_rate"] = rate(verdicts)
    said = [ids[:-1] if set(ids[-1:]) & end_ids else ids for ids in tokens]
    return columns, figures | {f"distinct_{n}": {"value": distinct_n(said, n)} for n in (1, 2, 3)}


# ---- main ------------------------------------------------------------------------------------------------------------
def check(args):
    """Ends with one line (exit code 2) where arguments are wrong or contradict each other."""
    cli.check_numbers(args)
    if args.truncate_after and (args.truncate_token == "none" or args.truncate_after >= args.response_length):
        cli.fail(f"--truncate_after {args.truncate_after}: needs a truncate_token, and must be below response_length")
    rewards.check_functions(args)
    if args.judge == "reward_model" and not args.reward_model_path:
        cli.fail("--judge reward_model: needs --reward_model_path")
    if args.judge == "gold" and args.dataset.partition(":")[0] != "toy":
        cli.fail(f"--judge gold: only the embedded task has a true reward, not --dataset {args.dataset}")
    judge.check(args)
    report.check_folder(args)


@torch.no_grad()
def main(args: Args):
    """Evaluates; returns the contents of summary.json on the main process, None on the others."""
    start = time.time()
    args = evaluation.as_trained(args, FALLBACKS)
    check(args)
    accelerator = Accelerator()
    if accelerator.num_processes != cli.world_size():  # This happens on machines without a GPU.
        cli.fail(f"{cli.world_size()} processes, but accelerate sees one: set ACCELERATE_USE_CPU=true")
    device, size = accelerator.device, args.rollout_micro_batch_size
    use_references = args.judge != "none" and not args.opponent_path

    # ---- prompts, models, rewards
    rows = evaluation.read_rows(args, use_references)
    tokenizer, policies, reward_model = load_models(args, device)
    stop_id = models.token_id(tokenizer, args.stop_token, "--stop_token")
    end_id = models.token_id(tokenizer, args.truncate_token, "--truncate_token")
    end_id = stop_id if end_id is None else end_id  # the token that a complete response ends with
    context = models.context(*policies.values(), reward_model)
    prompts = data.to_prompts(args, tokenizer, rows, "dataset", room=context - args.response_length)
    if use_references:
        references = evaluation.encode_references(args, tokenizer, prompts, context, device)
    score = rewards.Scorer(args, accelerator, tokenizer, reward_model, response_scores, size, end_id)
    score.check_columns(prompts)
    N = len(prompts)
    numbers = data.my_share(N, accelerator)  # [N / world], filled up, so that all processes have as many
    mine = (numbers % N).tolist()
    queries, query_mask = utils.left_pad([prompts[i].ids for i in mine], device)  # [N / world, Q]

    # ---- 1. Responses and scores: the opponent is sampled with the policy's noise ------------------------------------
    sides = {"policy": args.policy_path}
    sides |= {"opponent": args.opponent_path} if args.opponent_path or use_references else {}
    columns, metrics = {}, {}
    for side, path in sides.items():
        with accelerator.autocast():
            if path:
                batch = [queries, query_mask, numbers]
                responses, mask, _ = sample_responses(policies[path], batch, stop_id, COMPARED, args)
                mask, ended = truncate_response(responses, mask, end_id, args.truncate_after)
                texts = models.decode(tokenizer, responses, mask)
            else:  # The references are no samples, so nothing is said of whether they ended.
                texts, responses, mask = [references[0][i] for i in mine], references[1][mine], references[2][mine]
                ended = mask.any(1)
            batch = [queries, query_mask, responses, mask]
            values = score([prompts[i] for i in mine], batch, texts=texts)  # [N / world, F]
        texts = gather_object(texts)[:N]
        responses, mask, ended, values = (x[:N] for x in accelerator.gather((responses, mask, ended, values)))
        ended = ended if path and end_id is not None else None
        end_ids = {end_id, tokenizer.eos_token_id}
        columns[side], metrics[side] = measure(texts, responses, mask, ended, values, score, end_ids)

    # ---- 2. KL: samples of its own, with the noise of the training's held-out evaluation -----------------------------
    if args.ref_model_path:
        pair = (policies[path].model for path in (args.policy_path, args.ref_model_path))
        policy, reference = (Policy(model, args.kl_temperature) for model in pair)
        with accelerator.autocast():
            # The estimate is unbiased only for draws from the policy that it is about. [EVAL-3]
            batch = [queries, query_mask, numbers]
            responses, mask, logprobs = sample_responses(policy, batch, stop_id, EVALUATION, args)
            batch = [queries, query_mask, responses, mask]
            (ref_logprobs,) = in_slices(response_logprobs, reference, batch, size)  # [N / world, R]
        kl = accelerator.gather((logprobs - ref_logprobs).sum(1))[:N]
        metrics["policy"]["kl"] = average(kl.tolist())

    # ---- 3. Verdicts: on the main process, because a judge may take longer than processes wait for each other --------
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if not accelerator.is_main_process:
        return None
    folder, summary = report.open_folder(args, accelerator, N)
    table = {"prompt": [row.text for row in prompts]} | columns["policy"]
    table |= {f"opponent_{name}": column for name, column in columns.get("opponent", {}).items()}
    if args.judge == "llm":
        pairs = list(zip(table["prompt"], table["response"], table["opponent_response"], strict=True))
        table["verdict"], table["judge_answer"] = judge.judge_pairs(args, pairs, folder / "judge_cache.jsonl")
    elif args.judge != "none":
        name = "gold" if args.judge == "gold" else "score"
        pairs = zip(table[name], table[f"opponent_{name}"], strict=True)
        table["verdict"] = [verdict_by_score(*pair) for pair in pairs]
    if args.judge != "none":
        metrics["win_rate"] = win_rate(table["verdict"])

    # ---- 4. Report: samples.csv, summary.json, a table of the figures ------------------------------------------------
    summary |= {"metrics": metrics}
    report.write(folder, summary, table)
    report.show(args, metrics, table)
    cli.say(f"results: {folder}   {time.time() - start:.0f} s")
    return summary


if __name__ == "__main__":
    cli.main(main, Args)
