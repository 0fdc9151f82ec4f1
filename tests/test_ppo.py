"""Claims about whole runs of train_ppo: what may not change the result, what must hold at every update, and a slow oracle."""

import ast
import copy
import dataclasses
import itertools
import json
import math
import shutil
import statistics
from pathlib import Path

import pytest
import torch
import transformers
import worker
from conftest import ROOT, launch, ppo_args, read_metrics, run_ppo, save_pair
from test_rloo import SMALL, assert_same_curves, random_batch, run_worker, sampled_tokens, tiny_model, without_times

from rlhf_details import toy, train_ppo, utils

# the two published recipes, in small; what they share with ppo_args is left out
NPLUS = dict(stop_token="eos", missing_eos_mode="subtract", value_model="separate", kl_coef=0.05)
OPENAI = dict(
    stop_token="none", truncate_token="eos", truncate_after=2, missing_eos_mode="replace", value_model="shared",
    adaptive_kl=True, kl_coef=0.15, whiten_rewards=True, tf_adam=True,
)  # fmt: skip
RECIPES = {"nplus": NPLUS, "openai": OPENAI}
both_recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
both_value_models = pytest.mark.parametrize("value_model", ["separate", "shared"])


@pytest.fixture
def in_tmp(in_tmp, monkeypatch):
    """96 prompts are enough here; tokenising all 4096 would be half of a test's time."""
    rows = toy.rows
    for stage, split in toy.SPLITS:
        rows(stage, split)  # cached before the name is another function's: the test rows are made with the training rows
    monkeypatch.setattr(toy, "rows", lambda stage, split, task="toy": rows(stage, split)[:96])
    return in_tmp


@pytest.fixture(scope="session")
def ragged(tmp_path_factory):
    """The tiny pair, but the policy often says EOS, so that lengths differ, and the reward model has a `reward_bias`."""
    folder = save_pair(tmp_path_factory.mktemp("ragged"))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "policy")
    with torch.no_grad():
        eos = model.get_output_embeddings().weight[model.config.eos_token_id]
        model.gpt_neox.final_layer_norm.bias += 3.5 * eos / eos.square().sum()  # its logit gains 3.5
    model.save_pretrained(folder / "policy")
    config = json.loads((folder / "reward/config.json").read_text())
    (folder / "reward/config.json").write_text(json.dumps(config | {"reward_bias": 0.7}))
    return folder


def recorded(monkeypatch, *names):
    """{name: list of (arguments, result)} of every later call of these functions of train_ppo, rows in the batch's order."""
    calls = {name: [] for name in names}
    monkeypatch.setattr(train_ppo, "by_length", lambda masks, n=1: torch.arange(len(masks[0])))

    def replace(name, real, seen):
        monkeypatch.setattr(train_ppo, name, lambda *args: seen.append((args, real(*args))) or seen[-1][1])

    for name in names:
        replace(name, getattr(train_ppo, name), calls[name])
    return calls


def same_curves(a, b):
    """assert_same_curves, but for the gap between sampler and training forward, which is rounding error and only small."""
    a, b = ([dict(row) for row in rows] for rows in (a, b))
    assert all(row.pop("val/logprob_gap", 0) < 1e-4 for row in a + b)
    assert_same_curves(a, b)


def made_policies(monkeypatch):
    """The Policy objects of later runs; of one run the first is the reference, the second the policy with its critic."""
    made, real = [], train_ppo.Policy
    monkeypatch.setattr(train_ppo, "Policy", lambda *args: made.append(real(*args)) or made[-1])
    return made


def initial_weights(folder, value_model):
    """State dictionary of the Policy that a run starts from."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "policy")
    state = {f"model.{name}": x for name, x in model.state_dict().items()}
    if value_model == "shared":
        return state | {"critic.weight": torch.zeros(1, 32), "critic.bias": torch.zeros(1)}
    reward = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "reward")
    return state | {f"critic.model.{name}": x for name, x in reward.state_dict().items()}


def epoch_rows(B, update, epochs, minibatches, micro=10**9):
    """Numbers of the episodes of every micro-batch of an update, in order."""
    orders = [torch.tensor(utils.permutation(B, 1, update, epoch)) for epoch in range(epochs)]
    return [rows for order in orders for part in order.chunk(minibatches) for rows in part.split(micro)]


# ---- what is a memory or hardware knob never changes the result ------------------------------------------------------
VALVES = dict(score_scaling=True, score_norm=True, score_clip=1.5, ratio_threshold=1.004, target_kl=3e-4)


@pytest.mark.slow
@pytest.mark.parametrize("options", [NPLUS | VALVES, OPENAI], ids=["nplus-valves", "openai"])
def test_two_processes_sample_the_same_tokens_and_give_the_same_curves(ragged, tmp_path, monkeypatch, options):
    prompts = tmp_path / "odd.jsonl"  # 41 rows do not divide by two
    prompts.write_text("".join(json.dumps(row) + "\n" for row in toy.rows("prompts", "test")[:41]))
    knobs = dict(num_ppo_epochs=2, num_mini_batches=2, micro_batch_size=3, rollout_micro_batch_size=5)
    knobs |= dict(dataset=str(prompts)) if options is not OPENAI else {}
    args = ppo_args(ragged, total_episodes=160, eval_dataset=str(prompts), num_sample_generations=2, **knobs, **options)
    two, second = run_worker(tmp_path / "2", args, 2)  # asserts the world size and the kind of distribution
    monkeypatch.chdir(tmp_path)
    with worker.recording("train_ppo") as first:
        one = read_metrics(train_ppo.main(args)["run"])
    assert first["world"] == 1 and first["kind"] == "NO"
    tokens = sampled_tokens([first])
    assert len(tokens) == 160 and tokens == sampled_tokens(second)
    assert len({tuple(t) for t in tokens.values()}) > 100
    assert [row["update"] for row in one] == list(range(11))
    same_curves(one, two)
    if "target_kl" in options:  # every valve was open at times and shut at times
        assert len({row["val/optimizer_steps"] for row in one[1:]}) > 1
        assert 0 < sum(row["policy/skipped_minibatches"] > 0 for row in one[1:]) < 10
        assert any(row["val/optimizer_steps"] + row["policy/skipped_minibatches"] < 4 for row in one[1:])
    else:
        assert len({row["objective/kl_coef"] for row in one[1:]}) == 10


@pytest.mark.parametrize("recipe", [NPLUS, pytest.param(OPENAI, marks=pytest.mark.slow)], ids=["nplus", "openai"])
def test_opt_5_micro_batch_and_slice_sizes_change_nothing(ragged, in_tmp, recipe):
    options = recipe | dict(num_ppo_epochs=2, num_mini_batches=2, learning_rate=3e-4, kl_penalty="full")
    reference = run_ppo(ragged, micro_batch_size=1000, rollout_micro_batch_size=1000, **options)
    for micro, rollout in ((1, 1), (3, 5)):
        same_curves(reference, run_ppo(ragged, micro_batch_size=micro, rollout_micro_batch_size=rollout, **options))
    assert min(row["objective/non_score_reward"] for row in reference) < -1e-5


@both_value_models
def test_gradient_checkpointing_recomputes_every_layer_and_changes_nothing(ragged, in_tmp, monkeypatch, value_model):
    calls = []
    layer = transformers.models.gpt_neox.modeling_gpt_neox.GPTNeoXMLP
    forward = layer.forward
    monkeypatch.setattr(layer, "forward", lambda self, x: calls.append(torch.is_grad_enabled()) or forward(self, x))
    counts, curves = [], []
    for on in (False, True):
        calls.clear()
        options = dict(num_ppo_epochs=2, micro_batch_size=8, total_episodes=32, value_model=value_model)
        curves.append(run_ppo(ragged, gradient_checkpointing=on, **options))
        counts.append(sum(calls))
    networks = 2 if value_model == "separate" else 1
    assert counts[0] == 2 * 2 * 2 * 2 * networks  # updates, passes, micro-batches, layers
    assert counts[1] == 2 * counts[0]  # once in the forward, once more in the backward pass
    same_curves(*curves)


@both_value_models
def test_eager_and_sdpa_attention_give_the_same_curves(ragged, in_tmp, monkeypatch, value_model):
    made = made_policies(monkeypatch)
    same_curves(*(run_ppo(ragged, attn_implementation=name, value_model=value_model) for name in ("sdpa", "eager")))
    models = [p.model for p in made] + [p.critic.model for p in made if value_model == "separate" and p.critic]
    assert sorted(m.config._attn_implementation for m in models) == sorted(["sdpa", "eager"] * (len(models) // 2))


@both_recipes
def test_two_identical_runs_are_bitwise_equal_and_another_seed_is_another_run(ragged, in_tmp, recipe):
    runs = [run_ppo(ragged, run_name=n, output_dir=n, num_sample_generations=3, **recipe) for n in ("a", "b")]
    assert without_times(runs[0]) == without_times(runs[1])
    assert Path("runs/a/samples.jsonl").read_text() == Path("runs/b/samples.jsonl").read_text() != ""
    assert Path("a/model.safetensors").read_bytes() == Path("b/model.safetensors").read_bytes()
    assert without_times(run_ppo(ragged, seed=2, **recipe)) != without_times(runs[0])


@both_recipes
def test_every_metric_is_blind_to_padding(ragged, in_tmp, monkeypatch, recipe):
    """More left padding for the queries, and nothing trimmed: the masks alone must do the work."""
    options = recipe | dict(num_ppo_epochs=2, num_mini_batches=2, eval_dataset="toy:test", response_length=12, kl_penalty="k3")
    options |= dict(total_episodes=32)
    reference = run_ppo(ragged, **options)
    left_pad = utils.left_pad

    def wide(rows, device=None):
        tokens, mask = left_pad(rows, device)
        return torch.nn.functional.pad(tokens, (7, 0), value=5), torch.nn.functional.pad(mask, (7, 0))

    monkeypatch.setattr(utils, "left_pad", wide)
    monkeypatch.setattr(train_ppo, "trim", lambda batch: batch)
    same_curves(reference, run_ppo(ragged, **options))
    assert (reference[1]["val/sequence_lengths"] == 12) == (recipe is OPENAI)  # else there was padding on the right as well


def test_the_exact_kl_is_blind_to_padding_and_never_negative(ragged, in_tmp, monkeypatch):
    options = dict(kl_penalty="full", kl_coef=0.3, response_length=12, learning_rate=3e-3)
    reference = run_ppo(ragged, **options)
    assert [row["objective/non_score_reward"] < -1e-3 for row in reference] == [False, True, True]
    monkeypatch.setattr(train_ppo, "trim", lambda batch: batch)
    same_curves(reference, run_ppo(ragged, **options))


def test_accumulation_of_the_launch_configuration_changes_nothing(ragged, in_tmp, monkeypatch):
    reference = run_ppo(ragged, micro_batch_size=4)
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert without_times(run_ppo(ragged, micro_batch_size=4)) == without_times(reference)


@pytest.mark.slow
def test_bf16_keeps_fp32_weights_log_probs_and_values(ragged, tmp_path):
    args = ppo_args(ragged, total_episodes=32, num_ppo_epochs=2)
    metrics, (record,) = run_worker(tmp_path / "run", args, 1, ACCELERATE_MIXED_PRECISION="bf16")  # asserts fp32 outputs
    assert record["matmul_dtypes"] == {"torch.bfloat16"}  # sampler, reference and training alike
    assert record["weight_dtypes"] == {"torch.float32"}
    assert all(math.isfinite(v) for row in metrics for v in row.values())
    assert 0 < metrics[0]["val/logprob_gap"] < 0.5
    saved = utils.load_policy(tmp_path / "run" / "models/ppo", "--sft_model_path")
    assert next(saved.parameters()).dtype == torch.float32


@both_value_models
@torch.no_grad()
def test_under_autocast_values_are_not_rounded(ragged, value_model):
    reward = utils.load_reward_model(ragged / "reward", "")
    critic = train_ppo.Reward(reward) if value_model == "separate" else copy.deepcopy(reward.score)
    policy = train_ppo.Policy(
        utils.load_policy(ragged / "policy", ""), 1.0, torch.nn.Linear(32, 1) if value_model == "shared" else critic
    )
    queries, query_mask, responses, mask = random_batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logprobs, _, values = train_ppo.response_logprobs(policy, (queries, query_mask, responses, mask))
    for x in (logprobs, values):
        assert x.dtype == torch.float32 and (x != x.bfloat16().float())[mask].float().mean() > 0.9


@torch.no_grad()
def score_of(reward, tokens):
    """Score of an unpadded row under the pair `ragged`; transformers' own reading of it would stop at a sampled <pad>."""
    return reward.score(reward.base_model(tokens.unsqueeze(0)).last_hidden_state)[0, -1, 0].item() + 0.7


