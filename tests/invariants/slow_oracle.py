"""RLOO, GRPO, PPO and distillation from their definitions: an unpadded row at a time, plain transformers in float64.

They are for the options of the pages. Without options the minimal pages are the oracles: test_minimal.py.

Python loops, and nothing that calls the package, except for the embedded task's known reward and the shuffle of rows.
Episodes are pairs (query, response) of lists of token ids, and `orders` says in which order each pass takes them.
"""

import copy
import math
from statistics import fmean as mean
from statistics import pvariance, stdev

import torch
import transformers
from helpers import responses_per_prompt

from rlhf_details import toy, utils

# Of which responses of a batch of 8 a function of --reward_fn abstains, by its name. It gives the others 0.
ABSTAINS = {"some": {1, 6}, "a_group": {0, 1, 2, 3}, "all_but_two": {0, 1, 2, 3, 6, 7}, "all_but_one": {*range(7)}}


def flat(rows):
    return [x for row in rows for x in row]


def less(rows, others):
    """rows - others, of lists of lists."""
    return [[a - b for a, b in zip(*pair, strict=True)] for pair in zip(rows, others, strict=True)]


def whitened(rows, keep_mean=False):
    """Rows of floats of any lengths, whitened over all of them with the biased variance."""
    m, scale = mean(flat(rows)), 1 / math.sqrt(pvariance(flat(rows)) + 1e-8)
    return [[(x - m) * scale + (m if keep_mean else 0.0) for x in row] for row in rows]


def held(rows, bound):
    """Numbers, none of them further than `bound` from 0."""
    return rows if bound is None else [min(max(x, -bound), bound) for x in rows]


