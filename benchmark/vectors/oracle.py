"""The details in plain Python: float64, lists and loops. `python oracle.py` writes the outputs of all vectors anew.

Nothing here calls the shipped code or torch. A function takes a vector's inputs and returns its outputs. None in the
place of a score is an abstention. A gradient is that of the loss by the log-probs, derived by hand.
"""

import itertools
import json
import math
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).parent


def mean(numbers):
    numbers = list(numbers)
    return sum(numbers) / len(numbers) if numbers else 0.0


def variance(numbers, unbiased=False):
    numbers = list(numbers)
    center = mean(numbers)
    return sum((x - center) ** 2 for x in numbers) / max(1, len(numbers) - unbiased)


def places(mask):
    """The (row, column) pairs where the mask is 1."""
    return [(i, t) for i, row in enumerate(mask) for t, counted in enumerate(row) if counted]


def on_mask(mask, value):
    """value(i, t) where the mask is 1, and 0 elsewhere."""
    return [[value(i, t) if counted else 0.0 for t, counted in enumerate(row)] for i, row in enumerate(mask)]


def of_groups(function, scores, k):
    """function(the scores of a group that are there, the score) for each score, and 0 where it is missing."""
    groups = [[s for s in scores[i - i % k : i - i % k + k] if s is not None] for i in range(len(scores))]
    return [0.0 if s is None else function(group, s) for group, s in zip(groups, scores)]


def log_softmax(logits, temperature=1.0):
    scaled = [x / temperature for x in logits]
    top = max(scaled)
    total = top + math.log(sum(math.exp(x - top) for x in scaled))
    return [x - total for x in scaled]


def kl(log_p, log_q):
    return sum(math.exp(p) * (p - q) for p, q in zip(log_p, log_q))


# ---- advantages ------------------------------------------------------------------------------------------------------
def rloo_advantages(scores, k):
    def advantage(group, score):
        return score - (sum(group) - score) / (len(group) - 1) if len(group) > 1 else 0.0

    return {"advantages": of_groups(advantage, scores, k)}


def grpo_advantages(scores, k, scale, eps):
    everything = math.sqrt(variance([s for s in scores if s is not None], unbiased=True))

    def advantage(group, score):
        if max(group) == min(group):
            return 0.0
        spread = {"group": math.sqrt(variance(group, unbiased=True)), "batch": everything}
        return (score - mean(group)) / (1.0 if scale == "none" else spread[scale] + eps)

    return {"advantages": of_groups(advantage, scores, k)}


def in_equal_group(scores, k):
    groups = [[s for s in scores[i - i % k : i - i % k + k] if s is not None] for i in range(len(scores))]
    return {"equal": [len(set(group)) < 2 for group in groups]}


def has_sibling(scores, k):
    return {"counted": [x > 0 for x in of_groups(lambda group, score: float(len(group) > 1), scores, k)]}


def reinforce_returns(scores, kl, mask, k, kl_coef):
    base = rloo_advantages(scores, k)["advantages"] if k > 1 else scores
    later = on_mask(mask, lambda i, t: sum(x for x, counted in zip(kl[i][t:], mask[i][t:]) if counted))
    return {"returns": on_mask(mask, lambda i, t: base[i] - kl_coef * later[i][t])}


def reinforce_advantages(scores, kl, mask, k, kl_coef):
    returns = reinforce_returns(scores, kl, mask, k, kl_coef)["returns"]
    return {"advantages": masked_whiten(returns, mask, True)["whitened"]}


def reinforce_baseline(scores, mask, k):
    centered = of_groups(lambda group, score: score - mean(group), scores, k)
    return {"advantages": masked_whiten([[a] * len(row) for a, row in zip(centered, mask)], mask, True)["whitened"]}


def trajectory_advantages(scores, groups, trajectories):
    of_group = defaultdict(dict)
    for score, group, trajectory in zip(scores, groups, trajectories):
        of_group[group][trajectory] = score
    others = [[s for t, s in of_group[g].items() if t != own] for g, own in zip(groups, trajectories)]
    return {"advantages": [score - mean(rest) for score, rest in zip(scores, others)]}