# ---- values ----------------------------------------------------------------------------------------------------------
CHANGES = {
    "opt": dict(ffn_dim=64, word_embed_proj_dim=32),
    "opt-projected": dict(ffn_dim=64, word_embed_proj_dim=16),
    "gptj": dict(rotary_dim=8),
}


@pytest.mark.parametrize("kind", ["gpt_neox", "gpt2", "llama", "qwen2", "opt", "opt-projected", "gptj", "phi"])
def test_the_shared_head_reads_what_the_language_model_head_reads(kind):
    model = tiny_model(kind.removesuffix("-projected"), **CHANGES.get(kind, {}))
    head = model.get_output_embeddings()
    torch.manual_seed(1)
    policy, batch = train_ppo.Policy(model, 0.7, torch.nn.Linear(head.in_features, 1)), random_batch()
    read = {}
    head.register_forward_pre_hook(lambda module, inputs: read.update(head=inputs[0]))
    policy.critic.register_forward_pre_hook(lambda module, inputs: read.update(critic=inputs[0]))
    logprobs, _, values = train_ppo.response_logprobs(policy, batch)
    assert read["critic"].shape == (12, 6, head.in_features) and torch.equal(read["critic"].flatten(0, 1), read["head"])
    # a row alone, without padding or neighbours, has the same values, before each token and after the last
    assert values.std() > 0.05
    for row in range(12):
        query, response = batch[0][row][batch[1][row]], batch[2][row][batch[3][row]]
        n, states = len(response), min(len(response) + 1, 6)
        with torch.no_grad():
            model(torch.cat([query, response]).unsqueeze(0))
            alone = policy.critic(read["head"])[0, len(query) - 1 :, 0]
        assert (values[row, :states] - alone[:states]).abs().max() < 1e-5 and (values[row, states:] == 0).all()
        assert (logprobs[row, n:] == 0).all()
    # recomputing in the backward pass gives the same values and gradients
    gradients = []
    for on in (False, True):
        if on and not model.supports_gradient_checkpointing:
            continue
        if on:
            model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        policy.zero_grad()
        again = train_ppo.response_logprobs(policy, batch)[2]
        assert (again - values).abs().max() < 1e-6
        again.square().sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert len(gradients) == 1 or (gradients[0] - gradients[1]).abs().max() <= 1e-5 * gradients[0].abs().max()


@pytest.mark.parametrize("kind", ["gpt_neox", "gpt2", "llama", "qwen2"])
@torch.no_grad()
def test_values_of_a_separate_model_are_its_scores_of_unpadded_prefixes(kind):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SMALL, initializer_range=0.2, num_labels=1, reward_bias=0.7)
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    batch = random_batch()
    values = train_ppo.response_logprobs(train_ppo.Policy(tiny_model(kind), 0.7, train_ppo.Reward(model)), batch)[2]
    for row in range(12):
        query, response = batch[0][row][batch[1][row]], batch[2][row][batch[3][row]]
        states = min(len(response) + 1, 6)
        for j in range(states):
            prefix = torch.cat([query, response[:j]]).unsqueeze(0)
            alone = model.score(model.base_model(prefix).last_hidden_state)[0, -1, 0] + 0.7
            assert (values[row, j] - alone).abs() < 1e-5
        assert (values[row, states:] == 0).all()


@both_value_models
def test_ppo_2_the_values_of_the_first_update(ragged, in_tmp, monkeypatch, value_model):
    """Zero with a shared trunk; else what the reward model itself, bias included, says of every prefix."""
    calls = recorded(monkeypatch, "compute_gae", "value_mask", "sample")
    run_ppo(ragged, total_episodes=16, value_model=value_model, micro_batch_size=3, rollout_micro_batch_size=16)
    values = calls["compute_gae"][0][0][1]
    if value_model == "shared":
        assert torch.equal(values, torch.zeros(16, 8))
        return
    (_, queries, query_mask, *_), (responses, mask, _) = calls["sample"][0]
    reward = transformers.AutoModelForSequenceClassification.from_pretrained(ragged / "reward")
    for row in range(16):
        query, response = queries[row][query_mask[row]], responses[row][mask[row]]
        for j in range(8):
            prefix = torch.cat([query, response[:j]])
            expected = score_of(reward, prefix) if j <= len(response) else 0.0
            assert values[row, j].item() == pytest.approx(expected, abs=1e-5)
    assert len({int(n) for n in mask.sum(1)}) > 1


