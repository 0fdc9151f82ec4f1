"""Claims about whole runs of train_rloo: what may not change the result, and what must hold at every update."""

import dataclasses
import functools
import itertools
import json
import math
from pathlib import Path

import pytest
import torch
import transformers
from conftest import launch, read_metrics, rloo_args, run_rloo, save_pair
from worker import recording

from rlhf_details import toy, train_rloo, utils

TIMES = ("time/", "eps")


def assert_same_curves(a, b):
    """Every metric but times within 1e-4 of the larger plus 1e-6, in every update."""
    assert len(a) == len(b) > 0
    for x, y in zip(a, b, strict=True):
        assert x.keys() == y.keys()
        for name in x:
            if not name.startswith(TIMES):
                assert abs(x[name] - y[name]) <= 1e-4 * max(abs(x[name]), abs(y[name])) + 1e-6, (
                    x["update"],
                    name,
                    x[name],
                    y[name],
                )


def without_times(rows):
    return [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in rows]


def run_worker(folder, args, processes, *flags, **env):
    """tests/worker.py in a folder of its own; returns (metrics, records by rank)."""
    folder.mkdir()
    (folder / "args.json").write_text(json.dumps(dataclasses.asdict(args)))
    done = launch("../tests/worker.py", [folder / "args.json", folder, *flags], processes, cwd=folder, **env)
    assert done.returncode == 0, done.stderr[-3000:]
    records = [torch.load(folder / f"rank{r}.pt", weights_only=False) for r in range(processes)]
    assert all(r["world"] == processes and r["kind"] == ("MULTI_CPU" if processes > 1 else "NO") for r in records)
    return read_metrics(folder / "runs/run"), records


def sampled_tokens(records):
    """{(update, global row): tokens of the response} over all processes."""
    return {
        (update, row): responses[i][mask[i]].tolist()
        for record in records
        for update, rows, responses, mask in record["sampled"]
        for i, row in enumerate(rows.tolist())
    }


# ---- what is a memory or hardware knob never changes the result ------------------------------------------------------
@pytest.mark.slow
def test_two_processes_sample_the_same_tokens_and_give_the_same_curves(tiny, tmp_path):
    prompts = tmp_path / "odd.jsonl"  # 41 rows do not divide by two
    prompts.write_text("".join(json.dumps(row) + "\n" for row in toy.rows("prompts", "test")[:41]))
    options = dict(num_ppo_epochs=2, num_mini_batches=2, micro_batch_size=4, eval_dataset=str(prompts), num_sample_generations=2)
    args = rloo_args(tiny, total_episodes=160, **options)
    (one, first), (two, second) = (run_worker(tmp_path / str(n), args, n) for n in (1, 2))
    tokens = sampled_tokens(first)
    assert len(tokens) == 160 and tokens == sampled_tokens(second)
    assert len({tuple(t) for t in tokens.values()}) > 100
    assert [row["update"] for row in one] == list(range(11))
    assert_same_curves(one, two)


@pytest.mark.slow
def test_two_processes_agree_at_vocabulary_8192(tmp_path):
    tiny = save_pair(tmp_path, vocab_size=8192)
    args = rloo_args(tiny, total_episodes=160, learning_rate=3e-4, token_level_kl=True, normalize_advantage=True)
    (one, first), (two, second) = (run_worker(tmp_path / str(n), args, n) for n in (1, 2))
    assert sampled_tokens(first) == sampled_tokens(second)
    assert_same_curves(one, two)


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_rloo_1_reward_of_the_prompt_gives_advantages_exactly_zero(tiny, tmp_path, monkeypatch, processes):
    args = rloo_args(tiny, kl_coef=0.0, missing_eos_penalty=None)
    if processes == 1:
        monkeypatch.chdir(tmp_path)
        with recording("train_rloo", "prompt_scores") as record:
            train_rloo.main(args)
        records = [record]
    else:
        _, records = run_worker(tmp_path / "run", args, processes, "prompt_scores")
    advantages = torch.cat([a for r in records for a in r["advantages"]])
    assert len(advantages) == 48 and (advantages == 0).all()