def gae(rewards, values, mask, gamma, lam):
    """A step is a place where the mask is 1. It is paid what stands there and behind it, up to the next step."""
    advantages = [[0.0] * len(row) for row in mask]
    for i, row in enumerate(mask):
        steps = [t for t, counted in enumerate(row) if counted] + [len(row)]
        for n in reversed(range(len(steps) - 1)):
            t, after = steps[n], steps[n + 1]
            is_last = after == len(row)
            reward = sum(rewards[i][t:after])
            delta = reward + (0.0 if is_last else gamma * values[i][after]) - values[i][t]
            advantages[i][t] = delta + (0.0 if is_last else gamma * lam * advantages[i][after])
    return {"advantages": advantages, "returns": on_mask(mask, lambda i, t: advantages[i][t] + values[i][t])}


def distill_advantages(rewards, gamma):
    return {
        "advantages": [
            [sum(gamma ** (u - t) * row[u] for u in range(t, len(row))) for t in range(len(row))] for row in rewards
        ]
    }


# ---- KL --------------------------------------------------------------------------------------------------------------
def kl_estimates(logprobs, ref_logprobs, kind):
    of = {"k1": lambda d: d, "abs": abs, "k2": lambda d: d * d / 2, "k3": lambda d: math.expm1(-d) + d}[kind]
    return {"kl": [[of(p - q) for p, q in zip(*rows)] for rows in zip(logprobs, ref_logprobs)]}


def full_kl(logits, ref_logits, mask):
    return {"kl": on_mask(mask, lambda i, t: kl(log_softmax(logits[i][t]), log_softmax(ref_logits[i][t])))}


def kl_loss(logprobs, old_logprobs, ref_logprobs, mask, times_ratio):
    """The mean of k3 over the tokens. Its derivative by log p is 1 - exp(ref - log p)."""
    count = len(places(mask))

    def parts(i, t):
        d = logprobs[i][t] - ref_logprobs[i][t]
        weight = math.exp(logprobs[i][t] - old_logprobs[i][t]) if times_ratio else 1.0
        k3 = math.expm1(-d) + d
        return weight * k3, weight * (-math.expm1(-d) + (k3 if times_ratio else 0.0))

    loss = sum(parts(i, t)[0] for i, t in places(mask)) / count
    return {"loss": loss, "gradient": on_mask(mask, lambda i, t: parts(i, t)[1] / count)}


def value_mask(mask):
    return {"mask": [[bool(row[t] or t == 0 or row[t - 1]) for t in range(len(row))] for row in mask]}


def token_rewards(scores, kl, mask, kl_coef, place):
    rewards = on_mask(mask, lambda i, t: -kl_coef * kl[i][t])
    for i, row in enumerate(mask):
        last = max(t for t, counted in enumerate(row) if counted)
        rewards[i][min(last + 1, len(row) - 1) if place == "after" else last] += scores[i]
    return {"rewards": rewards}


def rloo_kl_advantages(scores, logprobs, ref_logprobs, mask, k, kl_coef):
    paid = [sum(p - q for p, q, counted in zip(*rows) if counted) for rows in zip(logprobs, ref_logprobs, mask)]
    return rloo_advantages([s - kl_coef * x for s, x in zip(scores, paid)], k)


def adapt_kl_coef(kl_coef, kl, target, horizon, num_episodes):
    return {"kl_coef": kl_coef * (1 + min(max(kl / target - 1, -0.2), 0.2) * num_episodes / horizon)}


# ---- losses ----------------------------------------------------------------------------------------------------------
def clipped(ratio, advantage, low, high):
    """(loss, its derivative by the log-ratio, whether the clip decided)."""
    plain, held = -advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high)
    return (held, 0.0, 1.0) if held > plain else (plain, plain, 0.0)


def weights(mask, normalization):
    """What a token's loss counts."""
    total, rows = len(places(mask)), len(mask)
    count = {
        "token": lambda row: total,
        "response": lambda row: sum(row) * rows,
        "constant": lambda row: len(row) * rows,
    }
    return on_mask(mask, lambda i, t: 1 / count[normalization](mask[i]))