@both_value_models
def test_ppo_3_the_value_loss_reaches_the_policys_trunk_only_where_it_is_shared(ragged, in_tmp, monkeypatch, value_model):
    real, clip, made, norms = train_ppo.ppo_policy_loss, torch.nn.utils.clip_grad_norm_, made_policies(monkeypatch), []

    def norm_of(module):
        return math.sqrt(sum(p.grad.square().sum().item() for p in module.parameters() if p.grad is not None))

    def without_policy_loss(*args):
        losses, *rest = real(*args)
        return losses * 0, *rest

    def record(parameters, *rest, **kwargs):
        norms.append((norm_of(made[1].model), norm_of(made[1].critic)))
        return clip(parameters, *rest, **kwargs)

    monkeypatch.setattr(train_ppo, "ppo_policy_loss", without_policy_loss)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", record)
    run_ppo(ragged, value_model=value_model, num_ppo_epochs=2, cliprange_value=10.0)
    assert len(norms) == 6 and all(critic > 1e-2 for _, critic in norms)
    if value_model == "separate":
        assert all(policy == 0 for policy, _ in norms)
    else:
        assert norms[0][0] == 0 and all(policy > 1e-5 for policy, _ in norms[1:])  # at first the head is zero


@both_value_models
def test_ppo_4_policy_and_critic_both_learn_and_the_critic_does_not_change_the_reward_model(
    ragged, in_tmp, monkeypatch, value_model
):
    """Pitfall 21; and the value model is a copy, so that the scores of equal tokens stay what they were."""
    made, calls = made_policies(monkeypatch), recorded(monkeypatch, "response_scores")
    run_ppo(ragged, value_model=value_model, total_episodes=32)
    before, after = initial_weights(ragged, value_model), made[1].state_dict()
    assert before.keys() == {name for name in after if not name.endswith("bias_") and "rotary" not in name}
    for part in ("model.", "critic."):
        assert max((after[name] - before[name]).abs().max() for name in before if name.startswith(part)) > 1e-3
    for name, x in transformers.AutoModelForSequenceClassification.from_pretrained(ragged / "reward").state_dict().items():
        assert torch.equal(x, calls["response_scores"][-1][0][0].model.state_dict()[name])
    for name, x in made[0].state_dict().items():  # nor did the reference
        assert torch.equal(x, before[name])


# ---- a slow oracle of whole updates ----------------------------------------------------------------------------------
def mean(numbers):
    numbers = list(numbers)
    return sum(numbers) / len(numbers)


def variance(numbers):
    return mean((x - mean(numbers)) ** 2 for x in numbers)


def whitened(rows, keep_mean=False):
    """Rows of floats of any lengths, whitened over all of them (biased variance)."""
    flat = [x for row in rows for x in row]
    m, scale = mean(flat), 1 / math.sqrt(variance(flat) + 1e-8)
    return [[(x - m) * scale + (m if keep_mean else 0.0) for x in row] for row in rows]


class Oracle:
    """PPO from the definitions: one unpadded row at a time, plain transformers calls in float64, Python loops."""

    def __init__(self, folder, args):
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.args, self.tokenizer = args, transformers.AutoTokenizer.from_pretrained(folder / "policy")
        self.policy, self.reference = (load(folder / "policy").double() for _ in range(2))
        self.reward = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "reward").double()
        self.bias = self.reward.config.reward_bias
        self.critic = copy.deepcopy(self.reward)
        if args.value_model == "shared":
            self.critic = torch.nn.Linear(32, 1).double()
            torch.nn.init.zeros_(self.critic.weight), torch.nn.init.zeros_(self.critic.bias)
        self.parameters = [*self.policy.parameters(), *self.critic.parameters()]
        self.adamw = torch.optim.AdamW(self.parameters, eps=args.adam_eps, weight_decay=args.weight_decay)
        self.moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in self.parameters]  # of TensorFlow's Adam
        self.kl_coef, self.scores_seen, self.steps = args.kl_coef, [], 0

    def token(self, text):
        special = {"eos": self.tokenizer.eos_token_id, "none": None}
        return special[text] if text in special else self.tokenizer.convert_tokens_to_ids(text)

    def distributions(self, model, query, response):
        """(log-softmax of logits / T where each response token is predicted [n, V], trunk's hidden states [Q + n, H])."""
        hidden = model.base_model(torch.tensor([query + response])).last_hidden_state[0]
        logits = model.get_output_embeddings()(hidden[len(query) - 1 : -1]) / self.args.temperature
        return logits.log_softmax(-1), hidden

    def look(self, query, response):
        """Log-probs [n], entropies [n] and values [states] of the policy as it is now."""
        table, hidden = self.distributions(self.policy, query, response)
        logprobs = [table[t, token] for t, token in enumerate(response)]
        entropies = [-(row.exp() * row).sum().item() for row in table]
        if self.args.value_model == "shared":
            values = self.critic(hidden)
        else:
            values = self.critic.score(self.critic.base_model(torch.tensor([query + response])).last_hidden_state[0]) + self.bias
        states = min(len(response) + 1, self.args.response_length)
        return logprobs, entropies, [values[len(query) - 1 + j, 0] for j in range(states)]

    def penalties(self, query, response, logprobs, ref_logprobs):
        d = [p - q for p, q in zip(logprobs, ref_logprobs, strict=True)]
        if self.args.kl_penalty == "full":
            with torch.no_grad():
                p, q = (self.distributions(m, query, response)[0] for m in (self.policy, self.reference))
            return [sum(a.exp().item() * (a - b).item() for a, b in zip(*rows, strict=True)) for rows in zip(p, q, strict=True)]
        formula = {"kl": lambda x: x, "abs": abs, "mse": lambda x: x * x / 2, "k2": lambda x: x * x / 2}
        return [formula.get(self.args.kl_penalty, lambda x: math.exp(-x) - 1 + x)(x) for x in d]

    def score(self, query, response):
        """(score after the penalty for a missing end, what was scored, whether it ended)."""
        args = self.args
        end, after = self.token(args.truncate_token), args.truncate_after
        end = self.token(args.stop_token) if end is None else end
        places = [t for t, token in enumerate(response) if token == end and t >= after]
        read = response[: places[0] + 1] if places else response
        ended = bool(places) or end is None
        with torch.no_grad():
            hidden = self.reward.base_model(torch.tensor([query + read])).last_hidden_state
            score = self.reward.score(hidden)[0, -1, 0].item() + self.bias
        if not ended and args.missing_eos_penalty is not None:
            score = score - args.missing_eos_penalty if args.missing_eos_mode == "subtract" else -args.missing_eos_penalty
        return score, read, ended

    def shaped(self, scores):
        args = self.args
        self.scores_seen += scores
        if args.score_norm:
            scores = [s - mean(self.scores_seen) for s in scores]
        if args.score_scaling:
            scores = [s / statistics.stdev(self.scores_seen) for s in scores]
        return scores if args.score_clip is None else [min(max(s, -args.score_clip), args.score_clip) for s in scores]

    def step(self, lr):
        args = self.args
        self.steps += 1
        if not args.tf_adam:
            self.adamw.param_groups[0]["lr"] = lr
            self.adamw.step()
            return
        rate = lr * math.sqrt(1 - 0.999**self.steps) / (1 - 0.9**self.steps)
        with torch.no_grad():
            for p, (m, v) in zip(self.parameters, self.moments, strict=True):
                m.mul_(0.9).add_(0.1 * p.grad), v.mul_(0.999).add_(0.001 * p.grad**2)
                p -= lr * args.weight_decay * p + rate * m / (v.sqrt() + args.adam_eps)

    def update(self, number, num_updates, episodes, orders, sampled_logprobs):
        """One update on episodes [(query, response)], shuffled by `orders`, one a pass. Returns what is to be logged."""
        args = self.args
        with torch.no_grad():
            old = [self.look(*episode) for episode in episodes]
            ref = [
                [table[t, token].item() for t, token in enumerate(response)]
                for query, response in episodes
                for table in [self.distributions(self.reference, query, response)[0]]
            ]
        old_logprobs = [[x.item() for x in logprobs] for logprobs, _, _ in old]
        old_values = [[x.item() for x in values] for _, _, values in old]
        penalties = [self.penalties(*e, p, q) for e, p, q in zip(episodes, old_logprobs, ref, strict=True)]
        judged = [self.score(*episode) for episode in episodes]
        scores = [score for score, _, _ in judged]
        shaped = self.shaped(scores)

        rewards = []
        for values, penalty, score in zip(old_values, penalties, shaped, strict=True):
            row = [-self.kl_coef * x for x in penalty] + [0.0] * (len(values) - len(penalty))
            row[-1] += score
            rewards.append(row)
        if args.whiten_rewards:
            rewards = whitened(rewards, keep_mean=True)
        advantages, returns = [], []
        for row, values in zip(rewards, old_values, strict=True):  # the sum of (gamma lam)^l delta_{t+l}
            n, after = len(row), [*values[1:], 0.0]
            deltas = [row[t] + args.gamma * after[t] - values[t] for t in range(n)]
            advantages.append([sum((args.gamma * args.lam) ** (u - t) * deltas[u] for u in range(t, n)) for t in range(n)])
            returns.append([a + v for a, v in zip(advantages[-1], values, strict=True)])
        advantages = [row[: len(response)] for row, (_, response) in zip(advantages, episodes, strict=True)]
        if args.normalize_advantage:
            advantages = whitened(advantages)

        lr = args.learning_rate * (1 - (number - 1) / num_updates)
        tokens, states, norms, skipped, gap, first = [], [], [], 0, 0.0, 1.0
        for order in orders:
            size, pass_kl = len(order) // args.num_mini_batches, []
            for part in range(args.num_mini_batches):
                policy_losses, value_losses, ratios, half_squares = [], [], [], []
                for i in order[part * size : (part + 1) * size]:
                    logprobs, entropies, values = self.look(*episodes[i])
                    if not norms:
                        gap = max(gap, *(abs(x.item() - y) for x, y in zip(logprobs, sampled_logprobs[i], strict=True)))
                    for t, new in enumerate(logprobs):
                        ratio, advantage = (new - old_logprobs[i][t]).exp(), advantages[i][t]
                        plain, clipped = -advantage * ratio, -advantage * ratio.clamp(1 - args.cliprange, 1 + args.cliprange)
                        policy_losses.append(torch.max(plain, clipped))
                        first = max(first, ratio.item(), 1 / ratio.item()) if not norms else first
                        ratios.append(ratio.item()), half_squares.append((new.item() - old_logprobs[i][t]) ** 2 / 2)
                        tokens.append(
                            (policy_losses[-1].item(), ratio.item(), half_squares[-1], entropies[t], clipped.item() > plain.item())
                        )
                    for t, new in enumerate(values):
                        held = new.clamp(old_values[i][t] - args.cliprange_value, old_values[i][t] + args.cliprange_value)
                        plain, clipped = (new - returns[i][t]) ** 2, (held - returns[i][t]) ** 2
                        value_losses.append(0.5 * torch.max(plain, clipped))
                        states.append((value_losses[-1].item(), plain.item(), new.item(), clipped.item() > plain.item()))
                loss = torch.stack(policy_losses).mean() + args.vf_coef * torch.stack(value_losses).mean()
                for p in self.parameters:
                    p.grad = None
                loss.backward()
                norm = math.sqrt(sum(p.grad.square().sum().item() for p in self.parameters))
                if args.max_grad_norm is not None and norm > args.max_grad_norm:
                    for p in self.parameters:
                        p.grad *= args.max_grad_norm / norm
                pass_kl.append(mean(half_squares))
                if args.ratio_threshold is not None and mean(ratios) > args.ratio_threshold:
                    skipped += 1
                else:
                    norms.append(norm)
                    self.step(lr)
            if args.target_kl is not None and mean(pass_kl) > 1.5 * args.target_kl:
                break

        kl = mean(sum(p) - sum(q) for p, q in zip(old_logprobs, ref, strict=True))
        non_score = mean(-self.kl_coef * sum(row) for row in penalties)
        losses, ratios, half_squares, entropies, clipped = zip(*tokens, strict=True)
        value_losses, errors, vpreds, value_clipped = zip(*states, strict=True)
        flat_returns, flat_values = ([x for row in rows for x in row] for rows in (returns, old_values))
        total = mean(losses) + args.vf_coef * mean(value_losses)
        decode = lambda ids: self.tokenizer.decode(ids, skip_special_tokens=True)  # noqa: E731
        metrics = {
            "update": number,
            "episode": number * len(episodes),
            "epoch": number * len(episodes) / 96,
            "lr": lr,
            "objective/kl": kl,
            "objective/entropy": mean(-sum(row) for row in old_logprobs),
            "objective/kl_coef": self.kl_coef,
            "objective/non_score_reward": non_score,
            "objective/rlhf_reward": mean(shaped) + non_score,
            "objective/scores": mean(scores),
            "objective/score_total": mean(scores) + non_score,
            "objective/loss": total,
            "objective/gold": mean(
                toy.gold(decode(q), decode(read)) for (q, _), (_, read, _) in zip(episodes, judged, strict=True)
            ),
            "policy/approxkl_avg": mean(half_squares),
            "policy/clipfrac_avg": mean(clipped),
            "policy/entropy_avg": mean(entropies),
            "policy/grad_norm": mean(norms) if norms else 0,
            "policy/skipped_minibatches": skipped,
            "loss/policy_avg": mean(losses),
            "loss/value_avg": mean(value_losses),
            "loss/total_avg": total,
            "returns/mean": mean(flat_returns),
            "returns/var": variance(flat_returns),
            "val/mean": mean(flat_values),
            "val/var": variance(flat_values),
            "val/vpred": mean(vpreds),
            "val/error": mean(errors),
            "val/clipfrac_avg": mean(value_clipped),
            "val/var_explained": 1 - mean(errors) / variance(flat_returns),
            "val/ratio": mean(ratios),
            "val/ratio_var": variance(ratios),
            "val/logprob_gap": gap,
            "val/first_ratio": first,
            "val/equal_scores": float(len(set(scores)) == 1),
            "val/counted": 1.0,
            "val/num_eos_tokens": sum(response.count(self.token("eos")) for _, response in episodes),
            "val/num_stop_token_ids": sum(ended for _, _, ended in judged)
            if (args.stop_token, args.truncate_token) != ("none",) * 2
            else 0,
            "val/sequence_lengths": mean(len(response) for _, response in episodes),
            "val/optimizer_steps": len(norms),
        }
        if args.adaptive_kl:
            self.kl_coef *= 1 + min(max(kl / args.kl_target - 1, -0.2), 0.2) * len(episodes) / args.kl_horizon
        return metrics


