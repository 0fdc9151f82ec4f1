"""
Evaluation of a policy: its samples, what they score, how far they are from a reference, and how often they win.

1. A policy gives one response to each prompt, sampled as it was trained: temperature, length and the tokens that end
   a response come from its folder's training_args.json, unless a flag says otherwise. So does the environment of
   train_agent.py: then a response is a trajectory, and its length is that of the policy's own tokens.
2. The opponent is another policy, sampled with the same settings and the same noise, or the rows' `completion`. So a
   policy against itself ties everywhere.
3. Each reward stands by itself, under its name in training's metrics, e.g. rewards/reward_model. The `scores` of
   training are another number: the weighted sum of the rewards, less the penalty where a response did not end.
4. Win rate = (won + tied / 2) / pairs. The reward model, the sum of all rewards, the embedded task's true reward or a
   language model says who wins. The last reads the two in a random order, and an answer that names neither is no win.
5. KL(policy || reference) is the mean over responses of sum_t (log p - log p_ref). It is unbiased only for responses
   drawn from p, so the KL has samples of its own, drawn at the training's temperature. Their noise is that of the
   training scripts' held-out evaluation: with the training's settings, seed and prompts it is that evaluation's KL.
6. Rates have Wilson's 95% interval, which is too wide where there are many ties, and means have +- 1.96 standard
   errors. Both are over prompts: they say nothing of the luck of the seed that the policy was trained with.

Left out on purpose: several policies in one run, ties from the language model, and a prompt of the user's own for it.

Shapes    N: prompts, of which each process has its share   Q: prompt tokens, left-padded   V: vocabulary   F: rewards
          R: response tokens, right-padded   M: rows of a forward   L: columns of a row
Masks     True marks a real token. Nothing is found by looking for a pad token.

One process:   python rlhf_details/evaluate.py
N processes:   accelerate launch --num_processes N rlhf_details/evaluate.py
Your data:     python rlhf_details/evaluate.py --dataset rows.jsonl --policy_path models/rloo --reward_fn mine.py:f
"""

import math
import time
from dataclasses import dataclass
from typing import Literal

import torch
from accelerate.utils import gather_object
from torch import nn

from rlhf_details import utils
from rlhf_details.plumbing import console
from rlhf_details.plumbing.inputs import cli, data, flags, models, stop_tokens, token_ids
from rlhf_details.plumbing.machine import engines, environments, judge, rewards, samplers, vllm
from rlhf_details.plumbing.outputs import evaluation
from rlhf_details.plumbing.outputs.statistics import average, rate
from rlhf_details.train_agent import rollout
from rlhf_details.utils import EVALUATION, Batch, in_slices