class Oracle:
    """What the algorithms share. Subclasses have `update`, which returns what is to be logged."""

    def __init__(self, folder, args, num_prompts):
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.args, self.num_prompts = args, num_prompts
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "policy")
        self.policy, self.reference = (load(folder / "policy").double() for _ in range(2))
        if hasattr(args, "teacher_model_path"):
            self.reference = load(args.teacher_model_path).double()
        self.reward = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "reward").double()
        self.bias = self.reward.config.reward_bias
        self.parameters, self.steps = list(self.policy.parameters()), 0

    # ---- tokens, log-probs and scores
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

    def read_by_teacher(self, query):
        """A query with what --teacher_prompt_template "the {prompt} ." puts around it."""
        if getattr(self.args, "teacher_prompt_template", None) is None:
            return query
        before, after = (self.tokenizer(text).input_ids for text in ("the", "."))
        return before + query + after

    def look(self, query, response):
        """Log-probs [n] and distributions [n, V] of the policy as it is now, and hidden states. Notes entropies."""
        table, hidden = self.distributions(self.policy, query, response)
        self.wide = [-(row.exp() * row).sum() for row in table]
        self.entropies += [x.item() for x in self.wide]
        return [table[t, token] for t, token in enumerate(response)], table, hidden

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

    # ---- an update
    def begin(self, number, num_updates, episodes):
        """Returns the scores."""
        self.number, self.lr = number, self.args.learning_rate * (1 - (number - 1) / num_updates)
        self.episodes, self.judged = episodes, [self.score(*episode) for episode in episodes]
        self.known = [i for i, (_, response) in enumerate(episodes) if not self.abstains(i)]
        self.actions, self.entropies, self.norms = [], [], []
        return [score for score, _, _ in self.judged]

    def abstains(self, i):
        """Whether a function of --reward_fn abstains from the i-th response of the batch."""
        return any(i in ABSTAINS[spec.rpartition(":")[2]] for spec in self.args.reward_fn)

    def minibatches(self, order):
        size = len(order) // self.args.num_mini_batches
        return [order[i : i + size] for i in range(0, len(order), size)]

    def act(self, loss, logratio, clipped):
        """Notes an action and returns its loss."""
        self.actions.append((loss.item(), logratio.item(), clipped))
        return loss

    def surrogate(self, logratio, advantage):
        """The clipped surrogate of one action; it is clipped where the clipped side decides."""
        c, ratio = 0.2 if self.args.cliprange is None else self.args.cliprange, logratio.exp()
        above = c if getattr(self.args, "cliprange_high", None) is None else self.args.cliprange_high
        plain, clipped = -advantage * ratio, -advantage * ratio.clamp(1 - c, 1 + above)
        return self.act(torch.max(plain, clipped), logratio, clipped.item() > plain.item())

    def weighed(self, advantages, logratios):
        """Under --overlap, advantages times the action's probability over that when it was sampled, at most the cap."""
        if not self.args.overlap:
            return advantages, {}
        pairs = list(zip(advantages, logratios, strict=True))
        ratios = [[math.exp(x) for x in (row if len(a) == len(row) else [sum(row)])] for a, row in pairs]
        cap = self.args.sampler_cap
        weights, cut = [[min(x, cap) for x in row] for row in ratios], [x > cap for x in flat(ratios)]
        found = {"val/sampler_weight": mean(flat(weights)), "val/sampler_cut": mean(cut)}
        pairs = zip(advantages, weights, strict=True)
        return [[a * w for a, w in zip(*pair, strict=True)] for pair in pairs], found

    def step(self, loss):
        """One step of AdamW, or of TensorFlow's Adam from its paper."""
        args = self.args
        if not self.steps:
            self.adamw = torch.optim.AdamW(self.parameters, eps=args.adam_eps, weight_decay=args.weight_decay)
            self.moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in self.parameters]
        self.steps += 1
        self.adamw.zero_grad()
        loss.backward()
        norm = math.sqrt(sum(p.grad.square().sum().item() for p in self.parameters))
        self.norms.append(norm)
        if args.max_grad_norm is not None and norm > args.max_grad_norm:
            for p in self.parameters:
                p.grad *= args.max_grad_norm / norm
        if not getattr(args, "tf_adam", False):
            self.adamw.param_groups[0]["lr"] = self.lr
            self.adamw.step()
            return
        rate = self.lr * math.sqrt(1 - 0.999**self.steps) / (1 - 0.9**self.steps)
        with torch.no_grad():
            for p, (m, v) in zip(self.parameters, self.moments, strict=True):
                m.mul_(0.9).add_(0.1 * p.grad), v.mul_(0.999).add_(0.001 * p.grad**2)
                p -= self.lr * args.weight_decay * p + rate * m / (v.sqrt() + args.adam_eps)

    # ---- what is logged
    def metrics_of_all(self, losses):
        """What every page logs. losses: of each action or token of each pass."""
        episodes = self.episodes
        has_end = {self.args.stop_token, getattr(self.args, "truncate_token", "none")} != {"none"}
        texts = [
            [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in (query, read)]
            for (query, _), (_, read, _) in zip(episodes, self.judged, strict=True)
        ]
        return {
            "update": self.number,
            "episode": self.number * len(episodes),
            "epoch": self.number * len(episodes) / responses_per_prompt(self.args) / self.num_prompts,
            "lr": self.lr,
            "objective/gold": mean(toy.gold(*pair) for pair in texts),
            "objective/parses": mean(toy.parses("".join(pair).lstrip()) for pair in texts),
            "loss/policy_avg": mean(losses),
            "policy/entropy_avg": mean(self.entropies),
            "policy/grad_norm": mean(self.norms or [0]),
            "val/num_stop_token_ids": sum(ended for _, _, ended in self.judged) if has_end else 0,
            "val/sequence_lengths": mean(len(response) for _, response in episodes),
        }

    def metrics_of_rewards(self, old_logprobs, ref):
        """What the pages that train on rewards log beside. old_logprobs: those of the policy that sampled."""
        losses, logratios, clipped = zip(*self.actions, strict=True)
        ratios, eos, known = [math.exp(x) for x in logratios], self.token("eos"), self.known
        return self.metrics_of_all(losses) | {
            "objective/entropy": mean(-sum(old_logprobs[i]) for i in known),
            "objective/scores": mean(self.judged[i][0] for i in known),
            "objective/kl": mean(sum(less(old_logprobs, ref)[i]) for i in known),
            "val/abstained": 1 - len(known) / len(self.episodes),
            "policy/approxkl_avg": mean(x * x / 2 for x in logratios),
            "policy/clipfrac_avg": mean(clipped),
            "val/ratio": mean(ratios),
            "val/ratio_var": pvariance(ratios),
            "val/num_eos_tokens": sum(response.count(eos) for _, response in self.episodes),
        }