# a large epsilon makes Adam's step nearly proportional to the gradient, so that a wrong factor shows in the weights
STEEP = dict(total_episodes=24, batch_size=8, num_ppo_epochs=2, num_mini_batches=2, micro_batch_size=3, temperature=0.7)
STEEP |= dict(learning_rate=0.02, adam_eps=0.2, cliprange=0.05, cliprange_value=0.02, weight_decay=0.05)
MIXED = dict(
    stop_token="hotel", truncate_token="eos", truncate_after=1, missing_eos_penalty=2.0, kl_penalty="full", kl_coef=0.3,
    score_scaling=True, score_norm=True, score_clip=1.0, gamma=0.9, lam=0.8, vf_coef=0.5, max_grad_norm=0.3,
    normalize_advantage=False, value_model="shared",
)  # fmt: skip
ORACLE = {
    "nplus": NPLUS | dict(kl_coef=0.3),
    "openai": OPENAI | dict(kl_horizon=40.0, learning_rate=0.2, kl_target=0.01),
    "mixed": MIXED,
    "valves": NPLUS
    | dict(kl_penalty="k3", num_ppo_epochs=4, ratio_threshold=1.0005, target_kl=1e-3, stop_token="none", adaptive_kl=True),
    "abs": NPLUS
    | dict(
        kl_penalty="abs", whiten_rewards=True, missing_eos_penalty=None, missing_eos_mode="replace", kl_coef=1.0, score_scaling=True
    ),
}


SLOW_ORACLES = "openai", "abs"


@pytest.mark.parametrize(
    "options", [pytest.param(x, id=name, marks=pytest.mark.slow if name in SLOW_ORACLES else ()) for name, x in ORACLE.items()]
)
def test_three_updates_equal_the_slow_oracles(ragged, in_tmp, monkeypatch, options):
    args = ppo_args(ragged, **(STEEP | options))
    calls, made = recorded(monkeypatch, "sample"), made_policies(monkeypatch)
    got = read_metrics(train_ppo.main(args)["run"])
    oracle = Oracle(ragged, args)
    before = [p.detach().clone() for p in oracle.parameters]
    lengths, expected = set(), []
    assert len(calls["sample"]) == 3
    for number, ((_, queries, query_mask, *_), (responses, mask, sampled)) in enumerate(calls["sample"], 1):
        episodes = [(queries[i][query_mask[i]].tolist(), responses[i][mask[i]].tolist()) for i in range(8)]
        orders = [utils.permutation(8, 1, number, epoch) for epoch in range(args.num_ppo_epochs)]
        lengths |= {len(response) for _, response in episodes}
        expected.append(oracle.update(number, 3, episodes, orders, [s[m].tolist() for s, m in zip(sampled, mask, strict=True)]))
    # every metric
    for row, wanted in zip(got, expected, strict=True):
        assert {name for name in row if not name.startswith(("time/", "eps", "health/"))} == wanted.keys()
        for name, value in wanted.items():
            if name != "val/logprob_gap":
                assert row[name] == pytest.approx(value, rel=2e-4, abs=2e-5), (row["update"], name)
        assert row["val/logprob_gap"] < 1e-4 > wanted["val/logprob_gap"]
    # every weight of policy and critic
    ours = [*made[1].model.parameters(), *made[1].critic.parameters()]
    for x, y in zip(ours, oracle.parameters, strict=True):
        assert (x - y).abs().max() < 1e-5
    moved = [(x - y).abs().max().item() for x, y in zip(before, oracle.parameters, strict=True)]
    policy_size = len(list(oracle.policy.parameters()))
    assert max(moved[:policy_size]) > 1e-3 < max(moved[policy_size:])
    # and the case was no trivial one
    assert (len(lengths) > 3) == (args.stop_token == "eos")
    assert sum(row["policy/clipfrac_avg"] > 0 for row in got) and sum(row["val/clipfrac_avg"] > 0 for row in got)
    assert abs(got[-1]["objective/kl"]) > 1e-3
    if options is ORACLE["valves"]:
        assert {row["policy/skipped_minibatches"] for row in got} != {0} and {row["val/optimizer_steps"] for row in got} != {0}
        assert any(row["val/optimizer_steps"] + row["policy/skipped_minibatches"] < 8 for row in got)