@dataclass
class Args(flags.RewardArgs):  # rewards and sampler stand in plumbing/inputs/flags.py
    # run
    exp_name: str = "evaluate"
    """name of the evaluation, the title of its table"""
    seed: int = 1
    """seed of the samples and of the order in which the judge reads a pair"""
    config: str | None = None
    """TOML file with defaults for these flags; the command line wins"""
    output_dir: str = "runs/evaluate__{policy}"
    """folder of summary.json and samples.csv; {policy} stands for policy_path, with _ for /"""
    overwrite: bool = False
    """replace the results of other arguments"""

    # data
    dataset: str = "toy:test"
    """prompts: "toy" (its test split), a file, a folder or a Hub data set with :PART, as in the training scripts"""
    num_examples: int | None = None
    """use only the first so many prompts; None: all"""
    prompt_template: str | None = None
    """the prompt with the row's columns in their places: "Question: {question}\\nAnswer:"; None: as the policy was
    trained, or column `prompt`, or else the messages"""
    completion_template: str | None = None
    """the completion that is compared with, made of columns in the same way; None: the column `completion`"""
    chat_template_kwargs: str | None = None
    """JSON of what the chat template is given beside the messages; None: as the policy was trained, or {}"""
    template_date: str | None = None
    """the day that a chat template writes which writes one; None: as the policy was trained, or today"""
    max_prompt_length: int | None = None
    """drop rows whose prompt has more tokens than this; the number of dropped rows is printed"""

    # models: all but the reward model share the policy's vocabulary
    policy_path: str | None = None
    """the policy that is evaluated: a folder, or NAME or NAME@REVISION on the Hub (required unless --dataset is toy,
    toy-sum or toy-tools)"""
    opponent_path: str | None = None
    """the policy it is compared with; None: the rows' `completion`, where a judge needs an opponent"""
    ref_model_path: str | None = None
    """the policy to which the KL is measured; None: no KL"""
    trust_remote_code: bool = False
    """run the Python code that comes with a model; only for models whose authors you trust"""

    # sampling: None means as the policy was trained
    response_length: int | None = None
    """most tokens a response may have (R); None: as the policy was trained, or 53"""
    temperature: float | None = None
    """sampling temperature of the responses that are scored and compared; None: as the policy was trained, or 1"""
    stop_token: str | None = None
    """a response ends with this token: "eos", "none", or a text; None: as the policy was trained, or eos"""
    truncate_token: str | None = None
    """a response is read up to this token: "eos", "none" (all of it), or a text; None: as trained, or none"""
    truncate_after: int | None = None
    """tokens before this place of the response (from 0) do not truncate it; None: as the policy was trained, or 0"""
    env_fn: str | None = None
    """environment of several turns, as in train_agent.py; None: as the policy was trained, or none"""
    tools: tuple[str, ...] | None = None
    """tools that the policy calls, as in train_agent.py; None: as the policy was trained, or none"""
    tool_timeout: float | None = None
    """seconds after which a call of a tool is an error; None: as the policy was trained, or 10"""
    env_role: Literal["user", "tool"] | None = None
    """whose message an observation is; None: as the policy was trained, or user"""
    max_turns: int | None = None
    """most turns of the policy in an episode; None: as the policy was trained, or 8"""
    max_observation_tokens: int | None = None
    """most tokens of an observation; None: as the policy was trained, or no limit of its own"""
    long_observation: Literal["cut", "end"] | None = None
    """a longer observation is cut, or ends the episode; None: as the policy was trained, or cut"""
    samples_per_prompt: int = 1
    """responses to each prompt: with rewards that are True or False, several give pass@k; the rest is of the first"""

    # judging
    judge: Literal["none", "reward_model", "reward_fn", "gold", "llm"] = "none"
    """who says which response of a pair is better; reward_fn: the weighted sum of all rewards, as in training;
    gold: the embedded task's true reward, llm: a language model"""
    judge_model: str | None = None
    """name of the language model, as its server knows it"""
    judge_base_url: str | None = None
    """OpenAI-compatible endpoint, e.g. http://localhost:8000/v1; None: OpenAI's. The key is $OPENAI_API_KEY"""

    # memory and speed: never changes the result
    attn_implementation: Literal["sdpa", "eager"] | None = None
    """attention kernel; None: the library's choice for the model"""


# What an evaluation on an embedded task takes in place of the defaults above, unless a flag or --config says otherwise.
presets = {
    "toy": dict(
        policy_path="models/toy/rloo",
        opponent_path="models/toy/sft",
        ref_model_path="models/toy/sft",
        reward_model_path="models/toy/reward",
        judge="gold",
        rollout_micro_batch_size=256,
    ),
}
presets["toy-sum"] = presets["toy"] | dict(
    policy_path="models/toy-sum/rloo",
    opponent_path="models/toy-sum/sft",
    ref_model_path="models/toy-sum/sft",
    reward_model_path=None,
    reward_fn=("rlhf_details.toy:right_sum",),
    judge="reward_fn",
)
presets["toy-tools"] = dict(
    policy_path="models/toy-tools/agent",
    opponent_path="models/toy-tools/sft",
    ref_model_path="models/toy-tools/sft",
    reward_fn=("rlhf_details.toy:right_code", "rlhf_details.toy:questions"),
    reward_fn_weights=(1.0, -0.05),
    judge="reward_fn",
    rollout_micro_batch_size=512,
)

COMPARED = 4  # what a sample is drawn for, beside the purposes in utils.py: the responses that are scored and compared