def grpo_policy_loss(logprobs, old_logprobs, mask, advantages, cliprange, cliprange_high, normalization, micro_batches):
    """An advantage is a response's, or a token's. The loss does not depend on the micro-batches."""
    weight = weights(mask, normalization)

    def part(i, t):
        advantage = advantages[i][t] if isinstance(advantages[i], list) else advantages[i]
        return clipped(math.exp(logprobs[i][t] - old_logprobs[i][t]), advantage, cliprange, cliprange_high)

    found = {place: part(*place) for place in places(mask)}
    return {
        "loss": sum(weight[i][t] * x[0] for (i, t), x in found.items()),
        "gradient": on_mask(mask, lambda i, t: weight[i][t] * found[i, t][1]),
        "clipped": mean(x[2] for x in found.values()),
    }


def ppo_policy_loss(cliprange, **inputs):
    return grpo_policy_loss(**inputs, cliprange=cliprange, cliprange_high=cliprange, normalization="token")


def gspo_policy_loss(logprobs, old_logprobs, mask, advantages, cliprange, cliprange_high):
    loss, gradient = 0.0, [[0.0] * len(row) for row in mask]
    for i, row in enumerate(mask):
        length = sum(row)
        logratio = sum(logprobs[i][t] - old_logprobs[i][t] for t in range(len(row)) if row[t]) / max(1, length)
        part, slope, _ = clipped(math.exp(logratio), advantages[i], cliprange, cliprange_high)
        loss += part / len(mask) if length else 0.0
        gradient[i] = [slope / length / len(mask) if counted else 0.0 for counted in row]
    return {"loss": loss, "gradient": gradient}


def cispo_policy_loss(logprobs, old_logprobs, mask, advantages, cliprange_high):
    total = len(places(mask))
    slope = on_mask(
        mask,
        lambda i, t: -advantages[i] * min(math.exp(logprobs[i][t] - old_logprobs[i][t]), 1 + cliprange_high) / total,
    )
    cut = mean(float(math.exp(logprobs[i][t] - old_logprobs[i][t]) > 1 + cliprange_high) for i, t in places(mask))
    return {"loss": sum(slope[i][t] * logprobs[i][t] for i, t in places(mask)), "gradient": slope, "clipped": cut}


def rloo_policy_loss(logprobs, old_logprobs, mask, advantages, cliprange):
    """The ratio of a response is the product of its tokens' ratios."""
    loss, gradient, num_clipped = 0.0, [], 0.0
    for i, row in enumerate(mask):
        logratio = sum(logprobs[i][t] - old_logprobs[i][t] for t in range(len(row)) if row[t])
        part, slope, cut = clipped(math.exp(logratio), advantages[i], cliprange, cliprange)
        loss, num_clipped = loss + part / len(mask), num_clipped + cut
        gradient.append([slope / len(mask) if counted else 0.0 for counted in row])
    return {"loss": loss, "gradient": gradient, "clipped": num_clipped / len(mask)}


def ppo_value_loss(values, old_values, returns, mask, cliprange_value):
    errors, held_errors = [], []
    for i, t in places(mask):
        v, old, target = values[i][t], old_values[i][t], returns[i][t]
        held = min(max(v, old - cliprange_value), old + cliprange_value)
        errors.append((v - target) ** 2)
        held_errors.append((held - target) ** 2)
    losses = [max(pair) / 2 for pair in zip(errors, held_errors)]
    clipped = mean(float(held > plain) for plain, held in zip(errors, held_errors))
    return {"loss": mean(losses), "error": mean(errors), "clipped": clipped}


def distill_policy_loss(logprobs, advantages):
    minus = [[-a for a in row] for row in advantages]
    return {"loss": sum(map(sum, minus)), "gradient": minus}  # the ratio is 1


# ---- preferences -----------------------------------------------------------------------------------------------------
def best_of_k_loss(scores, best):
    logs = [log_softmax(row) for row in scores]
    return {"loss": mean(-row[b] for row, b in zip(logs, best))}


def dpo_loss(logprobs, ref_logprobs, best, beta, label_smoothing):
    total, gradient = [], []
    for ours, theirs, b in zip(logprobs, ref_logprobs, best):
        logs = log_softmax([beta * (p - q) for p, q in zip(ours, theirs)])
        target = [1 - label_smoothing if j == b else label_smoothing / (len(logs) - 1) for j in range(len(logs))]
        total.append(-sum(share * x for share, x in zip(target, logs)))
        gradient.append([beta * (math.exp(x) - share) / len(logprobs) for share, x in zip(target, logs)])
    return {"loss": mean(total), "gradient": gradient}