@both_value_models
def test_one_episode_of_one_token_is_a_batch(ragged, in_tmp, value_model):
    options = dict(batch_size=1, total_episodes=3, response_length=1, kl_penalty="full", score_scaling=True, score_norm=True)
    for row in run_ppo(ragged, value_model=value_model, whiten_rewards=True, num_ppo_epochs=2, adaptive_kl=True, **options):
        assert all(math.isfinite(value) for value in row.values()) and row["val/sequence_lengths"] == 1
        assert row["loss/policy_avg"] == 0  # one advantage, whitened


# ---- ratios, rows and passes -----------------------------------------------------------------------------------------
@both_recipes
@pytest.mark.parametrize("micro", [3, 16])
def test_the_first_ratio_of_every_update_is_one_and_nothing_is_clipped(ragged, in_tmp, monkeypatch, recipe, micro):
    calls = recorded(monkeypatch, "ppo_policy_loss", "ppo_value_loss")
    metrics = run_ppo(ragged, num_ppo_epochs=2, num_mini_batches=2, micro_batch_size=micro, **recipe)
    per_step = math.ceil(8 / micro)  # 16 episodes in 2 minibatches
    for update in range(3):
        first = slice(update * 4 * per_step, update * 4 * per_step + per_step)  # all before the update's first step
        for _, (_, logratio, clipped) in calls["ppo_policy_loss"][first]:
            assert logratio.abs().max() < 1e-5 and not clipped.any()
        for (values, old_values, *_), (_, _, clipped) in calls["ppo_value_loss"][first]:
            assert (values - old_values).abs().max() < 1e-5 and not clipped.any()
    assert max(logratio.abs().max() for _, (_, logratio, _) in calls["ppo_policy_loss"]) > 1e-3
    assert all(row["val/logprob_gap"] < 1e-4 and row["val/ratio_var"] > 1e-8 for row in metrics)  # pitfall 19


@both_recipes
@pytest.mark.parametrize("micro", [3, 16])
def test_shuffled_rows_meet_their_own_old_numbers_which_stay_the_same_in_every_pass(ragged, in_tmp, monkeypatch, recipe, micro):
    """Pitfalls 19 and 20: every row handed to the losses is looked up in the whole batch."""
    names = "ppo_policy_loss", "ppo_value_loss", "kl_penalty", "compute_gae", "value_mask", "token_rewards"
    calls, whiten, advantages = recorded(monkeypatch, *names), utils.masked_whiten, []

    def recording_whiten(x, mask, shift_mean=True):
        result = whiten(x, mask, shift_mean)
        advantages.extend([result] if shift_mean else [])
        return result

    monkeypatch.setattr(utils, "masked_whiten", recording_whiten)
    run_ppo(ragged, num_ppo_epochs=3, num_mini_batches=2, micro_batch_size=micro, **recipe)
    batches = [rows for update in (1, 2, 3) for rows in epoch_rows(16, update, 3, 2, micro)]
    assert len(batches) == len(calls["ppo_policy_loss"]) == len(calls["ppo_value_loss"])
    for i, rows in enumerate(batches):
        update = i // (len(batches) // 3)
        old_logprobs = calls["kl_penalty"][update][0][0]
        (_, values, *_), (_, returns) = calls["compute_gae"][update]
        mask = calls["token_rewards"][update][0][2]
        _, got_old, got_mask, got_advantages, _ = calls["ppo_policy_loss"][i][0]
        assert torch.equal(got_old, old_logprobs[rows]) and torch.equal(got_mask, mask[rows])
        assert torch.equal(got_advantages, advantages[update][rows])
        _, got_values, got_returns, got_states, _ = calls["ppo_value_loss"][i][0]
        assert torch.equal(got_values, values[rows]) and torch.equal(got_returns, returns[rows])
        assert torch.equal(got_states, train_ppo.value_mask(mask)[rows])


def test_gen_9_old_log_probs_and_values_come_from_the_training_forward(ragged, in_tmp, monkeypatch):
    """A sampler that is off by 0.1 a token must show in the gap, and not in the ratio."""
    real = train_ppo.sample

    def off(*args):
        responses, mask, logprobs = real(*args)
        return responses, mask, (logprobs + 0.1) * mask

    monkeypatch.setattr(train_ppo, "sample", off)
    for row in run_ppo(ragged, num_ppo_epochs=2, learning_rate=0.0):
        assert abs(row["val/ratio"] - 1) < 1e-5 and row["val/logprob_gap"] == pytest.approx(0.1, abs=1e-3)
        assert abs(row["objective/kl"]) < 1e-4


@both_value_models
def test_learning_rate_zero_changes_no_weight_and_every_ratio_stays_one(ragged, in_tmp, monkeypatch, value_model):
    made = made_policies(monkeypatch)
    options = dict(num_ppo_epochs=3, num_mini_batches=2, learning_rate=0.0, temperature=0.7, weight_decay=0.5)
    for row in run_ppo(ragged, value_model=value_model, **options):
        assert abs(row["val/ratio"] - 1) < 1e-5 and row["policy/clipfrac_avg"] == 0 and abs(row["objective/kl"]) < 1e-4
        assert row["val/clipfrac_avg"] == 0 and row["val/optimizer_steps"] == 6 and row["policy/grad_norm"] > 1e-3
    after = made[1].state_dict()
    assert all(torch.equal(x, after[name]) for name, x in initial_weights(ragged, value_model).items())


def test_model_4_kl_is_zero_at_update_one_and_then_grows(ragged, in_tmp):
    metrics = run_ppo(ragged, temperature=0.7, learning_rate=3e-3)
    assert abs(metrics[0]["objective/kl"]) < 1e-4 < 1e-2 < abs(metrics[-1]["objective/kl"])


@pytest.mark.parametrize("epochs, minibatches", [pytest.param(1, 1, marks=pytest.mark.slow), (1, 4), (3, 2)])
def test_optimiser_steps_are_what_the_flags_say_also_across_epochs_of_prompts(ragged, in_tmp, monkeypatch, epochs, minibatches):
    """Pitfall 1: 24 prompts and 8 a rollout used to give 1, 1, 4, ... steps."""
    prompts = toy.rows("prompts", "train")[:24]
    monkeypatch.setattr(toy, "rows", lambda stage, split, task="toy": prompts)
    steps, step = [], torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, *a, **k: steps.append(1) or step(self, *a, **k))
    sizes = dict(total_episodes=7 * 8 - 3, batch_size=8, micro_batch_size=2, response_length=3)
    metrics = run_ppo(ragged, num_ppo_epochs=epochs, num_mini_batches=minibatches, **sizes)
    assert [row["val/optimizer_steps"] for row in metrics] == [epochs * minibatches] * 7
    assert len(steps) == 7 * epochs * minibatches
    assert [row["epoch"] for row in metrics] == pytest.approx([u / 3 for u in range(1, 8)])
    assert [row["episode"] for row in metrics] == [8 * u for u in range(1, 8)]