@pytest.mark.parametrize("share_prompts", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_opt_5_micro_batch_and_slice_sizes_change_nothing(tiny, in_tmp, share_prompts):
    options = dict(total_episodes=80, num_ppo_epochs=2, num_mini_batches=2, learning_rate=3e-4, share_prompts=share_prompts)
    reference = run_rloo(tiny, micro_batch_size=1000, rollout_micro_batch_size=1000, **options)
    for micro, rollout in ((1, 1), (4, 8), (3, 5)):
        assert_same_curves(reference, run_rloo(tiny, micro_batch_size=micro, rollout_micro_batch_size=rollout, **options))


def test_rloo_8_packed_and_plain_layout_give_the_same_curves(tiny, in_tmp):
    options = dict(total_episodes=160, num_ppo_epochs=2, learning_rate=3e-4)
    assert_same_curves(run_rloo(tiny, **options), run_rloo(tiny, share_prompts=False, **options))


def test_gradient_checkpointing_changes_nothing(tiny, in_tmp):
    plain = run_rloo(tiny, num_ppo_epochs=2)
    for a, b in zip(plain, run_rloo(tiny, num_ppo_epochs=2, gradient_checkpointing=True), strict=True):
        for name in without_times([a])[0]:
            assert abs(a[name] - b[name]) <= 1e-5 * max(1, abs(a[name])), name


def test_gradient_checkpointing_really_recomputes(tiny, in_tmp, monkeypatch):
    calls = []
    layer = transformers.models.gpt_neox.modeling_gpt_neox.GPTNeoXMLP
    forward = layer.forward
    monkeypatch.setattr(layer, "forward", lambda self, x: calls.append(torch.is_grad_enabled()) or forward(self, x))
    counts = []
    for on in (False, True):
        calls.clear()
        run_rloo(tiny, total_episodes=16, gradient_checkpointing=on)
        counts.append(sum(calls))
    assert counts[1] == 2 * counts[0] > 0  # each layer once in the forward, once more in the backward pass


def test_eager_and_sdpa_attention_give_the_same_curves(tiny, in_tmp):
    assert_same_curves(run_rloo(tiny), run_rloo(tiny, attn_implementation="eager"))


def test_two_identical_runs_are_bitwise_equal(tiny, in_tmp):
    runs = [run_rloo(tiny, run_name=name, output_dir=name, num_sample_generations=3) for name in ("a", "b")]
    assert without_times(runs[0]) == without_times(runs[1])
    assert Path("runs/a/samples.jsonl").read_text() == Path("runs/b/samples.jsonl").read_text() != ""
    assert Path("a/model.safetensors").read_bytes() == Path("b/model.safetensors").read_bytes()


def test_another_seed_is_another_run(tiny, in_tmp):
    assert without_times(run_rloo(tiny)) != without_times(run_rloo(tiny, seed=2))


def test_every_metric_is_blind_to_padding(tiny, in_tmp, monkeypatch):
    """More left padding for the queries, and nothing trimmed: the masks alone must do the work."""
    options = dict(num_ppo_epochs=2, num_mini_batches=2, eval_dataset="toy:test", response_length=12)
    reference = run_rloo(tiny, **options)
    left_pad = utils.left_pad

    def wide(rows, device=None):
        tokens, mask = left_pad(rows, device)
        return torch.nn.functional.pad(tokens, (7, 0), value=5), torch.nn.functional.pad(mask, (7, 0))

    monkeypatch.setattr(utils, "left_pad", wide)
    monkeypatch.setattr(train_rloo, "trim", lambda batch: batch)
    assert_same_curves(reference, run_rloo(tiny, **options))
    assert reference[1]["val/sequence_lengths"] < 12  # there was padding on the right as well


def test_bf16_keeps_fp32_weights_and_log_probs(tiny, tmp_path):
    args = rloo_args(tiny, total_episodes=32)
    metrics, (record,) = run_worker(tmp_path / "run", args, 1, ACCELERATE_MIXED_PRECISION="bf16")
    assert record["matmul_dtypes"] == {"torch.bfloat16"}  # sampler, reference and training alike
    assert all(math.isfinite(v) for row in metrics for v in row.values())
    assert 0 < metrics[0]["val/logprob_gap"] < 0.5
    saved = train_rloo.utils.load_policy(tmp_path / "run" / "models/rloo", "--sft_model_path")
    assert next(saved.parameters()).dtype == torch.float32


# ---- the packed layout -----------------------------------------------------------------------------------------------
SMALL = dict(
    num_key_value_heads=4,
    vocab_size=97,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=128,
)


def tiny_model(kind, **changes):
    """A random causal language model of an architecture, with weights large enough to tell tokens apart."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **(SMALL | dict(initializer_range=0.2) | changes))
    return utils.disable_dropout(transformers.AutoModelForCausalLM.from_config(config)).eval()


def random_batch(groups=3, k=4, Q=9, R=6):
    """Ragged queries and responses, the k of a prompt adjacent."""
    g = torch.Generator().manual_seed(1)
    queries, query_mask = utils.left_pad([torch.randint(97, (n,), generator=g).tolist() for n in (Q, 2, 5)[:groups]])
    responses = torch.randint(97, (groups * k, R), generator=g)
    lengths = torch.randint(1, R + 1, (groups * k, 1), generator=g)
    return queries.repeat_interleave(k, 0), query_mask.repeat_interleave(k, 0), responses, torch.arange(R) < lengths


@pytest.mark.parametrize("kind", ["gpt_neox", "gpt2", "llama", "qwen2", "opt", "gptj", "phi"])
@torch.no_grad()
def test_rloo_9_packed_rows_give_the_log_probs_of_single_rows(kind):
    changes = {"opt": dict(ffn_dim=64, word_embed_proj_dim=32), "gptj": dict(rotary_dim=8)}.get(kind, {})
    policy, batch = train_rloo.Policy(tiny_model(kind, **changes), 0.7), random_batch()
    plain, entropies = train_rloo.response_logprobs(policy, batch, 1)
    assert plain[batch[3]].std() > 0.3
    for n in (2, 4):
        packed, packed_entropies = train_rloo.response_logprobs(policy, batch, n)
        assert (packed - plain).abs().max() < 1e-5 and (packed_entropies - entropies).abs().max() < 1e-5
    # and both are what an unpadded row alone gives
    for row in range(12):
        query, response = batch[0][row][batch[1][row]], batch[2][row][batch[3][row]]
        tokens = torch.cat([query, response])
        logits = policy.model(tokens.unsqueeze(0)).logits[0, len(query) - 1 : -1].float() / 0.7
        alone = logits.log_softmax(-1)[torch.arange(len(response)), response]
        assert (plain[row, : len(response)] - alone).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["gpt_neox", "gpt2", "llama", "qwen2"])
@torch.no_grad()
def test_rloo_10_packed_rows_give_the_scores_of_single_rows(kind):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SMALL, initializer_range=0.2, num_labels=1)
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    reward, batch = train_rloo.Reward(model), random_batch()
    plain = train_rloo.response_scores(reward, batch, 1)
    assert plain.std() > 0.05
    assert (train_rloo.response_scores(reward, batch, 4) - plain).abs().max() < 1e-5
    for row in range(12):
        tokens = torch.cat([batch[0][row][batch[1][row]], batch[2][row][batch[3][row]]])
        alone = model.score(model.base_model(tokens.unsqueeze(0)).last_hidden_state)[0, -1, 0]
        assert (plain[row] - alone).abs() < 1e-5


LIMITED = {
    "mistral": dict(sliding_window=8, num_key_value_heads=2),  # sliding window
    "gpt_neo": dict(
        hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=8
    ),  # local attention
    "bloom": dict(n_head=4),  # ALiBi
}


@pytest.mark.parametrize("kind", LIMITED)
def test_layers_that_cannot_be_packed_run_in_the_plain_layout_and_say_so(kind, in_tmp, capsys):
    sizes = dict(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        vocab_size=len(toy.tokenizer()),
    )
    if kind == "gpt_neo":
        sizes = dict(max_position_embeddings=128, vocab_size=len(toy.tokenizer()))
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **(sizes | LIMITED[kind] | dict(initializer_range=0.2, eos_token_id=1)))
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained("tiny/policy")
    config.num_labels = 1
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained("tiny/reward")
    for name in ("policy", "reward"):
        toy.tokenizer().save_pretrained(f"tiny/{name}")
    metrics = run_rloo(Path("tiny"), total_episodes=16, allow_untrained_reward_model=True)
    assert "plain rows, one response each: the policy" in capsys.readouterr().out
    assert abs(metrics[0]["objective/kl"]) < 1e-4 and metrics[0]["val/logprob_gap"] < 1e-4


@pytest.mark.parametrize("kind", ["gpt_neox", "gpt2", "llama", "qwen2"])
def test_ordinary_layers_are_packed(kind):
    policy = train_rloo.Policy(tiny_model(kind), 1.0)
    config = transformers.AutoConfig.for_model(kind, **SMALL, num_labels=1)
    reward = train_rloo.Reward(transformers.AutoModelForSequenceClassification.from_config(config).eval())
    assert train_rloo.why_not_share(policy, reward, 11, 5, 3) is None


def test_rloo_12_a_window_that_the_configuration_hides_is_found_by_the_numbers():
    policy = train_rloo.Policy(tiny_model("mistral", sliding_window=4, num_key_value_heads=2), 1.0)
    policy.model.config.sliding_window = None  # the layers have read it ...
    for layer in policy.model.model.layers:
        layer.self_attn.sliding_window = 4
    policy.model.config.layer_types = None
    real = policy.model.base_model.forward

    @functools.wraps(real)
    def windowed(attention_mask=None, **inputs):  # ... and look at the last four columns only
        if attention_mask is not None and attention_mask.dim() == 4:
            L = torch.arange(attention_mask.size(-1))
            attention_mask = attention_mask.masked_fill(L.unsqueeze(1) - L >= 4, torch.finfo(torch.bfloat16).min)
        return real(attention_mask=attention_mask, **inputs)

    policy.model.base_model.forward = windowed
    reward = train_rloo.Reward(
        transformers.AutoModelForSequenceClassification.from_config(
            transformers.AutoConfig.for_model("llama", **SMALL, num_labels=1)
        ).eval()
    )
    assert "differ by" in train_rloo.why_not_share(policy, reward, 11, 5, 3)


# ---- what must hold at every update ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "epochs, minibatches", [(1, 1), *(pytest.param(*x, marks=pytest.mark.slow) for x in [(2, 1), (1, 4)]), (3, 2)]
)
def test_optimiser_steps_are_what_the_flags_say_also_across_epochs_of_prompts(tiny, in_tmp, monkeypatch, epochs, minibatches):
    """Pitfall 1: 24 prompts and 8 a rollout used to give 1, 1, 4, ... steps."""
    prompts = toy.rows("prompts", "train")[:24]
    monkeypatch.setattr(toy, "rows", lambda stage, split, task="toy": prompts)
    steps = []
    step = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, *a, **k: steps.append(1) or step(self, *a, **k))
    metrics = run_rloo(
        tiny,
        total_episodes=7 * 32,
        batch_size=32,
        num_ppo_epochs=epochs,
        num_mini_batches=minibatches,
        micro_batch_size=4,
    )
    assert [row["val/optimizer_steps"] for row in metrics] == [epochs * minibatches] * 7
    assert len(steps) == 7 * epochs * minibatches
    assert [row["epoch"] for row in metrics] == pytest.approx([u / 3 for u in range(1, 8)])


@pytest.mark.parametrize("micro", [4, 16])
def test_the_first_ratio_of_every_update_is_one_and_nothing_is_clipped(tiny, in_tmp, monkeypatch, micro):
    calls, real = [], train_rloo.rloo_policy_loss
    monkeypatch.setattr(train_rloo, "rloo_policy_loss", lambda *a: calls.append(real(*a)) or calls[-1])
    metrics = run_rloo(tiny, num_ppo_epochs=2, num_mini_batches=2, micro_batch_size=micro)
    per_step = max(1, 8 // micro)  # 16 episodes in 2 minibatches
    for update in range(3):
        first = calls[update * 4 * per_step : update * 4 * per_step + per_step]  # all before the update's first step
        assert all(logratio.abs().max() < 1e-5 and not clipped.any() for _, logratio, clipped, _ in first)
    assert max(logratio.abs().max() for _, logratio, _, _ in calls) > 1e-3
    assert all(row["val/logprob_gap"] < 1e-4 for row in metrics)


def test_gen_9_old_log_probs_come_from_the_training_forward(tiny, in_tmp, monkeypatch):
    """A sampler that is off by 0.1 a token must show in the gap, and not in the ratio."""
    real = train_rloo.sample

    def off(*args):
        responses, mask, logprobs = real(*args)
        return responses, mask, (logprobs + 0.1) * mask

    monkeypatch.setattr(train_rloo, "sample", off)
    for row in run_rloo(tiny, num_ppo_epochs=2, learning_rate=0.0):
        assert abs(row["val/ratio"] - 1) < 1e-5 and row["val/logprob_gap"] == pytest.approx(0.1, abs=1e-3)


@pytest.mark.parametrize("schedule, warmup, shares", [("linear", 0.0, [1, 0.75, 0.5, 0.25]), ("constant", 0.5, [0.5, 1, 1, 1])])
def test_opt_2_the_optimiser_steps_with_the_scheduled_learning_rate(tiny, in_tmp, monkeypatch, schedule, warmup, shares):
    seen, step = [], torch.optim.AdamW.step
    record = lambda self, *a, **k: seen.append([dict(g, params=None) for g in self.param_groups]) or step(self, *a, **k)  # noqa: E731
    monkeypatch.setattr(torch.optim.AdamW, "step", record)
    options = dict(lr_schedule=schedule, warmup_ratio=warmup, adam_eps=1e-6, weight_decay=0.02, num_ppo_epochs=2)
    metrics = run_rloo(tiny, total_episodes=64, **options)
    assert [g[0]["lr"] for g in seen] == pytest.approx([1e-3 * share for share in shares for _ in range(2)])
    assert [row["lr"] for row in metrics] == pytest.approx([1e-3 * share for share in shares])
    assert all(g["eps"] == 1e-6 and g["weight_decay"] == 0.02 for groups in seen for g in groups)


def test_accumulation_of_the_launch_configuration_changes_nothing(tiny, in_tmp, monkeypatch):
    reference = run_rloo(tiny)
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert without_times(run_rloo(tiny)) == without_times(reference)


def test_without_learning_every_ratio_stays_one(tiny, in_tmp):
    for row in run_rloo(tiny, num_ppo_epochs=3, num_mini_batches=2, learning_rate=0.0, temperature=0.7):
        assert abs(row["val/ratio"] - 1) < 1e-5 and row["policy/clipfrac_avg"] == 0 and abs(row["objective/kl"]) < 1e-4


def test_later_minibatches_see_a_ratio_other_than_one(tiny, in_tmp):
    """Pitfall 19: old log-probs taken inside the loop would keep every ratio at 1."""
    assert all(row["val/ratio_var"] > 1e-8 for row in run_rloo(tiny, num_mini_batches=2))


def test_model_4_kl_is_zero_at_update_one_and_then_grows(tiny, in_tmp):
    metrics = run_rloo(tiny, temperature=0.7)
    assert abs(metrics[0]["objective/kl"]) < 1e-4 < 1e-2 < abs(metrics[-1]["objective/kl"])


def test_learning_rate_zero_changes_no_weight(tiny, in_tmp):
    run_rloo(tiny, learning_rate=0.0)
    before, after = (transformers.AutoModelForCausalLM.from_pretrained(p).state_dict() for p in (tiny / "policy", "models/rloo"))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_it_learns_a_trivial_reward(tiny, in_tmp, monkeypatch):
    """Score = share of even tokens; a random policy is near one half."""

    def even(model, batch, n):
        return ((batch[2] % 2 == 0) * batch[3]).sum(1) / batch[3].sum(1)

    monkeypatch.setattr(train_rloo, "response_scores", even)
    options = dict(kl_coef=0.0, missing_eos_penalty=None, total_episodes=40 * 64, batch_size=64, learning_rate=3e-3)
    metrics = run_rloo(tiny, **options)
    assert metrics[0]["objective/scores"] < 0.65 and metrics[-1]["objective/scores"] > 0.9


@pytest.mark.parametrize("token_level", [False, True])
def test_rloo_7_one_step_is_exactly_reinforce(tiny, in_tmp, monkeypatch, token_level):
    """The gradient of the first update equals that of -mean(A * log p(action)), computed one row at a time."""
    recorded, real = {}, train_rloo.rloo_policy_loss
    clip = torch.nn.utils.clip_grad_norm_

    def record_advantages(logprobs, old, mask, advantages, cliprange):
        recorded.setdefault("advantages", advantages)
        return real(logprobs, old, mask, advantages, cliprange)

    def record_gradient(parameters, *rest, **kwargs):
        parameters = list(parameters)
        recorded.setdefault("gradient", [p.grad.clone() for p in parameters])
        return clip(parameters, *rest, **kwargs)

    pack, packed = train_rloo.pack, []
    monkeypatch.setattr(train_rloo, "pack", lambda *batch: packed.append(batch) or pack(*batch))
    monkeypatch.setattr(train_rloo, "rloo_policy_loss", record_advantages)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", record_gradient)
    run_rloo(tiny, total_episodes=16, micro_batch_size=16, token_level_kl=token_level, stop_token="was")
    queries, query_mask, responses, mask, _ = packed[-1]  # the training forward is the last one
    model = utils.load_policy(tiny / "policy", "")
    total = 0.0
    for row in range(16):
        query, response = queries[row][query_mask[row]], responses[row][mask[row]]
        logits = model(torch.cat([query, response]).unsqueeze(0)).logits[0, len(query) - 1 : -1]
        logprobs = logits.log_softmax(-1)[torch.arange(len(response)), response]
        total = (
            total
            + (
                recorded["advantages"][row][: len(response)] * logprobs if token_level else recorded["advantages"][row] * logprobs
            ).sum()
        )
    num_actions = mask.sum() if token_level else 16
    gradients = torch.autograd.grad(-total / num_actions, list(model.parameters()))
    assert max(g.abs().max() for g in gradients) > 1e-2
    for ours, oracle in zip(recorded["gradient"], gradients, strict=True):
        assert (ours - oracle).abs().max() < 1e-6


def test_opt_8_max_grad_norm_really_clips_and_the_norm_is_logged(tiny, in_tmp, monkeypatch):
    norms = []
    step = torch.optim.AdamW.step

    def record(self, *args, **kwargs):
        norms.append(torch.cat([p.grad.flatten() for g in self.param_groups for p in g["params"]]).norm().item())
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", record)
    metrics = run_rloo(tiny, max_grad_norm=1e-3)
    assert max(norms) <= 1.001e-3 and all(row["policy/grad_norm"] > 1e-2 for row in metrics)
    norms.clear()
    metrics = run_rloo(tiny, max_grad_norm=None)
    assert norms == pytest.approx([row["policy/grad_norm"] for row in metrics], rel=1e-4)


# ---- sampling --------------------------------------------------------------------------------------------------------
def draw(policy, queries, n, length, stop_id=None, update=1):
    tokens, mask = utils.left_pad(queries)
    rows = torch.arange(len(queries) * n)
    return train_rloo.sample(policy, tokens, mask, rows, n, length, stop_id, (1, train_rloo.TRAINING, update))


@torch.no_grad()
def chi_square_over_pairs(model, temperature, draws=8_000):
    """Normalised chi-square statistic of the first two sampled tokens against softmax(logits / T); about standard normal."""
    policy = train_rloo.Policy(model, temperature)
    responses, mask, logprobs = draw(policy, [[3, 4, 5]], draws, 2)
    first = (model(torch.tensor([[3, 4, 5]])).logits[0, -1] / temperature).softmax(-1)  # [V]
    V = len(first)
    rows = torch.cat([torch.tensor([[3, 4, 5]]).expand(V, 3), torch.arange(V).unsqueeze(1)], 1)
    joint = first.unsqueeze(1) * (model(rows).logits[:, -1] / temperature).softmax(-1)  # [V, V]
    assert (logprobs.sum(1) - joint.log()[responses[:, 0], responses[:, 1]]).abs().max() < 1e-4 and mask.all()
    expected = (joint.double() * draws).flatten()
    observed = torch.bincount(responses[:, 0] * V + responses[:, 1], minlength=V * V).double()
    common = expected >= 5
    observed = torch.cat([observed[common], observed[~common].sum().reshape(1)])
    expected = torch.cat([expected[common], expected[~common].sum().reshape(1)])
    statistic, freedom = ((observed - expected) ** 2 / expected).sum().item(), len(expected) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_sampled_tokens_follow_softmax_of_logits_over_temperature(temperature):
    model = tiny_model("gpt_neox", vocab_size=23)
    assert abs(chi_square_over_pairs(model, temperature)) < 4  # four standard deviations; the draw is a fixed one


def test_the_checkpoints_generation_config_is_not_obeyed(tiny, tmp_path):
    """Pitfall 12: top_k = 1 in the model's own generation_config made sampling greedy."""
    policy = utils.load_policy(tiny / "policy", "")
    policy.generation_config.update(top_k=1, do_sample=True, repetition_penalty=1.5)
    policy.save_pretrained(tmp_path)
    model = utils.load_policy(tmp_path, "").eval()
    assert model.generation_config.top_k == 1
    responses, _, _ = draw(train_rloo.Policy(model, 1.0), [[3, 4, 5]], 16, 8)
    assert len({tuple(r.tolist()) for r in responses}) == 16


@torch.no_grad()
def test_sampler_log_probs_equal_the_training_forwards(tiny):
    policy = train_rloo.Policy(utils.load_policy(tiny / "policy", "").eval(), 0.7)
    queries, query_mask = utils.left_pad([[3, 4, 5, 6, 7], [8]])
    responses, mask, logprobs = draw(policy, [[3, 4, 5, 6, 7], [8]], 6, 10, stop_id=1)
    batch = queries.repeat_interleave(6, 0), query_mask.repeat_interleave(6, 0), responses, mask
    assert (train_rloo.response_logprobs(policy, batch, 6)[0] - logprobs).abs().max() < 1e-5


@torch.no_grad()
def test_gpt2_positions_restart_behind_left_padding():
    """Pitfall 36: GPT-2 has absolute positions; without explicit ones a left-padded prompt is read shifted."""
    policy = train_rloo.Policy(tiny_model("gpt2"), 1.0)
    together = draw(policy, [[3, 4, 5, 6, 7, 8, 9], [8, 9]], 4, 10)
    alone = train_rloo.sample(
        policy,
        torch.tensor([[8, 9]]),
        torch.ones(1, 2, dtype=torch.bool),
        torch.arange(4, 8),
        4,
        10,
        None,
        (1, train_rloo.TRAINING, 1),
    )
    assert torch.equal(together[0][4:], alone[0]) and (together[2][4:] - alone[2]).abs().max() < 1e-5


@pytest.mark.slow
@torch.no_grad()
def test_a_response_ends_at_its_stop_token_and_nowhere_else(tiny):
    policy = train_rloo.Policy(utils.load_policy(tiny / "policy", "").eval(), 1.0)
    responses, _, _ = draw(policy, [[3, 4, 5]], 500, 30)
    stop = responses[0, 3].item()
    stopped, stopped_mask, _ = draw(policy, [[3, 4, 5]], 500, 30, stop_id=stop)
    for full, cut, m in zip(responses, stopped, stopped_mask, strict=True):
        expected = list(itertools.takewhile(lambda t: t != stop, full.tolist()))
        expected = full.tolist()[: len(expected) + 1]
        assert cut[m].tolist() == expected and m.tolist() == [True] * len(expected) + [False] * (30 - len(expected))
    assert 0 < stopped_mask.all(1).sum() < 500  # both kinds occurred


@torch.no_grad()
def test_rows_may_be_sampled_in_any_grouping(tiny):
    policy = train_rloo.Policy(utils.load_policy(tiny / "policy", "").eval(), 1.0)
    whole = draw(policy, [[3, 4, 5], [6, 7]], 4, 12, stop_id=1)[0]
    queries, mask = utils.left_pad([[3, 4, 5], [6, 7]])
    for row in range(8):
        q = row // 4
        one = train_rloo.sample(policy, queries[[q]], mask[[q]], torch.tensor([row]), 1, 12, 1, (1, train_rloo.TRAINING, 1))[0]
        assert torch.equal(whole[row], one[0])


@pytest.mark.parametrize("stop_token", ["eos", "none", "hotel"])
def test_pad_equal_to_eos_is_no_special_case(tiny, in_tmp, stop_token):
    """Pitfalls 5, 6, 24: the same run with pad == eos in tokenizer and configuration, bit for bit."""
    reference = run_rloo(tiny, stop_token=stop_token, response_length=24)
    for name, kind in (
        ("policy", transformers.AutoModelForCausalLM),
        ("reward", transformers.AutoModelForSequenceClassification),
    ):
        model, tokenizer = kind.from_pretrained(tiny / name), transformers.AutoTokenizer.from_pretrained(tiny / name)
        tokenizer.pad_token, model.config.pad_token_id = tokenizer.eos_token, tokenizer.eos_token_id
        model.save_pretrained(f"same/{name}"), tokenizer.save_pretrained(f"same/{name}")
    assert without_times(run_rloo(Path("same"), stop_token=stop_token, response_length=24)) == without_times(reference)
    stops = [row["val/num_stop_token_ids"] for row in reference]
    assert stops == [0, 0, 0] if stop_token == "none" else max(stops) > 0


def test_the_penalty_asks_for_the_stop_token_in_the_response_only(tiny, in_tmp, monkeypatch):
    """Pitfall 8: prompts that contain the stop token, and a stop token that is not EOS."""
    prompts = [{"prompt": f"hotel {row['prompt']}"} for row in toy.rows("prompts", "train")]
    monkeypatch.setattr(toy, "rows", lambda stage, split, task="toy": prompts)
    monkeypatch.setattr(train_rloo, "response_scores", lambda model, batch, n: torch.zeros(len(batch[0])))
    for row in run_rloo(tiny, stop_token="hotel", missing_eos_penalty=2.0):
        assert row["objective/scores"] == pytest.approx(-2.0 * (1 - row["val/num_stop_token_ids"] / 16))
        assert row["objective/scores"] < -1


# ---- options and data ------------------------------------------------------------------------------------------------
def recorded_advantages(tiny, monkeypatch, **options):
    """(inputs of the first update's advantages, the advantages that were optimised), in the batch's order."""
    seen = {}
    real_loss, real_score = train_rloo.rloo_policy_loss, train_rloo.missing_eos_scores
    with monkeypatch.context() as patch:
        patch.setattr(
            train_rloo,
            "rloo_policy_loss",
            lambda a, b, mask, adv, c: seen.setdefault("advantages", (mask, adv)) and real_loss(a, b, mask, adv, c),
        )
        patch.setattr(train_rloo, "missing_eos_scores", lambda *a: seen.setdefault("scores", real_score(*a)))
        patch.setattr(utils, "permutation", lambda n, *c: list(range(n)))
        patch.setattr(train_rloo, "by_length", lambda masks, n=1: torch.arange(len(masks[0])))
        patch.setattr(train_rloo, "response_logprobs", biased(train_rloo.response_logprobs))
        run_rloo(
            tiny,
            total_episodes=16,
            micro_batch_size=16,
            missing_eos_penalty=None,
            kl_coef=0.3,
            num_ppo_epochs=2,
            **options,
        )
    return seen["scores"], *seen["advantages"]


def biased(real):
    """A reference that differs from the policy: the first model asked in a run (the reference) is shifted by token position."""

    def forward(policy, batch, n):
        logprobs, entropies = real(policy, batch, n)
        if not next(policy.parameters()).requires_grad:
            logprobs = (logprobs - 0.1 * torch.arange(1, logprobs.size(1) + 1)) * batch[3]
        return logprobs, entropies

    return forward


def oracle_advantages(scores, mask, kl_coef, k, token_level, normalize_reward, clip, normalize_advantage):
    """Plain loops over the batch; the KL of token t is 0.1 * (t + 1) by construction."""
    s = [float(x) for x in scores]
    if normalize_reward:
        mean = sum(s) / len(s)
        var = sum((x - mean) ** 2 for x in s) / len(s)
        s = [(x - mean) / math.sqrt(var + 1e-8) for x in s]
    if clip is not None:
        s = [min(max(x, -clip), clip) for x in s]
    lengths = [int(m.sum()) for m in mask]
    kl = [[0.1 * (t + 1) for t in range(n)] for n in lengths]
    result = []
    for i in range(len(s)):
        siblings = [j for j in range(len(s)) if j // k == i // k and j != i]
        if token_level:
            base = s[i] - sum(s[j] for j in siblings) / len(siblings) if siblings else s[i]
            result.append([base - kl_coef * sum(kl[i][t:]) for t in range(lengths[i])])
        else:
            total = [s[j] - kl_coef * sum(kl[j]) for j in range(len(s))]
            result.append([total[i] - sum(total[j] for j in siblings) / len(siblings)])
    if normalize_advantage:
        flat = [x for row in result for x in row]
        mean = sum(flat) / len(flat)
        var = sum((x - mean) ** 2 for x in flat) / len(flat)
        result = [[(x - mean) / math.sqrt(var + 1e-8) for x in row] for row in result]
    return result


@pytest.mark.parametrize("token_level", [False, True])
@pytest.mark.parametrize(
    "normalize_reward, clip, normalize_advantage",
    [(False, None, False), (True, None, False), (False, 0.05, False), (True, 0.5, True)],
)
def test_rloo_14_reinforce_plus_plus_options_change_the_advantages_as_the_oracle_says(
    tiny, in_tmp, monkeypatch, token_level, normalize_reward, clip, normalize_advantage
):
    options = dict(normalize_reward=normalize_reward, reward_clip_range=clip, normalize_advantage=normalize_advantage)
    scores, mask, advantages = recorded_advantages(tiny, monkeypatch, token_level_kl=token_level, **options)
    oracle = oracle_advantages(scores, mask, 0.3, 4, token_level, normalize_reward, clip, normalize_advantage)
    for row, expected, m in zip(advantages, oracle, mask, strict=True):
        ours = row[m].tolist() if token_level else [row.item()]
        assert ours == pytest.approx(expected, abs=2e-5)
    assert scores.abs().max() > 0.1  # clipping at 0.05 had something to clip


def test_one_response_a_prompt_works_with_token_level_kl_and_normalised_advantages(tiny, in_tmp, monkeypatch):
    scores, mask, advantages = recorded_advantages(tiny, monkeypatch, rloo_k=1, token_level_kl=True, normalize_advantage=True)
    oracle = oracle_advantages(scores, mask, 0.3, 1, True, False, None, True)
    for row, expected, m in zip(advantages, oracle, mask, strict=True):
        assert row[m].tolist() == pytest.approx(expected, abs=2e-5)


def test_data_7_the_second_pass_has_the_same_prompts_in_another_order(tiny, in_tmp, monkeypatch):
    prompts = toy.rows("prompts", "train")[:12]
    monkeypatch.setattr(toy, "rows", lambda stage, split, task="toy": prompts)
    seen, left_pad = [], utils.left_pad
    monkeypatch.setattr(
        utils, "left_pad", lambda rows, device=None: seen.append([tuple(r) for r in rows]) or left_pad(rows, device)
    )
    run_rloo(tiny, total_episodes=6 * 16, batch_size=16)
    order = [row for batch in seen for row in batch[::4]]
    first, second = order[:12], order[12:24]
    assert sorted(first) == sorted(second) and first != second and len(set(first)) == 12


@pytest.mark.parametrize("updates, tables, expected", [(25, 10, 10), (23, 10, 10), (4, 10, 4), (5, 0, 0), (5, 1, 1)])
def test_exactly_as_many_sample_tables_as_asked_for(tiny, in_tmp, updates, tables, expected, capsys):
    run_rloo(tiny, total_episodes=updates * 16, num_sample_generations=tables)
    rows = [json.loads(line) for line in Path("runs/run/samples.jsonl").read_text().splitlines()]
    assert len({row["update"] for row in rows}) == expected == capsys.readouterr().out.count("-- samples of update")
    assert all(row.keys() == {"update", "query", "response", "score", "kl", "total"} for row in rows)


def test_the_default_is_ten_tables():
    assert train_rloo.Args.num_sample_generations == 10


@pytest.mark.slow
def test_dummy_run_with_plain_python(tiny, tmp_path):
    """A tiny causal language model is policy and, allowed explicitly, reward model too."""
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": p["prompt"]}) + "\n" for p in toy.rows("prompts", "train")[:8])
    )
    flags = [
        "--dataset",
        tmp_path / "prompts.jsonl",
        "--sft_model_path",
        tiny / "policy",
        "--reward_model_path",
        tiny / "policy",
    ]
    flags += ["--total_episodes", 32, "--batch_size", 16, "--response_length", 8, "--output_dir", "out"]
    refused = launch("train_rloo.py", flags, cwd=tmp_path)
    assert refused.returncode == 2 and "allow_untrained_reward_model" in refused.stderr
    done = launch("train_rloo.py", [*flags, "--allow_untrained_reward_model"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_the_saved_policy_is_an_ordinary_model_folder(tiny, in_tmp):
    run_rloo(tiny)
    tokenizer, model = (
        transformers.AutoTokenizer.from_pretrained("models/rloo"),
        transformers.AutoModelForCausalLM.from_pretrained("models/rloo"),
    )
    tokens = tokenizer("last friday my sister", return_tensors="pt").input_ids
    assert model.generate(tokens, max_new_tokens=3, do_sample=False).shape == (1, 7)


def test_held_out_evaluation_is_the_same_draw_before_and_after(tiny, in_tmp):
    result = train_rloo.main(rloo_args(tiny, learning_rate=0.0, eval_dataset="toy:test", eval_every=1))
    assert result["before"] == pytest.approx(result["after"], abs=1e-5) and len(result["before"]) == 8
    assert all("eval/objective/scores" in row for row in read_metrics(result["run"]))


def test_every_update_draws_anew_also_for_the_same_prompts_and_weights(tiny, in_tmp, monkeypatch):
    prompts = toy.rows("prompts", "train")[:4]
    monkeypatch.setattr(toy, "rows", lambda stage, split, task="toy": prompts)
    drawn, real = [], train_rloo.sample
    monkeypatch.setattr(train_rloo, "sample", lambda *a: drawn.append(real(*a)) or drawn[-1])
    run_rloo(tiny, learning_rate=0.0, total_episodes=48)
    texts = [{tuple(r[m].tolist()) for r, m in zip(*batch[:2], strict=True)} for batch in drawn]
    assert len(texts) == 3 and all(len(t) == 16 for t in texts)
    assert not (texts[0] & texts[1] or texts[1] & texts[2] or texts[0] & texts[2])


def test_gen_13_the_stop_token_is_not_found_in_the_filler():
    """The filler is token 0; a vocabulary whose stop token is 0 must not count padding as an ending."""
    responses = torch.tensor([[5, 0, 0], [5, 6, 7], [5, 0, 0]])
    mask = torch.tensor([[True, False, False], [True, True, True], [True, True, False]])
    assert train_rloo.has_stopped(responses, mask, 0).tolist() == [False, False, True]
    assert train_rloo.has_stopped(responses, mask, None).all()


# ---- speed: nothing of it changes the result -------------------------------------------------------------------------
def test_rows_of_similar_length_share_a_slice_and_come_back_in_order():
    mask = torch.arange(9) < torch.tensor([5, 2, 7, 7, 1, 9, 3, 3]).unsqueeze(1)  # [8, 9]
    assert train_rloo.by_length([mask]).tolist() == [4, 1, 6, 7, 0, 2, 3, 5]
    assert train_rloo.by_length([mask, mask.flip(0)]).tolist() == [1, 6, 0, 3, 4, 7, 2, 5]  # sums 8 5 16 8 8 16 5 8
    assert train_rloo.by_length([mask], 2).tolist() == [6, 7, 0, 1, 2, 3, 4, 5]  # longest of a pair: 5 7 9 3
    seen = []

    def widths(rows, mask):
        seen.append(mask.sum(1).tolist())
        return rows * 10, mask.sum(1)

    rows = torch.arange(8)
    tens, lengths = train_rloo.in_slices(widths, [rows, mask], 3)
    assert seen == [[1, 2, 3], [3, 5, 7], [7, 9]]
    assert tens.tolist() == (rows * 10).tolist() and lengths.tolist() == mask.sum(1).tolist()


@pytest.mark.parametrize("at_once", [1, 50, 700])
def test_logits_in_pieces_give_the_same_log_probs_and_gradients(monkeypatch, at_once):
    """The pieces: every row alone, uneven ones, and all in two; the model's logits are never there at once."""
    batch = random_batch()
    results = []
    for size in (10**9, at_once):
        monkeypatch.setattr(train_rloo, "LOGITS_AT_ONCE", size)
        policy, sizes = train_rloo.Policy(tiny_model("gpt_neox"), 0.7), []
        policy.model.get_output_embeddings().register_forward_hook(lambda module, inputs, logits: sizes.append(logits.numel()))
        logprobs, entropies = train_rloo.response_logprobs(policy, batch, 1)
        (logprobs * torch.arange(logprobs.size(1))).sum().backward()
        results.append((logprobs, entropies, [p.grad for p in policy.parameters()], sizes))
    (a, b, gradients, whole), (c, d, pieced, pieces) = results
    vocab_size = policy.model.config.vocab_size
    assert len(whole) == 1 and len(pieces) > 2 and max(pieces) <= max(at_once, vocab_size)
    assert (a - c).abs().max() < 1e-5 and (b - d).abs().max() < 1e-5
    for x, y in zip(gradients, pieced, strict=True):
        assert (x - y).abs().max() < 1e-5 * max(1, x.abs().max())


def test_a_head_that_is_more_than_a_matrix_is_left_to_the_library():
    """Gemma 2 caps its logits; what its library forward says is what we compute, and a plain head is known as one."""
    shape = dict(SMALL, head_dim=8, num_key_value_heads=2, final_logit_softcapping=3.0, query_pre_attn_scalar=8)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("gemma2", **shape)).eval()
    assert not utils.has_plain_head(model) and utils.has_plain_head(tiny_model("gpt_neox"))
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(100)
        batch = random_batch()
        policy = train_rloo.Policy(model, 0.7)
        logprobs, _ = train_rloo.response_logprobs(policy, batch, 1)
        for row in range(3):
            query, response = batch[0][row][batch[1][row]], batch[2][row][batch[3][row]]
            logits = model(torch.cat([query, response]).unsqueeze(0)).logits[0, len(query) - 1 : -1]
            assert logits.abs().max() <= 3.0
            alone = (logits / 0.7).log_softmax(-1)[torch.arange(len(response)), response]
            assert (logprobs[row, : len(response)] - alone).abs().max() < 1e-4


def test_packed_sampling_draws_what_plain_sampling_draws(tiny):
    """n responses in the row of their prompt, against a row each: the same tokens, some of which end early."""
    policy = train_rloo.Policy(utils.load_policy(tiny / "policy", "").eval(), 0.7)
    queries, mask = utils.left_pad([[3, 4, 5, 6], [7, 8], [9, 10, 11], [5]], "cpu")
    rows = torch.arange(12)
    stop_id = train_rloo.sample(policy, queries, mask, rows, 3, 9, None, (1, 0, 1))[0].flatten().mode().values.item()
    packed = train_rloo.sample(policy, queries, mask, rows, 3, 9, stop_id, (1, 0, 1))
    one_each = queries.repeat_interleave(3, 0), mask.repeat_interleave(3, 0)
    plain = train_rloo.sample(policy, *one_each, rows, 1, 9, stop_id, (1, 0, 1))
    assert torch.equal(packed[0], plain[0]) and torch.equal(packed[1], plain[1])
    assert (packed[2] - plain[2]).abs().max() < 1e-5
    assert len(set(plain[1].sum(1).tolist())) > 1 and len({tuple(row) for row in plain[0].tolist()}) > 8
