"""RLOO, GRPO, PPO and distillation from their definitions: an unpadded row at a time, plain transformers in float64.

Python loops, and nothing that calls the package, except for the embedded task's known reward and the shuffle of rows.
Episodes are pairs (query, response) of lists of token ids, and `orders` says in which order each pass takes them.
"""

import copy
import math
import statistics

import torch
import transformers
from helpers import responses_per_prompt

from rlhf_details import toy, utils


def mean(numbers):
    numbers = list(numbers)
    return sum(numbers) / len(numbers)


def variance(numbers):
    numbers = list(numbers)
    centre = mean(numbers)
    return mean((x - centre) ** 2 for x in numbers)


def whitened(rows, keep_mean=False):
    """Rows of floats of any lengths, whitened over all of them with the biased variance."""
    flat = [x for row in rows for x in row]
    m, scale = mean(flat), 1 / math.sqrt(variance(flat) + 1e-8)
    return [[(x - m) * scale + (m if keep_mean else 0.0) for x in row] for row in rows]


class Oracle:
    """What the algorithms share. Subclasses have `update`, which returns what is to be logged."""

    def __init__(self, folder, args, num_prompts):
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.args, self.num_prompts = args, num_prompts
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "policy")
        self.policy, self.reference = (load(folder / "policy").double() for _ in range(2))
        self.reward = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "reward").double()
        self.bias = self.reward.config.reward_bias
        self.parameters = list(self.policy.parameters())
        self.steps = 0

    def start_optimiser(self):
        self.adamw = torch.optim.AdamW(self.parameters, eps=self.args.adam_eps, weight_decay=self.args.weight_decay)
        self.moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in self.parameters]  # of TensorFlow's Adam

    def token(self, text):
        special = {"eos": self.tokenizer.eos_token_id, "none": None}
        return special[text] if text in special else self.tokenizer.convert_tokens_to_ids(text)

    def distributions(self, model, query, response):
        """(log-softmax of logits / T where each response token is predicted [n, V], last hidden states [Q + n, H])."""
        hidden = model.base_model(torch.tensor([query + response])).last_hidden_state[0]
        logits = model.get_output_embeddings()(hidden[len(query) - 1 : -1]) / self.args.temperature
        return logits.log_softmax(-1), hidden

    def logprobs(self, model, query, response):
        with torch.no_grad():
            table, _ = self.distributions(model, query, response)
        return [table[t, token].item() for t, token in enumerate(response)]

    def score(self, query, response):
        """(score after the penalty for a missing end, what the reward model reads, whether it ended)."""
        args = self.args
        end, after = self.token(getattr(args, "truncate_token", "none")), getattr(args, "truncate_after", 0)
        end = self.token(args.stop_token) if end is None else end
        penalty = getattr(args, "missing_eos_penalty", None)
        places = [t for t, token in enumerate(response) if token == end and t >= after]
        read = response[: places[0] + 1] if places else response
        ended = bool(places) or end is None
        with torch.no_grad():
            hidden = self.reward.base_model(torch.tensor([query + read])).last_hidden_state
            score = self.reward.score(hidden)[0, -1, 0].item() + self.bias
        if not ended and penalty is not None:
            score = score - penalty if args.missing_eos_mode == "subtract" else -penalty
        if buffer := getattr(args, "soft_overlong", 0):
            score -= max(0, (len(response) - args.response_length) / buffer + 1)
        return score, read, ended

    def step(self, loss, lr):
        """One step of AdamW, or of TensorFlow's Adam from its paper; returns the gradient's norm before clipping."""
        args = self.args
        self.backward(loss)
        norm = math.sqrt(sum(p.grad.square().sum().item() for p in self.parameters))
        if args.max_grad_norm is not None and norm > args.max_grad_norm:
            for p in self.parameters:
                p.grad *= args.max_grad_norm / norm
        self.steps += 1
        if not getattr(args, "tf_adam", False):
            self.adamw.param_groups[0]["lr"] = lr
            self.adamw.step()
            return norm
        rate = lr * math.sqrt(1 - 0.999**self.steps) / (1 - 0.9**self.steps)
        with torch.no_grad():
            for p, (m, v) in zip(self.parameters, self.moments, strict=True):
                m.mul_(0.9).add_(0.1 * p.grad), v.mul_(0.999).add_(0.001 * p.grad**2)
                p -= lr * args.weight_decay * p + rate * m / (v.sqrt() + args.adam_eps)
        return norm

    def backward(self, loss):
        for p in self.parameters:
            p.grad = None
        loss.backward()

    def learning_rate(self, number, num_updates):
        return self.args.learning_rate * (1 - (number - 1) / num_updates)

    def surrogate(self, ratio, advantage):
        """(the clipped surrogate of one action, whether the clipped side decided)."""
        c = 0.2 if self.args.cliprange is None else self.args.cliprange
        above = c if getattr(self.args, "cliprange_high", None) is None else self.args.cliprange_high
        plain, clipped = -advantage * ratio, -advantage * ratio.clamp(1 - c, 1 + above)
        return torch.max(plain, clipped), clipped.item() > plain.item()

    def weighed(self, advantages, logratios):
        """Under --overlap, advantages times the action's probability over that when it was sampled, at most the cap."""
        if not self.args.overlap:
            return advantages, {}
        ratios = [[math.exp(x) for x in row] for row in logratios]
        flat = [x for row in ratios for x in row]
        cap = self.args.sampler_cap
        found = {"val/sampler_weight": mean(min(x, cap) for x in flat), "val/sampler_cut": mean(x > cap for x in flat)}
        pairs = zip(advantages, ratios, strict=False)
        return [[a * min(x, cap) for a, x in zip(*pair, strict=True)] for pair in pairs], found

    def shared_metrics(self, number, num_updates, episodes, judged, old_logprobs, actions, entropies, norms):
        """What all of them log. actions: (loss, log-ratio, clipped) of each action of each pass."""
        losses, logratios, clipped = zip(*actions, strict=True)
        ratios, eos = [math.exp(x) for x in logratios], self.token("eos")
        has_end = {self.args.stop_token, getattr(self.args, "truncate_token", "none")} != {"none"}
        texts = [
            [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in (query, read)]
            for (query, _), (_, read, _) in zip(episodes, judged, strict=True)
        ]
        prompts = len(episodes) // responses_per_prompt(self.args)
        return {
            "update": number,
            "episode": number * len(episodes),
            "epoch": number * prompts / self.num_prompts,
            "lr": self.learning_rate(number, num_updates),
            "objective/entropy": mean(-sum(row) for row in old_logprobs),
            "objective/scores": mean(score for score, _, _ in judged),
            "objective/gold": mean(toy.gold(*pair) for pair in texts),
            "objective/parses": mean(toy.parses("".join(pair).lstrip()) for pair in texts),
            "loss/policy_avg": mean(losses),
            "policy/approxkl_avg": mean(x * x / 2 for x in logratios),
            "policy/clipfrac_avg": mean(clipped),
            "policy/entropy_avg": mean(entropies),
            "policy/grad_norm": mean(norms) if norms else 0,
            "val/ratio": mean(ratios),
            "val/ratio_var": variance(ratios),
            "val/num_eos_tokens": sum(response.count(eos) for _, response in episodes),
            "val/num_stop_token_ids": sum(ended for _, _, ended in judged) if has_end else 0,
            "val/sequence_lengths": mean(len(response) for _, response in episodes),
        }