def ipo_loss(logprobs, ref_logprobs, lengths, best, beta):
    """d is the difference of the log-ratios, each divided by its length."""
    losses = []
    for ours, theirs, counts, b in zip(logprobs, ref_logprobs, lengths, best):
        ratios = [(p - q) / n for p, q, n in zip(ours, theirs, counts)]
        losses.append(mean((ratios[b] - x - 1 / (2 * beta)) ** 2 for j, x in enumerate(ratios) if j != b))
    return {"loss": mean(losses)}


def is_correct(scores, best):
    return {"correct": [all(row[b] > x for j, x in enumerate(row) if j != b) for row, b in zip(scores, best)]}


def gain_and_bias(scores):
    gain = 1 / math.sqrt(variance(scores))
    return {"gain": gain, "bias": -gain * mean(scores)}


def kl_divergence(logits, other_logits):
    return {"kl": [kl(log_softmax(p), log_softmax(q)) for p, q in zip(logits, other_logits)]}


def generalized_jsd(logits, teacher_logits, beta):
    """The mean over the rows. At beta 0 and 1 it is KL(teacher || student) and KL(student || teacher)."""
    found = []
    for student, teacher in zip(map(log_softmax, logits), map(log_softmax, teacher_logits)):
        if beta in (0, 1):
            found.append(kl(student, teacher) if beta else kl(teacher, student))
            continue
        mixture = [math.log(beta * math.exp(t) + (1 - beta) * math.exp(s)) for s, t in zip(student, teacher)]
        found.append(beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture))
    return {"loss": mean(found)}


# ---- scores ----------------------------------------------------------------------------------------------------------
def missing_eos_scores(scores, ended, penalty, mode):
    return {"scores": [s if e else s - penalty if mode == "subtract" else -penalty for s, e in zip(scores, ended)]}


def truncate_response(responses, mask, end_ids, after):
    read, ended = [], []
    for row, counted in zip(responses, mask):
        ends = [t for t in range(after, len(row)) if counted[t] and row[t] in end_ids]
        read.append([bool(counted[t]) and (not ends or t <= ends[0]) for t in range(len(row))])
        ended.append(bool(ends) or not end_ids)
    return {"mask": read, "ended": ended}


def overlong_scores(scores, lengths, max_length, buffer):
    return {"scores": [s - max(0, n - (max_length - buffer)) / buffer for s, n in zip(scores, lengths)]}


def shape_scores(scores, normalize, clip_range):
    if normalize:
        scores = masked_whiten([scores], [[1] * len(scores)], True)["whitened"][0]
    return {"scores": [s if clip_range is None else min(max(s, -clip_range), clip_range) for s in scores]}


def running_scores(batches, scaling, norm, clip):
    """The last batch, scaled by the moments of all."""
    seen = [s for batch in batches for s in batch]
    std = math.sqrt(variance(seen, unbiased=True))
    shaped = [(s - (mean(seen) if norm else 0.0)) / (std if scaling and std else 1.0) for s in batches[-1]]
    return {"mean": mean(seen), "std": std, "scores": [s if clip is None else min(max(s, -clip), clip) for s in shaped]}


# ---- whitening -------------------------------------------------------------------------------------------------------
def masked_mean(x, mask):
    return {"mean": mean(x[i][t] for i, t in places(mask))}


def mean_and_variance(x, mask):
    numbers = [x[i][t] for i, t in places(mask)]
    return {"mean": mean(numbers), "variance": variance(numbers)}


def masked_whiten(x, mask, shift_mean):
    numbers = [x[i][t] for i, t in places(mask)]
    center, scale = mean(numbers), math.sqrt(variance(numbers) + 1e-8)
    equal = len(set(numbers)) < 2
    whitened = on_mask(
        mask, lambda i, t: (0.0 if equal else (x[i][t] - center) / scale) + (0.0 if shift_mean else center)
    )
    return {"whitened": whitened}