class GroupOracle(Oracle):
    """RLOO and GRPO. Subclasses have `advantages`, `losses` of a response's actions, and `total` of a minibatch."""

    def update(self, number, num_updates, episodes, orders, sampled_logprobs):
        args, k = self.args, responses_per_prompt(self.args)
        scores = self.begin(number, num_updates, episodes)
        sampler, ref = ([self.logprobs(m, *e) for e in episodes] for m in (self.policy, self.reference))
        size = k if k > 1 else len(scores)
        groups = [[scores[j] for j in self.known if j // size == i // size] for i in range(len(scores))]
        self.equal = [len(set(group)) <= 1 for group in groups]
        self.learners = [i for i in self.known if k == 1 or len(groups[i]) > 1]
        advantages, found = self.advantages(scores, less(sampler, ref), k)
        advantages, of_overlap = self.weighed(advantages, less(sampler, sampled_logprobs))
        one_step = len(orders) * args.num_mini_batches == 1
        for part in flat(map(self.minibatches, orders)):
            losses = []
            for i in part:
                new, _, _ = self.look(*episodes[i])
                old = [x.detach() for x in new] if one_step else sampler[i]
                if i in self.learners:
                    losses.append(self.losses(i, new, *less([new], [old]), advantages[i], ref[i]))
            if any(losses):  # No step is made where nothing teaches.
                self.step(self.total(losses))
        found |= {"val/first_ratio": 1.0, "val/equal_scores": mean(self.equal)}
        return self.metrics_of_rewards(sampled_logprobs if args.overlap else sampler, ref) | of_overlap | found


class RlooOracle(GroupOracle):
    """arXiv 2402.14740 for whole responses, and REINFORCE++ (arXiv 2501.03262) for tokens with --token_level_kl."""

    def advantages(self, scores, kl, k):
        args, advantages = self.args, []
        shaped = [scores[i] for i in self.known]
        shaped = held(whitened([shaped])[0] if args.normalize_reward else shaped, args.reward_clip_range)
        shaped = dict(zip(self.known, shaped, strict=True))
        rewards = {i: x - args.kl_coef * sum(kl[i]) for i, x in shaped.items()}
        for i, row in enumerate(kl):
            siblings = [j for j in self.known if j // k == i // k and j != i]
            if i not in self.learners:
                advantages.append([0.0] * (len(row) if args.token_level_kl else 1))
            elif args.token_level_kl:
                base = shaped[i] - (mean(shaped[j] for j in siblings) if siblings else 0.0)
                advantages.append([base - args.kl_coef * sum(row[t:]) for t in range(len(row))])
            else:
                advantages.append([rewards[i] - mean(rewards[j] for j in siblings)])
        if args.normalize_advantage:
            white = whitened([advantages[i] for i in self.learners])
            advantages = [white[self.learners.index(i)] if i in self.learners else x for i, x in enumerate(advantages)]
        non_score = -args.kl_coef * mean(sum(kl[i]) for i in self.known)
        return advantages, {"objective/non_score_reward": non_score, "objective/rlhf_reward": mean(rewards.values())}

    def losses(self, i, new, logratios, advantages, ref):
        logratios = logratios if self.args.token_level_kl else [sum(logratios)]
        return [self.surrogate(*action) for action in zip(logratios, advantages, strict=True)]

    def total(self, losses):
        return torch.stack(flat(losses)).mean()


class GrpoOracle(GroupOracle):
    """arXiv 2402.03300, with the choices of DAPO (2503.14476) and Dr. GRPO (2503.20783), GSPO and CISPO."""

    def __init__(self, *given):
        super().__init__(*given)
        self.was_low = []  # whether the entropy of each earlier update was below its target

    def advantages(self, scores, kl, k):
        advantages, self.kls = [], []
        for i, score in enumerate(scores):
            group = [scores[j] for j in self.known if j // k == i // k]
            if i not in self.learners:
                advantages.append([0.0] * len(kl[i]))
                continue
            spread = {"group": stdev(group) + 1e-4, "none": 1.0}
            spread["batch"] = stdev(scores[j] for j in self.known) + 1e-4
            advantages.append([(score - mean(group)) / spread[self.args.scale_advantages]] * len(kl[i]))
        return advantages, {}

    def losses(self, i, new, logratios, advantages, ref):
        args, found = self.args, []
        if (args.mask_truncated and not self.judged[i][2]) or (args.mask_equal and self.equal[i]):
            return []
        if args.objective == "gspo":
            logratios = [sum(logratios) / len(new)] * len(new)
        for x, d, z, advantage, wide in zip(new, logratios, ref, advantages, self.wide, strict=True):
            if args.objective == "cispo":
                weight, bound = math.exp(d.item()), 1 + args.cliprange_high
                loss = self.act(-min(weight, bound) * advantage * x, d, weight > bound)
            else:
                loss = self.surrogate(d, advantage)
            kl = ((z - x).exp() - (z - x) - 1) * (d.exp() if args.kl_times_ratio else 1)
            self.kls.append(kl.item())
            found.append(loss + args.kl_coef * kl - self.bonus() * wide)
        return found

    def total(self, losses):
        kind = self.args.loss_normalization
        if kind == "response":
            return sum(sum(x) / len(x) for x in losses if x) / len(losses)
        tokens, fixed = max(1, len(flat(losses))), len(losses) * self.args.response_length
        return sum(flat(losses)) / (fixed if kind == "constant" else tokens)

    def bonus(self):
        """What an action's entropy is paid: arXiv 2505.22312 where there is a target."""
        args = self.args
        if args.entropy_target is None:
            return args.entropy_coef
        steps = 0
        for is_low in self.was_low:
            steps = max(0, min(50, steps + (1 if is_low else -1)))
        return args.entropy_coef * steps / 50 if self.was_low and self.was_low[-1] else 0.0

    def update(self, *given):
        coef = {"objective/entropy_coef": self.bonus()} if self.args.entropy_coef else {}
        found = super().update(*given) | {"loss/kl_avg": mean(self.kls)} | coef
        self.was_low.append(
            self.args.entropy_target is not None and found["policy/entropy_avg"] < self.args.entropy_target
        )
        return found


class DistillOracle(Oracle):
    """Rewards by a teacher, which is the reference (Lu and Thinking Machines Lab, 2025), or GKD (arXiv 2306.13649)."""

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

    def update(self, number, num_updates, episodes, orders, sampled_logprobs):
        args, is_jsd = self.args, self.args.divergence == "jsd"
        self.begin(number, num_updates, episodes)
        new, tables, _ = zip(*[self.look(*episode) for episode in episodes], strict=True)
        read = [(self.read_by_teacher(query), response) for query, response in episodes]
        teacher = [self.logprobs(self.reference, *episode) for episode in read]
        if is_jsd:
            with torch.no_grad():
                theirs = [self.distributions(self.reference, *episode)[0] for episode in read]
            pairs = zip(tables, theirs, strict=True)
            losses = [[self.jsd(*rows) for rows in zip(*pair, strict=True)] for pair in pairs]
            divergences, found = [sum(x.item() for x in row) for row in losses], {}
        else:  # REINFORCE; what it logs as the loss is -A.
            ours = [[x.item() for x in row] for row in new]
            rewards = less(teacher, ours)
            advantages = [[sum(args.gamma**n * r for n, r in enumerate(x[t:])) for t in range(len(x))] for x in rewards]
            advantages, found = self.weighed(advantages, less(ours, sampled_logprobs))
            pairs = zip(advantages, new, strict=True)
            losses = [[-a * (x - x.item() + 1) for a, x in zip(*pair, strict=True)] for pair in pairs]
            logged = sampled_logprobs if args.overlap else ours
            divergences = list(map(sum, less(logged, teacher)))
            found["objective/entropy"] = mean(-sum(row) for row in logged)
        self.step(torch.stack(flat(losses)).mean())
        return self.metrics_of_all([x.item() for x in flat(losses)]) | found | {
            "objective/divergence": mean(divergences),
            "objective/divergence_per_token": sum(divergences) / len(flat(losses)),
            "val/on_policy": float(args.on_policy_share == 1 or number % 2 == 0),  # a share of 1/2 begins with the data
        }  # fmt: skip


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

    def values(self, query, response, hidden):
        """Values [states]. Args: hidden, the policy's hidden states."""
        if self.args.value_model == "shared":
            values = self.critic(hidden)
        else:
            hidden = self.critic.base_model(torch.tensor([query + response])).last_hidden_state[0]
            values = self.critic.score(hidden) + self.bias
        states = min(len(response) + 1, self.args.response_length)
        return [values[len(query) - 1 + j, 0] for j in range(states)]

    def penalties(self, query, response, logprobs, ref_logprobs):
        """What each token pays for, before the factor kl_coef."""
        if self.args.kl_penalty == "full":
            with torch.no_grad():
                p, q = (self.distributions(m, query, response)[0] for m in (self.policy, self.reference))
            return (p.exp() * (p - q)).sum(1).tolist()
        (rows,) = less([logprobs], [ref_logprobs])
        formulas = {"kl": lambda x: x, "abs": abs, "k3": lambda x: math.exp(-x) - 1 + x}
        return [formulas.get(self.args.kl_penalty, lambda x: x * x / 2)(x) for x in rows]

    def shaped(self, scores):
        args = self.args
        self.scores_seen += scores
        if args.score_norm:
            scores = [x - mean(self.scores_seen) for x in scores]
        if args.score_scaling:
            scores = [x / stdev(self.scores_seen) for x in scores]
        return held(scores, args.score_clip)

    def gae(self, rewards, values):
        """Advantages by their definition, the sum of (gamma lam)^l delta_{t+l}, and returns."""
        gamma, n, after = self.args.gamma, len(rewards), [*values[1:], 0.0]
        deltas = [rewards[t] + gamma * after[t] - values[t] for t in range(n)]
        advantages = [sum((gamma * self.args.lam) ** (u - t) * deltas[u] for u in range(t, n)) for t in range(n)]
        return advantages, [a + v for a, v in zip(advantages, values, strict=True)]

    def value_loss(self, new, old, wanted):
        """The clipped loss of a value; notes it."""
        plain = (new - wanted) ** 2
        clipped = (new.clamp(old - self.args.cliprange_value, old + self.args.cliprange_value) - wanted) ** 2
        loss = 0.5 * torch.max(plain, clipped)
        self.states.append((loss.item(), plain.item(), new.item(), clipped.item() > plain.item()))
        return loss

    def update(self, number, num_updates, episodes, orders, sampled_logprobs):
        args, scores, known = self.args, self.begin(number, num_updates, episodes), self.known
        scores = [scores[i] for i in known]
        old_logprobs, ref = ([self.logprobs(m, *e) for e in episodes] for m in (self.policy, self.reference))
        with torch.no_grad():
            hidden = [self.distributions(self.policy, *episode)[1] for episode in episodes]
            old_values = [[x.item() for x in self.values(*e, h)] for e, h in zip(episodes, hidden, strict=True)]
        penalties = [self.penalties(*e, p, q) for e, p, q in zip(episodes, old_logprobs, ref, strict=True)]
        shaped, rewards = self.shaped(scores), []
        for i, score in zip(known, shaped, strict=True):
            row = [-self.kl_coef * x for x in penalties[i]] + [0.0] * (len(old_values[i]) - len(penalties[i]))
            row[-1] += score
            rewards.append(row)
        rewards = whitened(rewards, keep_mean=True) if args.whiten_rewards else rewards
        advantages, returns = zip(*map(self.gae, rewards, [old_values[i] for i in known]), strict=True)
        advantages = [row[: len(episodes[i][1])] for i, row in zip(known, advantages, strict=True)]
        advantages = whitened(advantages) if args.normalize_advantage else advantages
        advantages, returns = (dict(zip(known, x, strict=True)) for x in (advantages, returns))
        _, of_overlap = self.weighed([[1.0]], [[0.0]])  # The weights are 1.
        old_logprobs = sampled_logprobs if args.overlap else old_logprobs  # the rule of asynchronous PPO

        self.states, skipped, first = [], 0, None
        for order in orders:
            pass_kl = []
            for part in self.minibatches(order):
                policy_losses, value_losses, before = [], [], len(self.actions)
                for i in (i for i in part if i in known):
                    logprobs, _, hidden = self.look(*episodes[i])
                    for new, old, advantage in zip(logprobs, old_logprobs[i], advantages[i], strict=True):
                        policy_losses.append(self.surrogate(new - old, advantage))
                    values = self.values(*episodes[i], hidden)
                    value_losses += map(self.value_loss, values, old_values[i], returns[i])
                logratios = [x for _, x, _ in self.actions[before:]] or [0.0]
                first = first or max(math.exp(abs(x)) for x in logratios)
                pass_kl.append(mean(x * x / 2 for x in logratios))
                if args.ratio_threshold is not None and mean(map(math.exp, logratios)) > args.ratio_threshold:
                    skipped += 1
                    continue
                if policy_losses:
                    self.step(torch.stack(policy_losses).mean() + args.vf_coef * torch.stack(value_losses).mean())
            if args.target_kl is not None and mean(pass_kl) > 1.5 * args.target_kl:
                break

        metrics = self.metrics_of_rewards(old_logprobs, ref)
        non_score = -self.kl_coef * mean(sum(penalties[i]) for i in known)
        returns, old_values = returns.values(), [old_values[i] for i in known]
        value_losses, errors, predictions, value_clipped = zip(*self.states, strict=True)
        total = metrics["loss/policy_avg"] + args.vf_coef * mean(value_losses)
        metrics |= of_overlap | {
            "objective/kl_coef": self.kl_coef,
            "objective/non_score_reward": non_score,
            "objective/rlhf_reward": mean(shaped) + non_score,
            "objective/score_total": mean(scores) + non_score,
            "objective/loss": total,
            "loss/value_avg": mean(value_losses),
            "loss/total_avg": total,
            "policy/skipped_minibatches": skipped,
            "returns/mean": mean(flat(returns)),
            "returns/var": pvariance(flat(returns)),
            "val/mean": mean(flat(old_values)),
            "val/var": pvariance(flat(old_values)),
            "val/vpred": mean(predictions),
            "val/error": mean(errors),
            "val/clipfrac_avg": mean(value_clipped),
            "val/var_explained": 1 - mean(errors) / pvariance(flat(returns)),
            "val/first_ratio": first,
            "val/equal_scores": float(len(set(scores)) == 1),
        }
        if args.adaptive_kl:
            error = min(max(metrics["objective/kl"] / args.kl_target - 1, -0.2), 0.2)
            self.kl_coef *= 1 + error * len(episodes) / args.kl_horizon
        return metrics