# ---- models ----------------------------------------------------------------------------------------------------------
class Policy(nn.Module):
    """Next-token logits, or the log-probs of given tokens, of softmax(logits / temperature), as fp32 numbers."""

    logits_at_once = 2**24  # 64 MiB in fp32

    def __init__(self, model, temperature):
        super().__init__()
        self.model, self.temperature, self.head = model, temperature, models.lm_head(model)

    def forward(self, tokens, mask, positions, index, labels=None, cache=None):
        """
        Args: tokens, mask, positions [M, L]; index [N], the columns whose logits are read; labels [M, N], the tokens
        that these predict; cache, a transformers cache, which is extended.
        Returns: log-probs [M, N] fp32, or without labels the logits / T [M, N, V] fp32.
        """
        hidden = models.hidden_states(self.model, tokens, mask, positions, cache)[:, index]  # [M, N, H]
        if labels is None:
            return self.logits(hidden)
        return utils.token_logprobs(self.logits, hidden, labels, self.logits_at_once // self.head.vocab_size)[0]

    def logits(self, hidden):
        """Tempered logits [.., V] fp32 of last hidden states [.., H]."""
        return self.head(hidden).float() / self.temperature


class Reward(nn.Module):
    """Scores: the head's output at given columns, plus a bias."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        # `reward_bias` is the shift that train_reward.py leaves. Plain loaders ignore it.
        self.bias = getattr(model.config, "reward_bias", 0.0)

    def forward(self, tokens, mask, positions, index):
        """Args: tokens, mask, positions as Policy's; index [M, n], the columns to read. Returns: scores [M, n] fp32."""
        hidden = models.hidden_states(self.model, tokens, mask, positions)  # [M, L, H]
        hidden = hidden.gather(1, index.unsqueeze(-1).expand(-1, -1, hidden.size(-1)))  # [M, n, H]
        # The head runs in fp32: between 2 and 4 bf16 scores would lie 1/64 apart.
        with torch.autocast(hidden.device.type, enabled=False):
            return self.model.score(hidden.float()).squeeze(-1) + self.bias


# ---- from tokens to log-probs and scores -----------------------------------------------------------------------------
def join(batch):
    """Rows of a prompt and its response: tokens, mask, positions [M, L], and index [R], the columns that predict it."""
    tokens = torch.cat([batch.queries, batch.responses], 1)  # [M, L]
    mask = torch.cat([batch.query_mask, batch.response_mask], 1)  # [M, L]
    # The logits in the column before a token predict it.
    index = torch.arange(batch.responses.size(1), device=mask.device) + batch.queries.size(1) - 1
    return tokens, mask, utils.positions_from_mask(mask), index


def response_logprobs(policy, batch):
    """Log-probs [[M, R]] fp32, 0 at padding, of a Batch."""
    R = batch.responses.size(1)
    batch = utils.trim(batch)
    logprobs = policy(*join(batch), labels=batch.responses) * batch.response_mask  # [M, width]
    return [nn.functional.pad(logprobs, (0, R - logprobs.size(1)))]


def response_scores(reward_model, batch):
    """[scores], a list for `in_slices`, [M] fp32: the reward model's output at the last token of each response."""
    batch = utils.trim(batch)
    tokens, mask, positions, _ = join(batch)
    # The mask says which token is the last. Pad may equal EOS, so no search for an id can.
    last = batch.queries.size(1) + batch.response_mask.sum(1, keepdim=True) - 1  # [M, 1]
    return [reward_model(tokens, mask, positions, last).squeeze(1)]


def truncate_response(responses, mask, end_ids, after):
    """What is read of a response: up to its first end at place `after` or later, or all of it.

    Args: responses [M, R]; mask [M, R] bool, what was sampled; end_ids [S]; without any, all is read and ended.
    Returns: (mask [M, R] of what is read, whether an end was there [M]). Source: lm-human-preferences, lm_tasks.py.
    """
    if not len(end_ids):
        return mask, mask.any(1)
    # Only real tokens are searched, because the filler, token 0, may be the stop token.
    ends = mask & torch.isin(responses, end_ids)
    ends[:, :after] = False  # A token that stands before this place does not end the response.
    return mask & (ends.cumsum(1) - ends.long() == 0), ends.any(1)  # True where no end stands strictly before


def respond(policy, sample, env, rows, queries, query_mask, numbers, key, stop_ids, args):
    """A response to each prompt, or with an environment a trajectory.

    Returns: responses, mask, action_mask (what the policy wrote), log-probs, each [M, R], and of trajectories whether
    they ended [M] and what was said in turn, for each a list of texts.
    """
    if env:
        found, said = rollout(policy, sample, env, rows, numbers, key, stop_ids, args)
        return *found, said
    responses, mask, logprobs = sample(policy, queries, query_mask, numbers, 1, key)
    return responses, mask, mask, logprobs, None, None


# ---- equations -------------------------------------------------------------------------------------------------------
def distinct_n(responses, n):
    """Different n-grams over all n-grams of all responses (lists of token ids), and 0 where there is none.

    It falls as there are more tokens, so compare like with like. Source: Li et al., arXiv 1510.03055.
    """
    ngrams = [tuple(ids[i : i + n]) for ids in responses for i in range(len(ids) - n + 1)]
    return len(set(ngrams)) / max(1, len(ngrams))


def verdict_by_score(score, opponent_score):
    """ "won", "tied" or "lost". Within 1e-4 is a tie, because the same response may score differently by rounding.

    "unscored" where a reward abstained from one of the two, so that its score is NaN.
    """
    difference = score - opponent_score
    if math.isnan(difference):
        return "unscored"
    return "tied" if abs(difference) < 1e-4 else "won" if difference > 0 else "lost"


def win_rate(verdicts):
    """rate() of the verdicts, where a tie is half a win, and how many there are of each."""
    counts = {name: verdicts.count(name) for name in ("won", "tied", "lost", "unparsable", "unscored")}
    verdicts = [v for v in verdicts if v != "unscored"]
    # An answer that cannot be read is a pair that is not won. [EVAL-2]
    points = [{"won": 1.0, "tied": 0.5}.get(v, 0.0) for v in verdicts]
    return rate(points) | {"pairs": len(verdicts)} | counts


def pass_at_k(n, right, k):
    """The chance that k of n responses, `right` of them right, hold a right one: 1 - C(n - right, k) / C(n, k).

    Its mean is that of k fresh responses. Source: arXiv 2107.03374, equation 1.
    """
    # The plain 1 - (1 - right / n)^k would be too low for it. [EVAL-5]
    return 1 - math.comb(n - right, k) / math.comb(n, k)


def pass_rates(verdicts):
    """{"pass@k": rate() over the prompts} for k = 1, 2, 4, .. up to the n responses to a prompt.

    Args: verdicts [n, N, F], rewards that are 1, 0 or NaN where one does not apply. A response is right where all that
    apply are 1 and one does. A prompt to none of whose responses one applies is left out.
    """
    n, applies = len(verdicts), ~verdicts.isnan()
    # To say nothing of a response is not to say that it is right.
    is_right = ((verdicts == 1) | ~applies).all(2) & applies.any(2)  # [n, N]
    counts = is_right.sum(0)[applies.any(2).any(0)].tolist()  # right responses to each prompt
    if len(counts) < verdicts.size(1):
        console.say(f"pass@k: over {len(counts)} of {verdicts.size(1)} prompts; to the others no reward applies")
    ks = [k for k in range(1, n + 1) if k == n or k.bit_count() == 1] if counts else []
    return {f"pass@{k}": rate([pass_at_k(n, right, k) for right in counts]) for k in ks}


def measure(texts, responses, mask, ended, values, score, end_ids):
    """What is known of one side's responses, one by one and on average.

    Args: texts, N strings; responses, mask [N, R]; ended [N] bool or None; values [N, F] of the Scorer `score`;
    end_ids, the tokens that may end a response.
    Returns: ({column: list of N, None where a reward does not apply}, {name: {"value", "low", "high"}}).
    """
    tokens = [response[m].tolist() for response, m in zip(responses, mask, strict=True)]
    columns = {"length": list(map(len, tokens))}  # The length counts the token at the end.
    columns |= {"ended": ended.int().tolist()} if ended is not None else {}
    for name, x in zip(score.names, values.unbind(1), strict=True):
        label = name if name in score.watched else f"rewards/{name}"
        columns[label] = [None if math.isnan(value) else value for value in x.tolist()]
    rates, figures = {"ended", "parses", *(f"rewards/{name}" for name in score.boolean)}, {}
    for label, column in columns.items():
        if given := [x for x in column if x is not None]:
            figures[label] = rate(given) if label in rates else average(given)
    said = [ids[:-1] if set(ids[-1:]) & end_ids else ids for ids in tokens]
    figures |= {f"distinct_{n}": {"value": distinct_n(said, n)} for n in (1, 2, 3)}
    return {"response": texts} | columns, figures


# ---- main ------------------------------------------------------------------------------------------------------------
@torch.no_grad()
def main(args: Args):
    """Evaluates; returns the contents of summary.json on the main process, None on the others."""
    start = time.monotonic()
    given, args = args, evaluation.as_trained(args)
    evaluation.check(given, args)
    accelerator = engines.join()
    device, size = accelerator.device, args.rollout_micro_batch_size
    use_references = args.judge != "none" and not args.opponent_path

    # ---- prompts, models, rewards
    rows = data.read(args, "dataset", "prompts", "test", with_answers=use_references)[: args.num_examples]
    tokenizer, loaded, reward_model = evaluation.load_models(args, device, rows)
    reward_model = Reward(reward_model) if reward_model else None
    stop_ids = stop_tokens.stop_ids(tokenizer, args.stop_token, "--stop_token", device)
    end_ids = stop_tokens.stop_ids(tokenizer, args.truncate_token, "--truncate_token", device)
    end_ids = end_ids if len(end_ids) else stop_ids  # A response is read up to one of these.
    # A reward model that is given text sets no limit: it may read a text from the end.
    room = models.context(reward_model, *loaded.values()) - args.response_length
    prompts = data.to_prompts(args, "dataset", rows, tokenizer, room, "completion" if use_references else None)
    score = rewards.Scorer(args, accelerator, tokenizer, size, ())
    reward_model = score.take_text_model(reward_model, prompts)
    # One response to each prompt, by utils.sample, unless --sampler vllm is given.
    sample = samplers.Sampler(args, vllm.sampler(args, accelerator, prompts, console.fail), stop_ids)
    env = environments.Environment(args, accelerator, tokenizer, prompts) if args.max_turns else None
    N = len(prompts)
    numbers, rows = data.my_share(prompts, accelerator)  # [N / world], filled up, so that all processes have as many
    queries, query_mask = utils.left_pad([row.ids for row in rows], device)  # [N / world, Q]

    # ---- 1. Responses and scores: the policy, and the opponent with the policy's settings and noise ------------------
    # Further samples for pass@k have noise of their own, because their rows have other numbers.
    sides = [("policy", args.policy_path, number) for number in range(args.samples_per_prompt)]
    sides += [("opponent", args.opponent_path, 0)] if args.opponent_path or use_references else []
    columns, metrics = {}, {}  # {side: {column: list of N}}, {side: {name: figure}}
    points, samples = [], []  # what the judge compares [N] of each side, and each sample's rewards and which are bools
    for side, path, number in sides:
        with accelerator.autocast():
            if path:
                policy, key = Policy(loaded[path], args.temperature), (args.seed, COMPARED, 0)
                inputs = queries, query_mask, numbers + number * N
                responses, mask, action_mask, _, ended, said = respond(
                    policy, sample, env, rows, *inputs, key, stop_ids, args
                )
                if not env:
                    mask, ended = truncate_response(responses, mask, end_ids, args.truncate_after)
                    action_mask = mask
                # Where no token ends a response, a reward model that is given text reads no EOS, as in training.
                ended = ended & (len(end_ids) > 0)
                texts = token_ids.decode_turns(tokenizer, responses, mask, action_mask)
            else:
                texts = [data.as_text(tokenizer, row.columns["completion"]) for row in rows]
                responses, mask = data.completions(rows, max(len(row.completion) for row in prompts), device)
                ended, action_mask, said = mask.any(1), mask, [[text] for text in texts] if env else None
            batch = Batch(queries, query_mask, responses, mask)
            model_scores = in_slices(response_scores, reward_model, batch, size) if reward_model else [None]
            values, scored = score(rows, batch, *model_scores, texts, ended, said)  # [N / world, F], [N / world]
        texts = gather_object(texts)[:N]
        gathered = accelerator.gather((responses, action_mask, ended, values, scored))
        responses, action_mask, ended, values, scored = (x[:N] for x in gathered)
        if side == "policy":
            samples.append((values.cpu(), torch.tensor([name in score.boolean for name in score.names])))
        if number:
            continue
        ended = ended if path and len(end_ids) else None  # The references are no samples, so nothing is said of this.
        known_ends = {*end_ids.tolist(), *stop_tokens.end_ids(tokenizer)}
        columns[side], metrics[side] = measure(texts, responses, action_mask, ended, values, score, known_ends)
        by_one = args.judge in ("gold", "reward_model")
        total = (values * score.weights).nansum(1).masked_fill(~scored, math.nan)
        points.append(values[:, score.names.index(args.judge)] if by_one else total)
    if args.samples_per_prompt > 1:
        values, is_bool = (torch.stack(x) for x in zip(*samples, strict=True))  # [n, N, F], [n, F]
        is_verdict = (is_bool | values.isnan().all(1)).all(0) & is_bool.any(0)  # [F]; it may be None of a whole sample
        if not is_verdict.any():
            what = f"--samples_per_prompt {args.samples_per_prompt}"
            console.fail(f"{what}: no function of --reward_fn has returned True and False alone")
        metrics["policy"] |= pass_rates(values[..., is_verdict])

    # ---- 2. KL: samples of its own, with the noise of the training's held-out evaluation -----------------------------
    if args.ref_model_path:
        kl_temperature = evaluation.training_args(args.policy_path).get("temperature", args.temperature)
        policy, reference = (Policy(loaded[path], kl_temperature) for path in (args.policy_path, args.ref_model_path))
        with accelerator.autocast():
            inputs, key = (queries, query_mask, numbers), (args.seed, EVALUATION, 0)
            # The estimate is unbiased only for draws from the policy that it is about. [EVAL-3]
            responses, mask, action_mask, logprobs, *_ = respond(
                policy, sample, env, rows, *inputs, key, stop_ids, args
            )
            batch = Batch(queries, query_mask, responses, mask)
            (ref_logprobs,) = in_slices(response_logprobs, reference, batch, size)
        kl = ((logprobs - ref_logprobs) * action_mask).sum(1)
        kl = accelerator.gather(kl)[:N].tolist()  # of each response
        metrics["policy"]["kl"] = average(kl)

    # ---- 3. Verdicts: on the main process, because a judge may take longer than processes wait for each other --------
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if not accelerator.is_main_process:
        return None
    table = {"prompt": [row.text for row in prompts]} | columns["policy"]
    table |= {f"opponent_{name}": column for name, column in columns.get("opponent", {}).items()}
    if args.judge == "llm":
        pairs = list(zip(table["prompt"], table["response"], table["opponent_response"], strict=True))
        path = evaluation.folder_of(args) / evaluation.ANSWERS
        table["verdict"], table["judge_answer"] = judge.judge_pairs(args, pairs, path)
    elif args.judge != "none":
        table["verdict"] = [verdict_by_score(*pair) for pair in torch.stack(points, 1).tolist()]
    if args.judge != "none":
        metrics["win_rate"] = win_rate(table["verdict"])

    # ---- 4. Report: samples.csv, summary.json, a table of the figures ------------------------------------------------
    summary = evaluation.report(args, given, metrics, table, accelerator)
    console.say(f"results: {evaluation.folder_of(args)}   {time.monotonic() - start:.0f} s")
    return summary


if __name__ == "__main__":
    cli.main(main, Args)