class RlooOracle(Oracle):
    """arXiv 2402.14740 for whole responses, and REINFORCE++ (arXiv 2501.03262) for tokens with --token_level_kl."""

    def __init__(self, *args):
        super().__init__(*args)
        self.start_optimiser()

    def update(self, number, num_updates, episodes, orders, sampled_logprobs):
        args, k = self.args, self.args.rloo_k
        judged = [self.score(*episode) for episode in episodes]
        scores = [score for score, _, _ in judged]
        sampler = [self.logprobs(self.policy, *episode) for episode in episodes]
        ref = [self.logprobs(self.reference, *episode) for episode in episodes]
        kl = [[a - b for a, b in zip(*rows, strict=True)] for rows in zip(sampler, ref, strict=True)]
        shaped = whitened([scores])[0] if args.normalize_reward else scores
        if args.reward_clip_range is not None:
            shaped = [min(max(x, -args.reward_clip_range), args.reward_clip_range) for x in shaped]
        rewards = [x - args.kl_coef * sum(row) for x, row in zip(shaped, kl, strict=True)]
        advantages = []
        for i, row in enumerate(kl):
            siblings = [j for j in range(len(episodes)) if j // k == i // k and j != i]
            if args.token_level_kl:
                base = shaped[i] - (mean(shaped[j] for j in siblings) if siblings else 0.0)
                advantages.append([base - args.kl_coef * sum(row[t:]) for t in range(len(row))])
            else:
                advantages.append([rewards[i] - mean(rewards[j] for j in siblings)])
        advantages = whitened(advantages) if args.normalize_advantage else advantages
        logratios = [
            [a - b for a, b in zip(*rows, strict=True)] for rows in zip(sampler, sampled_logprobs, strict=True)
        ]
        logratios = logratios if args.token_level_kl else [[sum(row)] for row in logratios]
        advantages, of_overlap = self.weighed(advantages, logratios)
        acted = sampled_logprobs if args.overlap else sampler  # the log-probs of the policy that sampled
        actions, entropies, norms, gap, first = [], [], [], 0.0, 1.0
        one_step = len(orders) * args.num_mini_batches == 1
        for order in orders:
            size = len(order) // args.num_mini_batches
            for part in range(args.num_mini_batches):
                losses = []
                for i in order[part * size : (part + 1) * size]:
                    query, response = episodes[i]
                    table, _ = self.distributions(self.policy, query, response)
                    entropies += [-(row.exp() * row).sum().item() for row in table]
                    new = [table[t, token] for t, token in enumerate(response)]
                    old = [x.detach() for x in new] if one_step else sampler[i]
                    logratios = [a - b for a, b in zip(new, old, strict=True)]
                    logratios = logratios if args.token_level_kl else [sum(logratios)]
                    for logratio, advantage in zip(logratios, advantages[i], strict=True):
                        loss, clipped = self.surrogate(logratio.exp(), advantage)
                        losses.append(loss)
                        actions.append((loss.item(), logratio.item(), clipped))
                        first = first if norms else max(first, math.exp(abs(logratio.item())))
                    if not norms:
                        gap = max(gap, *(abs(x.item() - y) for x, y in zip(new, sampled_logprobs[i], strict=True)))
                norms.append(self.step(torch.stack(losses).mean(), self.learning_rate(number, num_updates)))
        groups = [scores[i : i + k] for i in range(0, len(scores), k)] if k > 1 else [scores]
        mean_kl = mean(map(sum, kl))
        common = self.shared_metrics(number, num_updates, episodes, judged, acted, actions, entropies, norms)
        return (
            common
            | of_overlap
            | {
                "objective/kl": mean(sum(a) - sum(b) for a, b in zip(acted, ref, strict=True)),
                "objective/non_score_reward": -args.kl_coef * mean_kl,
                "objective/rlhf_reward": mean(rewards),
                "val/logprob_gap": gap,
                "val/first_ratio": first,
                "val/equal_scores": mean(len(set(group)) == 1 for group in groups),
            }
        )


class DistillOracle(Oracle):
    """Rewards by a teacher (Lu and Thinking Machines Lab, 2025), or GKD (arXiv 2306.13649)."""

    def __init__(self, folder, args, num_prompts):
        super().__init__(folder, args, num_prompts)
        self.teacher = transformers.AutoModelForCausalLM.from_pretrained(args.teacher_model_path).double()
        self.start_optimiser()

    def completions(self, number, rows):
        """[(query, response), ...] of an update that takes the data set's completions, in the order of its shuffle."""
        size = self.args.batch_size
        order = utils.permutation(len(rows), self.args.seed, 0)[(number - 1) * size : number * size]
        texts = [[self.tokenizer(rows[i][name]).input_ids for name in ("prompt", "completion")] for i in order]
        return [(query, [*answer, self.token("eos")][: self.args.response_length]) for query, answer in texts]

    def jsd(self, log_p, log_q):
        """Equation 1, of a student's distribution p [V] and a teacher's q, for a beta inside of [0, 1]."""
        p, q, beta = log_p.exp(), log_q.exp(), self.args.beta
        mixture = beta * q + (1 - beta) * p
        return beta * (q * (q / mixture).log()).sum() + (1 - beta) * (p * (p / mixture).log()).sum()

    def update(self, number, num_updates, episodes, sampled_logprobs):
        args, is_jsd = self.args, self.args.divergence == "jsd"
        advantages, logratios, divergences, losses, entropies, sums, gap = [], [], [], [], [], [], 0.0
        for i, (query, response) in enumerate(episodes):
            table, _ = self.distributions(self.policy, query, response)
            with torch.no_grad():
                teacher, _ = self.distributions(self.teacher, query, response)
            new = [table[t, token] for t, token in enumerate(response)]
            rewards = [teacher[t, token].item() - new[t].item() for t, token in enumerate(response)]
            entropies += [-(row.exp() * row).sum().item() for row in table]
            if is_jsd:
                losses.append([self.jsd(*pair) for pair in zip(table, teacher, strict=True)])
                divergences.append(sum(x.item() for x in losses[-1]))
                continue
            advantages.append([sum(args.gamma**n * r for n, r in enumerate(rewards[t:])) for t in range(len(response))])
            logratios.append([x.item() - y for x, y in zip(new, sampled_logprobs[i], strict=True)])
            losses.append(new)
            logged = sampled_logprobs[i] if args.overlap else [x.item() for x in new]
            sums.append(-sum(logged))
            divergences.append(sum(logged) - sum(teacher[t, token].item() for t, token in enumerate(response)))
            gap = max(gap, *map(abs, logratios[-1]))
        weighed, of_overlap = self.weighed(advantages, logratios) if not is_jsd else ([], {})
        if not is_jsd:  # REINFORCE; what it logs as the loss is -A.
            losses = [
                [-a * (x - x.item() + 1) for a, x in zip(*pair, strict=True)]
                for pair in zip(weighed, losses, strict=True)
            ]
            of_overlap |= {"val/logprob_gap": gap, "objective/entropy": mean(sums)}
        flat = [x for row in losses for x in row]
        norm = self.step(torch.stack(flat).mean(), self.learning_rate(number, num_updates))
        judged, texts = [self.score(*episode) for episode in episodes], []
        for query, response in episodes:
            texts.append([self.tokenizer.decode(ids, skip_special_tokens=True) for ids in (query, response)])
        prompts = len(episodes) // responses_per_prompt(args)
        return of_overlap | {
            "update": number,
            "episode": number * len(episodes),
            "epoch": number * prompts / self.num_prompts,
            "lr": self.learning_rate(number, num_updates),
            "objective/divergence": mean(divergences),
            "objective/divergence_per_token": sum(divergences) / len(flat),
            "objective/gold": mean(toy.gold(*pair) for pair in texts),
            "objective/parses": mean(toy.parses("".join(pair).lstrip()) for pair in texts),
            "loss/policy_avg": mean(x.item() for x in flat),
            "policy/entropy_avg": mean(entropies),
            "policy/grad_norm": norm,
            "val/num_stop_token_ids": sum(ended for _, _, ended in judged),
            "val/on_policy": float(args.on_policy_share == 1 or number % 2 == 0),  # a share of 1/2 begins with the data
            "val/sequence_lengths": mean(len(response) for _, response in episodes),
        }


class GrpoOracle(Oracle):
    """arXiv 2402.03300, with the choices of DAPO (2503.14476) and Dr. GRPO (2503.20783), GSPO and CISPO."""

    def __init__(self, *args):
        super().__init__(*args)
        self.start_optimiser()

    def advantage(self, scores, i):
        k, scale = self.args.group_size, self.args.scale_advantages
        group = scores[i // k * k : i // k * k + k]
        spread = {"group": statistics.stdev(group) + 1e-4, "batch": statistics.stdev(scores) + 1e-4, "none": 1.0}
        return (scores[i] - mean(group)) / spread[scale]

    def update(self, number, num_updates, episodes, orders, sampled_logprobs):
        args, k = self.args, self.args.group_size
        judged = [self.score(*episode) for episode in episodes]
        scores = [score for score, _, _ in judged]
        sampler = [self.logprobs(self.policy, *episode) for episode in episodes]
        ref = [self.logprobs(self.reference, *episode) for episode in episodes]
        logratios = [
            [a - b for a, b in zip(*rows, strict=True)] for rows in zip(sampler, sampled_logprobs, strict=True)
        ]
        advantages = [[self.advantage(scores, i)] * len(row) for i, row in enumerate(logratios)]
        advantages, of_overlap = self.weighed(advantages, logratios)
        acted = sampled_logprobs if args.overlap else sampler  # the log-probs of the policy that sampled
        actions, entropies, norms, kls, gap, first = [], [], [], [], 0.0, 1.0
        one_step = len(orders) * args.num_mini_batches == 1
        for order in orders:
            size = len(order) // args.num_mini_batches
            for part in range(args.num_mini_batches):
                losses, nothing = [], 0.0  # of each token of each response; a gradient of 0 where all are left out
                for i in order[part * size : (part + 1) * size]:
                    table, _ = self.distributions(self.policy, *episodes[i])
                    entropies += [-(row.exp() * row).sum().item() for row in table]
                    new = [table[t, token] for t, token in enumerate(episodes[i][1])]
                    old = [x.detach() for x in new] if one_step else sampler[i]
                    losses.append([])
                    logratios = [x - y for x, y in zip(new, old, strict=True)]
                    if args.objective == "gspo":
                        logratios = [mean(logratios)] * len(new)
                    for x, d, z, advantage in zip(new, logratios, ref[i], advantages[i], strict=True):
                        loss, clipped = self.surrogate(d.exp(), advantage)
                        if args.objective == "cispo":
                            weight, bound = math.exp(d.item()), 1 + args.cliprange_high
                            loss, clipped = -min(weight, bound) * advantage * x, weight > bound
                        first = first if norms else max(first, math.exp(abs(d.item())))
                        same = len(set(scores[i // k * k : i // k * k + k])) == 1
                        if (args.mask_truncated and not judged[i][2]) or (args.mask_equal and same):
                            nothing = nothing + 0 * x
                            continue
                        kl = ((z - x).exp() - (z - x) - 1) * (d.exp() if args.kl_times_ratio else 1)
                        losses[-1].append(loss + args.kl_coef * kl)
                        actions.append((loss.item(), d.item(), clipped))
                        kls.append(kl.item())
                    if not norms:
                        gap = max(gap, *(abs(x.item() - y) for x, y in zip(new, sampled_logprobs[i], strict=True)))
                if args.loss_normalization == "response":
                    loss = sum(mean(x) for x in losses if x) / len(losses)
                else:
                    tokens = max(1, sum(map(len, losses)))
                    fixed = len(losses) * args.response_length
                    loss = sum(map(sum, losses)) / (tokens if args.loss_normalization in ("token", None) else fixed)
                norms.append(self.step(loss + nothing, self.learning_rate(number, num_updates)))
        groups = [scores[i : i + k] for i in range(0, len(scores), k)]
        common = self.shared_metrics(number, num_updates, episodes, judged, acted, actions, entropies, norms)
        return (
            common
            | of_overlap
            | {
                "objective/kl": mean(sum(a) - sum(b) for a, b in zip(acted, ref, strict=True)),
                "loss/kl_avg": mean(kls),
                "val/logprob_gap": gap,
                "val/first_ratio": first,
                "val/equal_scores": mean(len(set(group)) == 1 for group in groups),
            }
        )


class PpoOracle(Oracle):
    """N+ (arXiv 2403.17031) and lm-human-preferences (arXiv 1909.08593)."""

    def __init__(self, *args):
        super().__init__(*args)
        self.critic = copy.deepcopy(self.reward)
        if self.args.value_model == "shared":
            self.critic = torch.nn.Linear(32, 1).double()
            torch.nn.init.zeros_(self.critic.weight), torch.nn.init.zeros_(self.critic.bias)
        self.parameters += list(self.critic.parameters())
        self.kl_coef, self.scores_seen = self.args.kl_coef, []
        self.start_optimiser()

    def look(self, query, response):
        """Log-probs [n], entropies [n] and values [states] of the policy as it is now."""
        table, hidden = self.distributions(self.policy, query, response)
        logprobs = [table[t, token] for t, token in enumerate(response)]
        entropies = [-(row.exp() * row).sum().item() for row in table]
        if self.args.value_model == "shared":
            values = self.critic(hidden)
        else:
            hidden = self.critic.base_model(torch.tensor([query + response])).last_hidden_state[0]
            values = self.critic.score(hidden) + self.bias
        states = min(len(response) + 1, self.args.response_length)
        return logprobs, entropies, [values[len(query) - 1 + j, 0] for j in range(states)]

    def penalties(self, query, response, logprobs, ref_logprobs):
        """What each token pays for, before the factor kl_coef."""
        if self.args.kl_penalty == "full":
            with torch.no_grad():
                p, q = (self.distributions(m, query, response)[0] for m in (self.policy, self.reference))
            return (p.exp() * (p - q)).sum(1).tolist()
        half_square = lambda x: x * x / 2  # noqa: E731
        formula = {"kl": lambda x: x, "abs": abs, "mse": half_square, "k2": half_square}
        formula = formula.get(self.args.kl_penalty, lambda x: math.exp(-x) - 1 + x)
        return [formula(a - b) for a, b in zip(logprobs, ref_logprobs, strict=True)]

    def shaped(self, scores):
        args = self.args
        self.scores_seen += scores
        if args.score_norm:
            scores = [x - mean(self.scores_seen) for x in scores]
        if args.score_scaling:
            scores = [x / statistics.stdev(self.scores_seen) for x in scores]
        return scores if args.score_clip is None else [min(max(x, -args.score_clip), args.score_clip) for x in scores]

    def gae(self, rewards, values):
        """Advantages by their definition, the sum of (gamma lam)^l delta_{t+l}, and returns."""
        gamma, n, after = self.args.gamma, len(rewards), [*values[1:], 0.0]
        deltas = [rewards[t] + gamma * after[t] - values[t] for t in range(n)]
        advantages = [sum((gamma * self.args.lam) ** (u - t) * deltas[u] for u in range(t, n)) for t in range(n)]
        return advantages, [a + v for a, v in zip(advantages, values, strict=True)]

    def update(self, number, num_updates, episodes, orders, sampled_logprobs):
        args = self.args
        with torch.no_grad():
            old = [self.look(*episode) for episode in episodes]
        old_logprobs = [[x.item() for x in logprobs] for logprobs, _, _ in old]
        old_values = [[x.item() for x in values] for _, _, values in old]
        ref = [self.logprobs(self.reference, *episode) for episode in episodes]
        penalties = [self.penalties(*e, p, q) for e, p, q in zip(episodes, old_logprobs, ref, strict=True)]
        judged = [self.score(*episode) for episode in episodes]
        scores = [score for score, _, _ in judged]
        shaped = self.shaped(scores)
        rewards = []
        for values, penalty, score in zip(old_values, penalties, shaped, strict=True):
            row = [-self.kl_coef * x for x in penalty] + [0.0] * (len(values) - len(penalty))
            row[-1] += score
            rewards.append(row)
        rewards = whitened(rewards, keep_mean=True) if args.whiten_rewards else rewards
        advantages, returns = zip(*map(self.gae, rewards, old_values), strict=True)
        advantages = [row[: len(response)] for row, (_, response) in zip(advantages, episodes, strict=True)]
        advantages = whitened(advantages) if args.normalize_advantage else advantages
        _, of_overlap = self.weighed([], [[0.0]])  # The weights are 1.
        old_logprobs = sampled_logprobs if args.overlap else old_logprobs  # the rule of asynchronous PPO

        actions, entropies, states, norms, skipped, gap, first, is_first = [], [], [], [], 0, 0.0, 1.0, True
        for order in orders:
            size, pass_kl = len(order) // args.num_mini_batches, []
            for part in range(args.num_mini_batches):
                policy_losses, value_losses, logratios = [], [], []
                for i in order[part * size : (part + 1) * size]:
                    logprobs, row_entropies, values = self.look(*episodes[i])
                    entropies += row_entropies
                    for t, new in enumerate(logprobs):
                        loss, clipped = self.surrogate((new - old_logprobs[i][t]).exp(), advantages[i][t])
                        policy_losses.append(loss)
                        logratios.append(new.item() - old_logprobs[i][t])
                        actions.append((loss.item(), logratios[-1], clipped))
                        if is_first:
                            gap = max(gap, abs(old_logprobs[i][t] - sampled_logprobs[i][t]))
                            first = max(first, math.exp(abs(logratios[-1])))
                    for t, new in enumerate(values):
                        low, high = (old_values[i][t] + sign * args.cliprange_value for sign in (-1, 1))
                        plain, held = (new - returns[i][t]) ** 2, (new.clamp(low, high) - returns[i][t]) ** 2
                        value_losses.append(0.5 * torch.max(plain, held))
                        loss = value_losses[-1].item()
                        states.append((loss, plain.item(), new.item(), held.item() > plain.item()))
                is_first = False
                pass_kl.append(mean(x * x / 2 for x in logratios))
                if args.ratio_threshold is not None and mean(map(math.exp, logratios)) > args.ratio_threshold:
                    skipped += 1
                    continue
                loss = torch.stack(policy_losses).mean() + args.vf_coef * torch.stack(value_losses).mean()
                norms.append(self.step(loss, self.learning_rate(number, num_updates)))
            if args.target_kl is not None and mean(pass_kl) > 1.5 * args.target_kl:
                break

        kl = mean(sum(p) - sum(q) for p, q in zip(old_logprobs, ref, strict=True))
        non_score = mean(-self.kl_coef * sum(row) for row in penalties)
        value_losses, errors, predictions, value_clipped = zip(*states, strict=True)
        flat_returns, flat_values = ([x for row in rows for x in row] for rows in (returns, old_values))
        common = self.shared_metrics(number, num_updates, episodes, judged, old_logprobs, actions, entropies, norms)
        total = common["loss/policy_avg"] + args.vf_coef * mean(value_losses)
        metrics = (
            common
            | of_overlap
            | {
                "objective/kl": kl,
                "objective/kl_coef": self.kl_coef,
                "objective/non_score_reward": non_score,
                "objective/rlhf_reward": mean(shaped) + non_score,
                "objective/score_total": mean(scores) + non_score,
                "objective/loss": total,
                "loss/value_avg": mean(value_losses),
                "loss/total_avg": total,
                "policy/skipped_minibatches": skipped,
                "returns/mean": mean(flat_returns),
                "returns/var": variance(flat_returns),
                "val/mean": mean(flat_values),
                "val/var": variance(flat_values),
                "val/vpred": mean(predictions),
                "val/error": mean(errors),
                "val/clipfrac_avg": mean(value_clipped),
                "val/var_explained": 1 - mean(errors) / variance(flat_returns),
                "val/logprob_gap": gap,
                "val/first_ratio": first,
                "val/equal_scores": float(len(set(scores)) == 1),
            }
        )
        if args.adaptive_kl:
            self.kl_coef *= 1 + min(max(kl / args.kl_target - 1, -0.2), 0.2) * len(episodes) / args.kl_horizon
        return metrics