# ---- another sampler -------------------------------------------------------------------------------------------------
def sampler_weights(logratio, mask, correction, cap, action):
    def weight(log_of_ratio):
        ratio = math.exp(min(log_of_ratio, 700))
        if correction == "mask":
            return ratio if 1 / cap <= ratio <= cap else 0.0
        return min(ratio, cap)

    if action == "response":
        return {"weights": [weight(sum(x for x, counted in zip(*rows) if counted)) for rows in zip(logratio, mask)]}
    return {"weights": on_mask(mask, lambda i, t: weight(logratio[i][t]))}


# ---- training --------------------------------------------------------------------------------------------------------
def learning_rates(num_steps, learning_rate, schedule, warmup_steps):
    shapes = {"linear": lambda x: 1 - x, "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2, "constant": lambda x: 1.0}
    rising = [(step + 1) / warmup_steps for step in range(warmup_steps)]
    left = num_steps - warmup_steps
    return {"rates": [learning_rate * x for x in rising + [shapes[schedule](step / left) for step in range(left)]]}


def adam_steps(parameter, gradients, learning_rate, eps, weight_decay, tf):
    """Adam of betas 0.9 and 0.999. TensorFlow adds eps before it corrects the second moment, torch after."""
    m = v = 0.0
    for t, g in enumerate(gradients, 1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        parameter -= learning_rate * weight_decay * parameter
        correction = math.sqrt(1 - 0.999**t)
        denominator = (math.sqrt(v) + eps) / correction if tf else math.sqrt(v) / correction + eps
        parameter -= learning_rate / (1 - 0.9**t) * m / denominator
    return {"parameter": parameter}


def entropies(logits, temperature):
    logs = [log_softmax(row, temperature) for row in logits]
    return {"entropies": [-sum(math.exp(x) * x for x in row) for row in logs]}


def token_logprobs(logits, labels, temperature):
    return {"logprobs": [log_softmax(row, temperature)[label] for row, label in zip(logits, labels)]}


def positions_from_mask(mask):
    return {"positions": [[max(0, sum(row[: t + 1]) - 1) for t in range(len(row))] for row in mask]}


def ratio_moments(logratio, mask):
    ratios = [math.exp(logratio[i][t]) for i, t in places(mask)]
    return {"mean": mean(ratios), "variance": variance(ratios)}


def is_sampled(share, updates):
    shares = [math.floor(round(update * share, 9)) for update in range(updates + 1)]
    return {"sampled": [after > before for before, after in itertools.pairwise(shares)]}


# ---- evaluation ------------------------------------------------------------------------------------------------------
def pass_at_k(n, right, k):
    """The chance that a draw of k without replacement misses all right ones is a product."""
    return {"rate": 1 - math.prod((n - right - j) / (n - j) for j in range(k))}


def distinct_n(responses, n):
    ngrams = [tuple(ids[i : i + n]) for ids in responses for i in range(len(ids) - n + 1)]
    return {"distinct": len(set(ngrams)) / len(ngrams) if ngrams else 0.0}


def win_rate(scores, opponent_scores):
    """Within 1e-4 is a tie, which is half a win. A pair without a score does not count."""
    pairs = [(a, b) for a, b in zip(scores, opponent_scores) if None not in (a, b)]
    return {"rate": mean(0.5 if abs(a - b) < 1e-4 else float(a > b) for a, b in pairs)}


def rounded(x):
    """Numbers to 12 digits, in lists of any depth."""
    if isinstance(x, list):
        return [rounded(item) for item in x]
    if not isinstance(x, float):
        return x
    return float(f"{x:.12g}") if abs(x) > 1e-13 else 0.0


def load():
    """{family: its vectors}."""
    return {path.stem: json.loads(path.read_text())["vectors"] for path in sorted(HERE.glob("*.json"))}


def computed(vector):
    return {name: rounded(x) for name, x in globals()[vector["function"]](**vector["inputs"]).items()}


if __name__ == "__main__":
    for family, vectors in load().items():
        blocks = []
        for vector in vectors:
            vector["outputs"] = computed(vector)
            fields = [f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in vector.items()]
            blocks.append("  {\n    " + ",\n    ".join(fields) + "\n  }")
        (HERE / f"{family}.json").write_text('{"vectors": [\n' + ",\n".join(blocks) + "\n]}\n")