def test_data_7_the_second_pass_over_the_prompts_has_the_same_ones_in_another_order(ragged, in_tmp, monkeypatch):
    prompts = toy.rows("prompts", "train")[:12]
    assert len({row["prompt"] for row in prompts}) == 12
    monkeypatch.setattr(toy, "rows", lambda stage, split, task="toy": prompts)
    calls = recorded(monkeypatch, "sample")
    run_ppo(ragged, total_episodes=6 * 8, batch_size=8, response_length=2)
    order = [tuple(q[m].tolist()) for (_, queries, mask, *_), _ in calls["sample"] for q, m in zip(queries, mask, strict=True)]
    epochs = [order[i : i + 12] for i in range(0, 48, 12)]
    assert all(sorted(epoch) == sorted(epochs[0]) and len(set(epoch)) == 12 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_every_update_draws_anew_also_for_the_same_prompts_and_weights(ragged, in_tmp, monkeypatch):
    prompts = toy.rows("prompts", "train")[:1]
    monkeypatch.setattr(toy, "rows", lambda stage, split, task="toy": prompts)
    calls = recorded(monkeypatch, "sample")
    run_ppo(ragged, learning_rate=0.0, stop_token="none")
    texts = [tuple(r.tolist()) for _, (responses, _, _) in calls["sample"] for r in responses]
    assert len(texts) == len(set(texts)) == 48


def pass_kls(calls, num_mini_batches):
    """policy/approxkl of every pass: the mean of its minibatches' means (one micro-batch each)."""
    kls = [(0.5 * logratio**2).sum().item() / args[2].sum().item() for args, (_, logratio, _) in calls]
    return [mean(kls[i : i + num_mini_batches]) for i in range(0, len(kls), num_mini_batches)]


@pytest.mark.parametrize("minibatches", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_ppo_18_target_kl_ends_the_passes_above_one_and_a_half_times_itself(ragged, in_tmp, monkeypatch, minibatches):
    calls = recorded(monkeypatch, "ppo_policy_loss")["ppo_policy_loss"]
    options = dict(total_episodes=16, num_ppo_epochs=4, num_mini_batches=minibatches, learning_rate=3e-3)
    run_ppo(ragged, **options)
    kls = pass_kls(calls, minibatches)
    assert len(kls) == 4 and (kls[0] < 1e-8) == (minibatches == 1)  # one minibatch: the first pass is on-policy
    calls.clear()
    (row,) = run_ppo(ragged, target_kl=max(kls) / 1.5 * 1.001, **options)
    assert row["val/optimizer_steps"] == 4 * minibatches
    for number, kl in enumerate(kls[:-1]):
        if kl > 1e-8 and kl == max(kls[: number + 1]):
            (row,) = run_ppo(ragged, target_kl=kl / 1.5 * 0.999, **options)
            assert row["val/optimizer_steps"] == (number + 1) * minibatches and row["policy/skipped_minibatches"] == 0
    (row,) = run_ppo(ragged, target_kl=1e-6, **(options | dict(learning_rate=0.1)))
    assert (
        row["val/optimizer_steps"] == 2
    )  # one minibatch: the second pass sees that the policy moved; two: the first one's second half


def test_target_kl_judges_every_update_anew(ragged, in_tmp):
    metrics = run_ppo(ragged, target_kl=1e-6, num_ppo_epochs=3, learning_rate=3e-3)
    assert [row["val/optimizer_steps"] for row in metrics] == [2, 2, 2]


@both_value_models
def test_ppo_17_ratio_threshold_skips_steps(ragged, in_tmp, monkeypatch, value_model):
    made = made_policies(monkeypatch)
    monkeypatch.setattr(train_ppo, "check", lambda args: None)  # it refuses what no first ratio passes
    options = dict(num_ppo_epochs=2, num_mini_batches=2, value_model=value_model, weight_decay=0.5)
    for row in run_ppo(ragged, ratio_threshold=0.5, **options):  # every ratio is above it
        assert row["policy/skipped_minibatches"] == 4 and row["val/optimizer_steps"] == 0 and row["policy/grad_norm"] == 0
        assert abs(row["objective/kl"]) < 1e-4
    after = made[1].state_dict()
    assert all(torch.equal(x, after[name]) for name, x in initial_weights(ragged, value_model).items())
    plain = without_times(run_ppo(ragged, **options))
    assert without_times(run_ppo(ragged, ratio_threshold=100.0, **options)) == plain


def test_ratio_threshold_judges_the_mean_ratio_of_the_minibatch(ragged, in_tmp, monkeypatch):
    calls = recorded(monkeypatch, "ppo_policy_loss")["ppo_policy_loss"]
    options = dict(num_ppo_epochs=3, num_mini_batches=2, learning_rate=3e-3, ratio_threshold=1.0 + 1e-4, micro_batch_size=3)
    metrics = run_ppo(ragged, **options)
    per_update, per_minibatch = len(calls) // 3, 3
    for update, row in enumerate(metrics):
        above = 0
        for i in range(update * per_update, (update + 1) * per_update, per_minibatch):
            parts = calls[i : i + per_minibatch]
            ratios = [r for args, (_, logratio, _) in parts for r in logratio.double().exp()[args[2]].tolist()]
            above += mean(ratios) > 1.0 + 1e-4
        assert row["policy/skipped_minibatches"] == above and row["val/optimizer_steps"] == 6 - above
    assert {row["policy/skipped_minibatches"] for row in metrics} - {0, 6}


def test_ratio_threshold_does_not_hide_a_minibatch_without_a_number(ragged, in_tmp, monkeypatch, capsys):
    real = train_ppo.ppo_policy_loss
    calls = []

    def broken(*args):
        calls.append(0)
        losses, logratio, clipped = real(*args)
        return (losses, logratio, clipped) if len(calls) != 3 else (losses * math.nan, logratio * math.nan, clipped)

    monkeypatch.setattr(train_ppo, "ppo_policy_loss", broken)
    with pytest.raises(SystemExit) as error:
        run_ppo(ragged, ratio_threshold=100.0, num_ppo_epochs=2)  # the third minibatch is the second update's first
    assert error.value.code == 1 and "update 2: the loss is nan" in capsys.readouterr().err


# ---- the optimiser ---------------------------------------------------------------------------------------------------
def recorded_steps(monkeypatch):
    """Optimiser settings at every later step."""
    seen, step = [], torch.optim.AdamW.step
    record = lambda self, *a, **k: seen.append([dict(g, params=None) for g in self.param_groups]) or step(self, *a, **k)  # noqa: E731
    monkeypatch.setattr(torch.optim.AdamW, "step", record)
    return seen


@pytest.mark.parametrize(
    "schedule, warmup, shares",
    [("linear", 0.0, [1, 0.75, 0.5, 0.25]), ("constant", 0.5, [0.5, 1, 1, 1]), ("cosine", 0.0, [1, 0.8535534, 0.5, 0.1464466])],
)
def test_opt_2_the_optimiser_steps_with_the_scheduled_learning_rate(ragged, in_tmp, monkeypatch, schedule, warmup, shares):
    seen = recorded_steps(monkeypatch)
    options = dict(lr_schedule=schedule, warmup_ratio=warmup, adam_eps=1e-6, weight_decay=0.02, num_ppo_epochs=2)
    metrics = run_ppo(ragged, total_episodes=32, batch_size=8, response_length=4, **options)
    assert [g[0]["lr"] for g in seen] == pytest.approx([1e-3 * share for share in shares for _ in range(2)])
    assert [row["lr"] for row in metrics] == pytest.approx([1e-3 * share for share in shares])
    assert all(len(g) == 1 and g[0]["eps"] == 1e-6 and g[0]["weight_decay"] == 0.02 for g in seen)


def test_tf_adam_counts_the_steps_taken_over_the_whole_run(ragged, in_tmp, monkeypatch):
    seen = recorded_steps(monkeypatch)
    options = dict(tf_adam=True, adam_eps=1e-6, num_ppo_epochs=2, num_mini_batches=2, learning_rate=3e-3)
    metrics = run_ppo(ragged, ratio_threshold=1.0 + 1e-4, **options)
    steps = sum(row["val/optimizer_steps"] for row in metrics)
    assert len(seen) == steps and 4 < steps < 12  # skipped minibatches are no steps
    assert [g[0]["eps"] for g in seen] == pytest.approx([1e-6 / math.sqrt(1 - 0.999**t) for t in range(1, steps + 1)])


@both_value_models
def test_without_a_loss_weights_only_decay(ragged, in_tmp, monkeypatch, value_model):
    policy_loss, value_loss = train_ppo.ppo_policy_loss, train_ppo.ppo_value_loss
    nothing = lambda losses, *rest: (losses * 0, *rest)  # noqa: E731
    monkeypatch.setattr(train_ppo, "ppo_policy_loss", lambda *args: nothing(*policy_loss(*args)))
    monkeypatch.setattr(train_ppo, "ppo_value_loss", lambda *args: nothing(*value_loss(*args)))
    made = made_policies(monkeypatch)
    run_ppo(ragged, value_model=value_model, weight_decay=5.0, learning_rate=1e-2, lr_schedule="constant", num_ppo_epochs=2)
    after = made[1].state_dict()
    for name, x in initial_weights(ragged, value_model).items():
        assert (after[name] - x * 0.95**6).abs().max() < 1e-6


def test_opt_8_max_grad_norm_really_clips_and_the_norm_is_logged(ragged, in_tmp, monkeypatch):
    norms, step = [], torch.optim.AdamW.step

    def record(self, *args, **kwargs):
        norms.append(torch.cat([p.grad.flatten() for g in self.param_groups for p in g["params"]]).norm().item())
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", record)
    metrics = run_ppo(ragged, max_grad_norm=1e-3, num_ppo_epochs=2)
    assert max(norms) <= 1.001e-3 and all(row["policy/grad_norm"] > 1e-2 for row in metrics)
    norms.clear()
    metrics = run_ppo(ragged, max_grad_norm=None, num_ppo_epochs=2)
    assert [mean(norms[i : i + 2]) for i in (0, 2, 4)] == pytest.approx([row["policy/grad_norm"] for row in metrics], rel=1e-4)


# ---- KL and rewards --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("adaptive", [True, False])
def test_ppo_16_kl_coef_follows_its_controller(ragged, in_tmp, adaptive):
    options = dict(kl_target=0.05, kl_horizon=100.0, kl_coef=0.2, learning_rate=3e-3, total_episodes=6 * 16)
    metrics = run_ppo(ragged, adaptive_kl=adaptive, **options)
    assert metrics[0]["objective/kl_coef"] == 0.2
    for now, after in itertools.pairwise(metrics):
        error = min(max(now["objective/kl"] / 0.05 - 1, -0.2), 0.2) if adaptive else 0.0
        assert after["objective/kl_coef"] == pytest.approx(now["objective/kl_coef"] * (1 + error * 16 / 100), rel=1e-12)
    assert len({row["objective/kl_coef"] for row in metrics}) == (6 if adaptive else 1)


@pytest.mark.parametrize("kind", ["kl", "abs", "mse", "k2", "k3"])
def test_the_penalty_that_was_chosen_is_paid(ragged, in_tmp, monkeypatch, kind):
    calls = recorded(monkeypatch, "sample", "kl_penalty", "token_rewards")
    options = dict(kl_penalty=kind, kl_coef=0.4, learning_rate=1e-2, total_episodes=32, response_length=5)
    metrics = run_ppo(ragged, **options)
    formula = {"kl": lambda d: d, "abs": abs, "k3": lambda d: math.exp(-d) - 1 + d}.get(kind, lambda d: d * d / 2)
    for update, row in enumerate(metrics):
        logprobs, ref_logprobs, given = calls["kl_penalty"][update][0]
        assert given == kind
        mask = calls["sample"][update][1][1]
        paid = [[formula(d) for d in d_row[m].tolist()] for d_row, m in zip(logprobs - ref_logprobs, mask, strict=True)]
        assert row["objective/non_score_reward"] == pytest.approx(-0.4 * mean(map(sum, paid)), rel=1e-4, abs=1e-6)
        _, penalty, _, kl_coef = calls["token_rewards"][update][0]
        assert kl_coef == 0.4 and torch.allclose(penalty[mask], torch.tensor([x for p in paid for x in p]), atol=1e-6)
    assert abs(metrics[1]["objective/non_score_reward"]) > 1e-3


# ---- truncation ------------------------------------------------------------------------------------------------------
def truncated(response, token, after):
    """(what is read of a list of tokens, whether the token was there)."""
    places = [t for t, x in enumerate(response) if x == token and t >= after]
    return (response[: places[0] + 1], True) if places else (response, False)


@pytest.mark.parametrize(
    "stop_token, truncate_token, after", [("none", "eos", 3), ("none", "eos", 0), ("eos", "none", 0), ("none", "none", 0)]
)
def test_gen_14_the_reward_model_reads_exactly_the_truncated_text(ragged, in_tmp, monkeypatch, stop_token, truncate_token, after):
    seen, forward = [], train_ppo.Reward.forward

    def record(self, tokens, mask, positions, last):
        if not self.model.score.weight.requires_grad:  # not the value model
            assert last.shape == (len(tokens), 1) and torch.equal(last[:, 0], (mask * torch.arange(mask.size(1))).argmax(1))
            seen.extend(t[m].tolist() for t, m in zip(tokens, mask, strict=True))
        return forward(self, tokens, mask, positions, last)

    monkeypatch.setattr(train_ppo.Reward, "forward", record)
    calls = recorded(monkeypatch, "sample", "missing_eos_scores", "ppo_policy_loss", "token_rewards")
    options = dict(stop_token=stop_token, truncate_token=truncate_token, truncate_after=after, rollout_micro_batch_size=5)
    metrics = run_ppo(ragged, response_length=12, **options)
    sampled = [
        (q[qm].tolist(), r[m].tolist())
        for (_, queries, query_mask, *_), (responses, mask, _) in calls["sample"]
        for q, qm, r, m in zip(queries, query_mask, responses, mask, strict=True)
    ]
    eos = toy.tokenizer().eos_token_id
    end = None if (stop_token, truncate_token) == ("none", "none") else eos
    read = [truncated(response, end, after) for _, response in sampled]
    assert len(seen) == 48 and seen == [query + text for (query, _), (text, _) in zip(sampled, read, strict=True)]
    ended = [x or end is None for _, x in read]
    assert [x for args, _ in calls["missing_eos_scores"] for x in args[1].tolist()] == ended
    for update, row in enumerate(metrics):
        part = slice(update * 16, (update + 1) * 16)
        assert row["val/num_stop_token_ids"] == (sum(ended[part]) if end is not None else 0)
        assert row["val/num_eos_tokens"] == sum(response.count(eos) for _, response in sampled[part])
        # KL and policy loss cover every sampled token, read or not
        assert torch.equal(calls["token_rewards"][update][0][2].sum(1), torch.tensor([len(r) for _, r in sampled[part]]))
        assert calls["ppo_policy_loss"][update][0][2].sum() == sum(len(r) for _, r in sampled[part])
    if stop_token == "none":
        assert all(len(response) == 12 for _, response in sampled)
        if end is not None:
            assert any(len(text) < 12 for text, _ in read) and {*ended} == {True, False}
            assert any(eos in response[:after] for _, response in sampled) == (after > 0)
            assert max(response.count(eos) for _, response in sampled) > 1
    else:
        assert all(text == response for (_, response), (text, _) in zip(sampled, read, strict=True))


@pytest.mark.parametrize("mode, expected", [("subtract", lambda s: s - 2.5), ("replace", lambda s: -2.5)])
def test_the_penalty_asks_for_the_token_in_the_scored_part_of_the_response_only(ragged, in_tmp, monkeypatch, mode, expected):
    """Pitfalls 8 and 9: prompts that contain the token, and a token that is not EOS."""
    prompts = [{"prompt": f"hotel {row['prompt']}"} for row in toy.rows("prompts", "train")]
    monkeypatch.setattr(toy, "rows", lambda stage, split, task="toy": prompts)
    monkeypatch.setattr(train_ppo, "response_scores", lambda model, batch: torch.full((len(batch[0]),), 0.25))
    calls = recorded(monkeypatch, "sample")
    hotel = toy.tokenizer().convert_tokens_to_ids("hotel")
    model = transformers.AutoModelForCausalLM.from_pretrained(ragged / "policy")
    with torch.no_grad():
        model.get_output_embeddings().weight[hotel] *= 4
    shutil.copytree(ragged, "own")
    model.save_pretrained("own/policy")
    metrics = run_ppo(Path("own"), stop_token="hotel", missing_eos_penalty=2.5, missing_eos_mode=mode)
    for row, (_, (responses, mask, _)) in zip(metrics, calls["sample"], strict=True):
        ended = [hotel in r[m].tolist() for r, m in zip(responses, mask, strict=True)]
        assert row["val/num_stop_token_ids"] == sum(ended)
        assert row["objective/scores"] == pytest.approx(mean(0.25 if x else expected(0.25) for x in ended))
        assert [r[m].tolist().count(hotel) for r, m in zip(responses, mask, strict=True)] == ended  # it ends the response
    assert 0 < sum(row["val/num_stop_token_ids"] for row in metrics) < 48


@pytest.mark.parametrize("recipe", [*RECIPES.values(), dict(stop_token="hotel")], ids=[*RECIPES, "hotel"])
def test_pad_equal_to_eos_is_no_special_case(ragged, in_tmp, recipe):
    """Pitfalls 5, 6, 24: the same run with pad == eos in tokenizer and configuration, bit for bit."""
    reference = run_ppo(ragged, response_length=16, **recipe)
    for name, kind in (
        ("policy", transformers.AutoModelForCausalLM),
        ("reward", transformers.AutoModelForSequenceClassification),
    ):
        model, tokenizer = kind.from_pretrained(ragged / name), transformers.AutoTokenizer.from_pretrained(ragged / name)
        tokenizer.pad_token, model.config.pad_token_id = tokenizer.eos_token, tokenizer.eos_token_id
        model.save_pretrained(f"same/{name}"), tokenizer.save_pretrained(f"same/{name}")
    assert without_times(run_ppo(Path("same"), response_length=16, **recipe)) == without_times(reference)


# ---- learning, saving, tables ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("value_model", [pytest.param("separate", marks=pytest.mark.slow), "shared"])
def test_it_learns_a_trivial_reward(tiny, in_tmp, monkeypatch, value_model):
    """Score = share of even tokens; a random policy is near one half."""

    def even(model, batch):
        return ((batch[2] % 2 == 0) * batch[3]).sum(1) / batch[3].sum(1)

    monkeypatch.setattr(train_ppo, "response_scores", even)
    options = dict(kl_coef=0.0, missing_eos_penalty=None, total_episodes=20 * 64, batch_size=64, learning_rate=5e-3)
    metrics = run_ppo(tiny, response_length=4, num_ppo_epochs=4, micro_batch_size=64, value_model=value_model, **options)
    assert metrics[0]["objective/scores"] < 0.65 and metrics[-1]["objective/scores"] > 0.9


@both_value_models
def test_the_saved_policy_is_an_ordinary_model_folder(ragged, in_tmp, monkeypatch, value_model):
    made = made_policies(monkeypatch)
    run_ppo(ragged, value_model=value_model, total_episodes=16)
    tokenizer, (model, info) = (
        transformers.AutoTokenizer.from_pretrained("models/ppo"),
        transformers.AutoModelForCausalLM.from_pretrained("models/ppo", output_loading_info=True),
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert all(torch.equal(x, model.state_dict()[name]) for name, x in made[1].model.state_dict().items())
    tokens = tokenizer("last friday my sister", return_tensors="pt").input_ids
    assert model.generate(tokens, max_new_tokens=3, min_new_tokens=3, do_sample=False).shape == (1, 7)
    assert json.loads(Path("models/ppo/training_args.json").read_text())["value_model"] == value_model


@pytest.mark.parametrize("updates, tables, expected", [(13, 10, 10), (4, 10, 4), (5, 0, 0), (5, 1, 1)])
def test_exactly_as_many_sample_tables_as_asked_for(ragged, in_tmp, updates, tables, expected, capsys):
    sizes = dict(total_episodes=updates * 4, batch_size=4, response_length=4, learning_rate=1e-2)
    metrics = run_ppo(ragged, num_sample_generations=tables, adaptive_kl=True, kl_horizon=8.0, kl_target=0.1, **sizes)
    rows = [json.loads(line) for line in Path("runs/run/samples.jsonl").read_text().splitlines()]
    assert len({row["update"] for row in rows}) == expected == capsys.readouterr().out.count("-- samples of update")
    assert len(rows) == 4 * expected
    for row in rows:
        assert row.keys() == {"update", "query", "response", "score", "kl", "total"}
        kl_coef = metrics[row["update"] - 1]["objective/kl_coef"]
        assert row["total"] == pytest.approx(row["score"] - kl_coef * row["kl"])


@both_recipes
def test_held_out_evaluation_is_the_same_draw_before_and_after(ragged, in_tmp, recipe):
    args = ppo_args(
        ragged, learning_rate=0.0, eval_dataset="toy:test", eval_every=2, total_episodes=64, response_length=4, **recipe
    )
    result = train_ppo.main(args)
    assert result["before"] == pytest.approx(result["after"], abs=1e-5) and len(result["before"]) == 8
    assert [row["update"] for row in read_metrics(result["run"]) if "eval/objective/scores" in row] == [0, 2, 4]


def test_held_out_responses_are_truncated_penalised_and_measured_like_the_training_ones(ragged, in_tmp, monkeypatch):
    prompts = toy.rows("prompts", "test")[:11]
    Path("eleven.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    calls = recorded(monkeypatch, "sample", "response_scores")
    options = OPENAI | dict(
        missing_eos_penalty=3.0, truncate_after=6, eval_dataset="eleven.jsonl", learning_rate=1e-2, rollout_micro_batch_size=2
    )
    metrics = run_ppo(ragged, total_episodes=16, response_length=12, **options)[-1]
    eos = toy.tokenizer().eos_token_id
    reference = transformers.AutoModelForCausalLM.from_pretrained(ragged / "policy")
    reward = transformers.AutoModelForSequenceClassification.from_pretrained(ragged / "reward")
    found, early = {"scores": [], "kl": [], "length": [], "ended": []}, 0
    for (_, queries, query_mask, *_), (responses, mask, logprobs) in [
        c for c in calls["sample"] if c[0][6][1] == train_ppo.EVALUATION
    ][-6:]:
        for q, qm, r, m, lp in zip(queries, query_mask, responses, mask, logprobs, strict=True):
            query, response = q[qm].tolist(), r[m].tolist()
            read, ended = truncated(response, eos, 6)
            early += eos in response[:6]
            with torch.no_grad():
                table = reference(torch.tensor([query + response])).logits[0, len(query) - 1 : -1].log_softmax(-1)
                score = score_of(reward, torch.tensor(query + read))
            found["kl"].append(lp.sum().item() - sum(table[t, token].item() for t, token in enumerate(response)))
            found["scores"].append(score if ended else -3.0)
            found["length"].append(len(read)), found["ended"].append(float(ended))
    assert len(found["kl"]) == 11 and early > 0 and abs(mean(found["kl"])) > 1e-3
    for name, numbers in found.items():
        assert metrics[f"eval/objective/{name}"] == pytest.approx(mean(numbers), abs=1e-4), name
    assert metrics["eval/objective/scores_std"] == pytest.approx(statistics.pstdev(found["scores"]), abs=1e-4)


@pytest.mark.slow
def test_plain_python_trains_a_policy_with_a_value_head(ragged, tmp_path):
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in toy.rows("prompts", "train")[:8])
    )
    flags = ["--dataset", tmp_path / "prompts.jsonl", "--sft_model_path", ragged / "policy", "--output_dir", "out"]
    flags += ["--reward_model_path", ragged / "reward", "--value_model", "shared", "--total_episodes", 32, "--batch_size", 16]
    done = launch("train_ppo.py", [*flags, "--response_length", 8, "--truncate_token", "eos", "--stop_token", "none"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "model.safetensors").exists() and "value model shared" in done.stdout


# ---- the two scripts say the same thing in the same words ------------------------------------------------------------
SAME = (
    "Reward hash32 fold gumbel_noise additive compiled policy_config Actor combine_rewards missing_eos_scores read_prompts "
    "main.decode main.held_out Policy.forward.of_tokens"
).split()
DIFFERENT = (  # k responses a prompt and packed rows there; a critic, truncation and other options here
    "Args Policy sample trim by_length in_slices main.prompts_of main.rollout "
    "response_logprobs response_scores one_response_each one_response_each.one_slice shape_scores check "
    "main main.rewards_of main.evaluate main.evaluate.score_slice Policy.__init__ Policy.forward"
).split()


def definitions(script):
    """{qualified name: its syntax tree as text, without docstrings} of every function and class."""
    found = {}

    def visit(node, prefix):
        for child in node.body:
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                visit(child, f"{prefix}{child.name}.")
                if ast.get_docstring(child) is not None:
                    child.body = child.body[1:] or [ast.Pass()]
                found[f"{prefix}{child.name}"] = ast.dump(child)

    visit(ast.parse((ROOT / "rlhf_details" / script).read_text()), "")
    return found


def test_what_both_scripts_share_is_the_same_text():
    ppo, rloo = definitions("train_ppo.py"), definitions("train_rloo.py")
    inside = {name for name in ppo.keys() & rloo.keys() if name.rpartition(".")[0] not in SAME}
    assert inside == {*SAME, *DIFFERENT}
    assert {name for name in inside if ppo[name] == rloo[name]} == {*SAME}


def test_shared_arguments_have_the_same_meaning():
    """Arguments that both scripts have are of one type and have one explanation, but for the defaults that recipes set."""
    from rlhf_details import train_rloo

    ppo, rloo = ({f.name: f for f in dataclasses.fields(script.Args)} for script in (train_ppo, train_rloo))
    common = ppo.keys() & rloo.keys()
    assert len(common) > 35 and all(ppo[name].type == rloo[name].type for name in common)
    differ = {name for name in common if ppo[name].default != rloo[name].default}
    recipe = "kl_coef learning_rate num_ppo_epochs num_mini_batches adam_eps weight_decay max_grad_norm normalize_advantage".split()
    assert differ <= {"exp_name", "output_dir", "batch_size", "micro_batch_size", *recipe}, differ
