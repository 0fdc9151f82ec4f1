"""
Tests of single details, each named after its tag in the code: [GEN-4] is tested by test_gen_4_...

Details whose tests need the oracles of another file are tested there, under the same kind of name; the README's index names all.
Oracles here are plain transformers on rows without padding, loops, and what a short run hands from function to function.
"""

import contextlib
import gc
import math
import threading

import pytest
import torch
from accelerate import Accelerator
from conftest import launch, ppo_args, read_metrics, rloo_args, run_ppo, run_rloo
from test_labels import gpt2, labels  # noqa: F401 (fixtures)
from test_labels import run as run_on_labels
from test_rloo import run_worker, tiny_model
from test_stages import reward_args, sft_args, write_rows
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForSequenceClassification, GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerFast
from worker import recording

from rlhf_details import data, engines, runs, toy, train_ppo, train_reward, train_rloo, train_sft, utils

both = pytest.mark.parametrize("script", [train_ppo, train_rloo], ids=["ppo", "rloo"])
RUN = {train_ppo: run_ppo, train_rloo: run_rloo}
LOSS = {train_ppo: "ppo_policy_loss", train_rloo: "rloo_policy_loss"}


def one_per_row(script):
    """The last argument of RLOO's functions, which PPO's do not have: one response a row."""
    return (1,) if script is train_rloo else ()


def draw(script, policy, prompts, response_length, stop_id=None, coordinates=(1, 0, 1), rows=None):
    """A response to each prompt (lists of ids) by either script's sampler: responses, mask, log-probs."""
    queries, mask = utils.left_pad(prompts)
    rows = torch.arange(len(prompts)) if rows is None else rows
    return script.sample(policy, queries, mask, rows, *one_per_row(script), response_length, stop_id, coordinates)


def ragged_batch(prompts, lengths, width, vocab_size):
    """(queries, query_mask, responses, response_mask): random tokens everywhere, real as far as the masks say."""
    generator = torch.Generator().manual_seed(0)
    queries, query_mask = utils.left_pad(prompts)
    responses = torch.randint(2, vocab_size, (len(prompts), width), generator=generator)
    return queries, query_mask, responses, torch.arange(width) < torch.tensor(lengths).unsqueeze(1)


def rows_of(batch):
    """(prompt, response) of each row of a batch, as lists of ids without padding."""
    queries, query_mask, responses, mask = batch
    return [(q[m].tolist(), r[n].tolist()) for q, m, r, n in zip(queries, query_mask, responses, mask, strict=True)]


def record(monkeypatch, module, name):
    """[(arguments, result), ...] of all later calls of a function of a module."""
    calls, real = [], getattr(module, name)

    def recorder(*args, **kwargs):
        calls.append((args, real(*args, **kwargs)))
        return calls[-1][1]

    monkeypatch.setattr(module, name, recorder)
    return calls


# ---- data, models --------------------------------------------------------------------------------------------------------
def test_data_1_prompt_and_completion_are_tokenised_apart():
    backend = ByteLevelBPETokenizer()
    backend.train_from_iterator(["hello hello hello"], 300, min_frequency=1, special_tokens=["<eos>"], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend._tokenizer, eos_token="<eos>")
    prompt, completion = tokenizer("hel").input_ids, tokenizer("lo").input_ids
    assert tokenizer("hello").input_ids != prompt + completion, "no merge crosses the seam: the test shows nothing"
    assert data.encode(tokenizer, "hel", "lo") == (prompt, [*completion, tokenizer.eos_token_id])


@both
def test_data_7_a_batch_may_reach_from_one_pass_over_the_prompts_into_the_next(tiny, in_tmp, monkeypatch, script):
    prompts = [row["prompt"] for row in toy.rows("prompts", "train")[:6]]
    write_rows("six.jsonl", [{"prompt": prompt} for prompt in prompts])
    calls, k = record(monkeypatch, script, "sample"), 4 if script is train_rloo else 1
    RUN[script](tiny, dataset="six.jsonl", total_episodes=12 * k, batch_size=4 * k)  # 3 updates of 4 prompts: twice 6
    tokenizer = toy.tokenizer()
    seen = [tokenizer.decode(q[m]) for (_, queries, masks, *_), _ in calls for q, m in zip(queries, masks, strict=True)]
    seen = seen[:: len(seen) // 12]
    assert sorted(seen) == sorted(2 * prompts)


def test_model_2_attention_dropout_that_is_a_number_is_off_too():
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, attention_dropout=0.5
    )
    model, tokens = GPTNeoXForCausalLM(config).train(), torch.arange(24).reshape(2, 12)
    assert not torch.equal(model(tokens).logits, model(tokens).logits), "this model has no such dropout: the test shows nothing"
    utils.disable_dropout(model)
    assert model.training and torch.equal(model(tokens).logits, model(tokens).logits)


# ---- reward model ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("script", [train_reward, train_ppo, train_rloo], ids=["reward", "ppo", "rloo"])
@torch.no_grad()
def test_rm_6_scores_are_fp32_under_bf16(tiny, script):
    reward = script.Reward(utils.load_reward_model(tiny / "reward", ""))
    tokens, mask = utils.left_pad([[3, 4, 5, 6, 7], [8, 9, 10]])
    rest = () if script is train_reward else (utils.positions_from_mask(mask), torch.full((2, 1), 4))
    seen = []
    reward.model.base_model.register_forward_hook(lambda module, args, output: seen.append(output.last_hidden_state[:, -1]))
    with torch.autocast("cpu", torch.bfloat16):
        scores = reward(tokens, mask, *rest).flatten()
    expected = torch.nn.functional.linear(seen[0].float(), reward.model.score.weight).flatten()
    assert scores.dtype == torch.float32 and torch.allclose(scores, expected, atol=1e-6)
    assert not torch.equal(scores, scores.bfloat16().float())


def test_rm_5_the_gain_is_trained_and_a_bias_would_not_be(labels, gpt2, monkeypatch):  # noqa: F811
    made, scores = record(monkeypatch, train_reward, "Reward"), torch.randn(5, 4, requires_grad=True)
    run_on_labels(gpt2)
    ((_, reward),) = made
    assert abs(reward.gain.item() - 1) > 1e-4 and not isinstance(reward.bias, torch.Tensor)
    gain, bias = torch.ones(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    train_reward.best_of_k_loss(gain * scores + bias, torch.tensor([0, 1, 2, 3, 0])).backward()
    assert abs(bias.grad.item()) < 1e-6 < 1e-2 < abs(gain.grad.item())


def test_rm_9_training_starts_from_scores_of_mean_0_and_std_1(labels, gpt2, monkeypatch):  # noqa: F811
    computed, prepared = record(monkeypatch, train_reward, "gain_and_bias"), []
    real = engines.prepare

    def prepare(accelerator, module, optimizer):  # what comes right before the first step
        prepared.append((module.gain.item(), module.bias))
        return real(accelerator, module, optimizer)

    monkeypatch.setattr(engines, "prepare", prepare)
    run_on_labels(gpt2, normalization="gain_bias", normalize_samples=64)
    ((gain, bias),), raw = prepared, computed[0][0][0]
    assert (raw * gain + bias).mean().item() == pytest.approx(0, abs=1e-5)
    assert (raw * gain + bias).std(correction=0).item() == pytest.approx(1, abs=1e-5)


# ---- rollout ---------------------------------------------------------------------------------------------------------------
def assert_frequencies(script, temperature):
    """First tokens of 2,000 responses come as often as softmax(logits / T) says, each within five standard deviations."""
    model, number = tiny_model("gpt_neox", vocab_size=23), 2_000
    expected = (model(torch.tensor([[3, 4, 5]])).logits[0, -1].double() / temperature).softmax(-1)
    assert expected.max() < 0.9 and expected.min() * number < 200
    tokens = draw(script, script.Policy(model, temperature), [[3, 4, 5]] * number, 1)[0].flatten()
    seen = torch.bincount(tokens, minlength=23)
    assert ((seen - number * expected).abs() <= 5 * (number * expected * (1 - expected)).sqrt() + 1).all()


@both
@torch.no_grad()
def test_gen_1_tokens_come_as_often_as_the_softmax_says(script):
    assert_frequencies(script, 1.0)


@both
@torch.no_grad()
def test_gen_2_the_sampler_divides_by_the_temperature(script):
    assert_frequencies(script, 0.6)


@both
@torch.no_grad()
def test_gen_3_log_probs_are_of_the_tempered_softmax(script):
    model = tiny_model("gpt2", vocab_size=23)
    batch = ragged_batch([[3, 4, 5, 6], [7, 8]], [5, 3], 6, 23)
    ours = script.response_logprobs(script.Policy(model, 0.6), batch, *one_per_row(script))[0]
    for i, (prompt, response) in enumerate(rows_of(batch)):
        logits = model(torch.tensor([prompt + response])).logits[0].double() / 0.6
        expected = [logits.log_softmax(-1)[len(prompt) - 1 + t, token].item() for t, token in enumerate(response)]
        assert ours[i][: len(response)].tolist() == pytest.approx(expected, abs=1e-5)


@both
@torch.no_grad()
def test_gen_4_tokens_are_a_function_of_coordinates_and_row(script):
    policy, prompts = script.Policy(tiny_model("gpt_neox", vocab_size=23), 1.0), [[3, 4, 5], [6], [7, 8]]
    whole = draw(script, policy, prompts, 8, coordinates=(1, 0, 2))[0]
    assert not torch.equal(whole, draw(script, policy, prompts, 8, coordinates=(2, 0, 1))[0])  # their sum is the same
    assert not torch.equal(whole, draw(script, policy, prompts, 8, coordinates=(1, 1, 2))[0])
    torch.manual_seed(7)  # no generator has a say
    for i in range(3):  # nor has who else is in the batch
        assert torch.equal(draw(script, policy, [prompts[i]], 8, coordinates=(1, 0, 2), rows=torch.tensor([i]))[0][0], whole[i])
    same = draw(script, policy, [[3, 4, 5]] * 3, 8)[0]
    assert len({tuple(row.tolist()) for row in same}) == 3  # rows of one prompt differ by their number


@both
def test_gen_4_the_seed_is_in_the_noise_and_in_the_order_of_the_prompts(tiny, in_tmp, monkeypatch, script):
    calls, queries = record(monkeypatch, script, "sample"), []
    for seed in (5, 6):
        calls.clear()
        RUN[script](tiny, total_episodes=16, seed=seed)
        assert {next(x for x in args if isinstance(x, tuple))[0] for args, _ in calls} == {seed}
        queries.append([args[1][args[2]].tolist() for args, _ in calls])
    assert queries[0] != queries[1]


@both
@torch.no_grad()
def test_gen_5_nothing_is_sampled_after_the_stop_token(script):
    policy = script.Policy(tiny_model("gpt_neox", vocab_size=23), 1.0)
    free, free_mask, _ = draw(script, policy, [[3, 4, 5]] * 80, 20)
    responses, mask, logprobs = draw(script, policy, [[3, 4, 5]] * 80, 20, stop_id=9)
    assert free_mask.all()
    for i in range(80):
        tokens = free[i].tolist()
        length = tokens.index(9) + 1 if 9 in tokens else 20
        assert mask[i].tolist() == [t < length for t in range(20)]
        assert responses[i].tolist() == tokens[:length] + [0] * (20 - length) and (logprobs[i, length:] == 0).all()
    assert len(set(mask.sum(1).tolist())) > 5


@both
@torch.no_grad()
def test_gen_6_a_padded_prompt_is_continued_as_it_would_be_alone(script):
    policy = script.Policy(tiny_model("gpt2", vocab_size=23), 1.0)  # learnt, absolute positions
    together = draw(script, policy, [[3, 4, 5, 6, 7, 8], [9, 10]], 8)
    alone = draw(script, policy, [[9, 10]], 8, rows=torch.tensor([1]))
    assert torch.equal(together[0][1], alone[0][0]) and (together[2][1] - alone[2][0]).abs().max() < 1e-5


@both
@torch.no_grad()
def test_gen_7_a_token_is_predicted_by_the_state_before_it(script):
    """Row by row and token by token: the last logits of everything before a token. RLOO: two responses packed in a row."""
    model = tiny_model("gpt2", vocab_size=23)
    batch = ragged_batch([[3, 4, 5, 6], [3, 4, 5, 6], [7, 8], [7, 8]], [5, 3, 1, 6], 6, 23)
    ours = script.response_logprobs(script.Policy(model, 1.0), batch, *((2,) if script is train_rloo else ()))[0]
    for i, (prompt, response) in enumerate(rows_of(batch)):
        for t, token in enumerate(response):
            expected = model(torch.tensor([prompt + response[:t]])).logits[0, -1].log_softmax(-1)[token].item()
            assert ours[i, t].item() == pytest.approx(expected, abs=1e-5)


@both
@torch.no_grad()
def test_gen_8_logits_are_made_of_response_positions_alone_and_in_pieces(script, monkeypatch):
    policy, sizes = script.Policy(tiny_model("gpt_neox", vocab_size=23), 1.0), []
    policy.model.get_output_embeddings().register_forward_hook(lambda module, args, output: sizes.append(output.numel()))
    batch = ragged_batch([[3, 4, 5, 6, 7, 8, 9, 10], [7, 8]], [5, 3], 6, 23)
    whole = script.response_logprobs(policy, batch, *one_per_row(script))[0]
    assert sum(sizes) <= 2 * 6 * 23  # of 2 rows' 6 tokens, and not of their prompts
    sizes.clear()
    monkeypatch.setattr(script, "LOGITS_AT_ONCE", 50)
    pieces = script.response_logprobs(policy, batch, *one_per_row(script))[0]
    assert max(sizes) <= 50 and len(sizes) > 4 and torch.allclose(whole, pieces, atol=1e-6)


@both
def test_gen_10_the_actor_samples_with_the_weights_from_before_training_however_late(tiny, in_tmp, monkeypatch, script):
    """The actor waits until the update that it should overlap with has been trained on."""
    trained, pushed, used = {u: threading.Event() for u in range(1, 4)}, {}, {}
    sample, push, step = script.sample, script.Actor.push, torch.optim.AdamW.step

    def late_sample(policy, *rest):
        update = next(x for x in rest if isinstance(x, tuple))[2]
        assert update == 1 or trained[update - 1].wait(60)
        used[update] = [p.clone() for p in policy.parameters()]
        return sample(policy, *rest)

    def recording_push(self, model, update):
        pushed[update] = [p.detach().clone() for p in model.parameters()]
        push(self, model, update)

    def recording_step(self, *args, **kwargs):
        result = step(self, *args, **kwargs)
        next(event for event in trained.values() if not event.is_set()).set()
        return result

    monkeypatch.setattr(script, "sample", late_sample)
    monkeypatch.setattr(script.Actor, "push", recording_push)
    monkeypatch.setattr(torch.optim.AdamW, "step", recording_step)
    RUN[script](tiny, async_rollouts=True, learning_rate=1e-2)
    assert sorted(used) == sorted(pushed) == [1, 2, 3]
    for update in used:
        assert all(torch.equal(a, b) for a, b in zip(used[update], pushed[update], strict=True))
    assert not torch.equal(used[2][0], used[3][0])


# ---- scores and KL -----------------------------------------------------------------------------------------------------------
@both
@torch.no_grad()
def test_rew_1_the_bias_in_the_configuration_is_added(tiny, script):
    model, batch = utils.load_reward_model(tiny / "reward", ""), ragged_batch([[3, 4, 5], [6]], [2, 4], 4, 30)
    plain = script.response_scores(script.Reward(model), batch, *one_per_row(script))
    model.config.reward_bias = 0.75
    assert torch.allclose(script.response_scores(script.Reward(model), batch, *one_per_row(script)), plain + 0.75)


@both
@torch.no_grad()
def test_rew_2_scores_are_read_at_each_responses_own_end(tiny, script):
    library = AutoModelForSequenceClassification.from_pretrained(tiny / "reward")
    eos = library.config.eos_token_id
    batch = ragged_batch([[3, 4, 5, 6], [eos, 8], [9], [10, 11]], [5, 1, 3, 6], 6, 30)
    batch[2][1, 0] = batch[2][2, 1] = eos  # nothing is found by looking for it
    batch[2][3, 0] = library.config.pad_token_id
    ours = script.response_scores(script.Reward(utils.load_reward_model(tiny / "reward", "")), batch, *one_per_row(script))
    for score, (prompt, response) in zip(ours.tolist(), rows_of(batch), strict=True):
        hidden = library.base_model(torch.tensor([prompt + response])).last_hidden_state[0, -1]
        assert score == pytest.approx(library.score(hidden).item(), abs=1e-5)


class Trace:
    """A short run of a script, and what its functions were given and gave."""

    def __init__(self, script, tiny, monkeypatch, **options):
        self.logprobs, self.training, real = {}, [], script.response_logprobs
        self.losses = record(monkeypatch, script, LOSS[script])

        def response_logprobs(policy, batch, *n):
            result = real(policy, batch, *n)
            if not torch.is_grad_enabled() and len(batch[2]) == 16:  # not the probe of packed rows
                self.logprobs.setdefault(id(policy), []).append((result[0], batch[3]))
            elif torch.is_grad_enabled():
                self.training.append((result[1], batch[3]))
            return result

        monkeypatch.setattr(script, "response_logprobs", response_logprobs)
        knobs = dict(total_episodes=32, num_ppo_epochs=2, micro_batch_size=16, learning_rate=1e-2, kl_coef=0.5)
        self.metrics = RUN[script](tiny, **(knobs | options))
        self.by_model = list(self.logprobs.values())  # the reference's and the policy's, of each update, in the order of phase 2


@both
def test_rew_5_the_kl_is_the_difference_of_log_probs_which_may_be_negative(tiny, in_tmp, monkeypatch, script):
    trace = Trace(script, tiny, monkeypatch)
    for row, (reference, _), (policy, mask) in zip(trace.metrics, *trace.by_model, strict=True):
        assert row["objective/kl"] == pytest.approx(((policy - reference) * mask).sum().item() / 16, abs=1e-4)
    assert abs(trace.metrics[1]["objective/kl"]) > 0.1


@both
@torch.no_grad()
def test_rew_6_log_probs_and_entropies_are_zero_behind_the_end(tiny, script):
    policy = script.Policy(tiny_model("gpt_neox", vocab_size=23), 1.0)
    batch = ragged_batch([[3, 4, 5], [6]], [2, 5], 6, 23)
    outputs = script.response_logprobs(policy, batch, *one_per_row(script))
    assert all((x[~batch[3]] == 0).all() and (x[batch[3]] != 0).all() for x in outputs)
    other = [*batch[:2], torch.where(batch[3], batch[2], 1), batch[3]]
    assert all(
        torch.equal(x, y) for x, y in zip(outputs, script.response_logprobs(policy, other, *one_per_row(script)), strict=True)
    )


# ---- one process and two -------------------------------------------------------------------------------------------------------
slow = pytest.mark.slow
LOOPS = [pytest.param(train_ppo, marks=slow, id="ppo"), pytest.param(train_rloo, id="rloo")]
STAGES = [pytest.param(train_sft, marks=slow, id="sft"), pytest.param(train_reward, marks=slow, id="reward")]


@pytest.fixture(scope="module")
def two_processes(tiny, tmp_path_factory):
    """two_processes(script): rows of metrics and recorded advantages of the same run on one process and on two; made once."""
    made = {}

    def run(script):
        if script not in made:
            folder = tmp_path_factory.mktemp("two")
            if script in RUN:
                options = dict(normalize_reward=True, normalize_advantage=True, token_level_kl=True)
                options = options if script is train_rloo else dict(whiten_rewards=True, cliprange_value=0.05)
                arguments = rloo_args if script is train_rloo else ppo_args
                args = arguments(tiny, num_ppo_epochs=2, micro_batch_size=4, learning_rate=3e-3, **options)
                with contextlib.chdir(folder), recording(script.__name__.rpartition(".")[2]) as one:
                    rows = read_metrics(script.main(args)["run"])
                made[script] = (rows, [one]), run_worker(folder / "2", args, 2)
            else:
                write_rows(folder / "rows.jsonl", PAIRS)
                flags = ["--dataset", "rows.jsonl", "--batch_size", 8, "--learning_rate", 1e-3, "--overwrite"]
                flags += ["--base_model" if script is train_sft else "--sft_model_path", tiny / "policy"]
                results = []
                for processes in (1, 2):
                    name = f"{script.__name__.rpartition('.')[2]}.py"
                    done = launch(name, [*flags, "--run_name", processes], processes, cwd=folder)
                    assert done.returncode == 0 and f"{processes} process(es)" in done.stdout, done.stderr[-2000:]
                    results.append((read_metrics(folder / f"runs/{processes}"), []))
                made[script] = tuple(results)
        return made[script]

    return run


PAIRS = [row | {"chosen": row["completion"], "rejected": "we ."} for row in toy.rows("sft", "train")[:24]]


@pytest.mark.parametrize("script", LOOPS)
def test_rew_7_advantages_are_those_of_the_whole_batch_on_any_number_of_processes(two_processes, script):
    (_, one), (_, two) = two_processes(script)
    first = [torch.cat([x.flatten() for r in records for x in r["advantages"]]).sort().values for records in (one, two)]
    assert first[0].shape == first[1].shape and torch.allclose(*first, atol=2e-3) and first[0].std() > 0.1


@pytest.mark.parametrize("script", [*LOOPS, *STAGES])
def test_opt_6_the_gradient_is_the_same_on_two_processes(two_processes, script):
    (one, _), (two, _) = two_processes(script)
    norms = [[row["policy/grad_norm"] for row in rows] for rows in (one, two)]
    assert len(norms[0]) >= 3 and norms[0] == pytest.approx(norms[1], rel=1e-3)


@pytest.mark.parametrize("script", LOOPS)
def test_log_2_metrics_are_means_over_all_actions_of_all_processes(two_processes, script):
    (one, _), (two, _) = two_processes(script)
    names = "policy/approxkl_avg policy/clipfrac_avg policy/entropy_avg loss/policy_avg val/ratio val/ratio_var".split()
    for a, b in zip(one, two, strict=True):
        assert [a[name] for name in names] == pytest.approx([b[name] for name in names], rel=2e-3, abs=1e-6)
    assert one[-1]["policy/approxkl_avg"] > 1e-4


@pytest.mark.parametrize("script, options", [
    (train_ppo, {}), (train_rloo, {}), (train_rloo, dict(token_level_kl=True, normalize_advantage=True))
], ids=["ppo", "rloo", "rloo-tokens"])  # fmt: skip
def test_log_2_means_are_over_real_tokens(tiny, in_tmp, monkeypatch, script, options):
    trace = Trace(script, tiny, monkeypatch, total_episodes=16, num_ppo_epochs=3, micro_batch_size=4, **options)
    (row,), logratios = trace.metrics, actions_of(trace.losses)
    entropies = [x for values, mask in trace.training for x in values[mask].tolist()]
    losses = [x for args, result in trace.losses for x in result[0][result[3] if len(result) == 4 else args[2]].tolist()]
    clipped = [x for args, result in trace.losses for x in result[2][result[3] if len(result) == 4 else args[2]].tolist()]
    assert len(entropies) < 3 * 16 * 8, "no response ends early: the test shows nothing"
    assert row["policy/entropy_avg"] == pytest.approx(sum(entropies) / len(entropies), rel=1e-4)
    assert row["policy/approxkl_avg"] == pytest.approx(sum(x * x / 2 for x in logratios) / len(logratios), rel=1e-4)
    assert row["policy/clipfrac_avg"] == pytest.approx(sum(clipped) / len(clipped), rel=1e-4) and sum(clipped) > 0
    assert row["loss/policy_avg"] == pytest.approx(sum(losses) / len(losses), rel=1e-3, abs=1e-5)
    assert row["val/ratio"] == pytest.approx(sum(map(math.exp, logratios)) / len(logratios), rel=1e-4)


# ---- PPO -----------------------------------------------------------------------------------------------------------------------
def test_ppo_1_the_value_model_starts_as_a_copy_of_the_reward_model_which_training_leaves_alone(tiny, in_tmp, monkeypatch):
    rewards, policies = record(monkeypatch, train_ppo, "Reward"), record(monkeypatch, train_ppo, "Policy")
    before = AutoModelForSequenceClassification.from_pretrained(tiny / "reward").state_dict()
    starts, real = [], engines.prepare

    def prepare(accelerator, module, optimizer):
        starts.append({name: x.clone() for name, x in module.critic.model.state_dict().items()})
        return real(accelerator, module, optimizer)

    monkeypatch.setattr(engines, "prepare", prepare)
    run_ppo(tiny, learning_rate=1e-2)
    critic, reward = policies[1][1].critic, rewards[0][1]
    assert all(torch.equal(before[name], x) for name, x in starts[0].items())
    assert all(torch.equal(before[name], x) for name, x in reward.model.state_dict().items())
    assert not torch.equal(before["score.weight"], critic.model.state_dict()["score.weight"])


def test_ppo_8_whitened_rewards_keep_their_mean(tiny, in_tmp, monkeypatch):
    plain, used = record(monkeypatch, train_ppo, "token_rewards"), record(monkeypatch, train_ppo, "compute_gae")
    run_ppo(tiny, whiten_rewards=True, total_episodes=16)
    ((_, _, response_mask, _), rewards), ((whitened, *_), _) = plain[0], used[0]
    states = train_ppo.value_mask(response_mask)
    assert whitened[states].mean().item() == pytest.approx(rewards[states].mean().item(), abs=1e-5)
    assert whitened[states].var(correction=0).item() == pytest.approx(1, abs=1e-4) and (whitened[~states] == 0).all()
    assert abs(rewards[states].mean()) > 0.05 and (~states).any()


def test_ppo_10_advantages_are_whitened_over_response_tokens(tiny, in_tmp, monkeypatch):
    raw, used = record(monkeypatch, train_ppo, "compute_gae"), record(monkeypatch, train_ppo, "ppo_policy_loss")
    run_ppo(tiny, total_episodes=16)
    (_, _, mask, advantages, _), _ = used[0]
    assert advantages[mask].mean().item() == pytest.approx(0, abs=1e-5) and (advantages[~mask] == 0).all()
    assert advantages[mask].var(correction=0).item() == pytest.approx(1, abs=1e-4)
    assert (~mask).any() and raw[0][1][0].abs().max() > 0


def test_ppo_14_the_loss_is_the_policys_and_vf_coef_times_the_values(tiny, in_tmp, monkeypatch):
    losses, real = [], Accelerator.backward
    monkeypatch.setattr(Accelerator, "backward", lambda self, loss, **k: losses.append(loss.item()) or real(self, loss, **k))
    (row,) = run_ppo(tiny, total_episodes=16, micro_batch_size=4, vf_coef=0.3)
    assert len(losses) == 4
    assert sum(losses) == pytest.approx(row["loss/policy_avg"] + 0.3 * row["loss/value_avg"], abs=1e-5)
    assert row["loss/value_avg"] > 0.05


# ---- RLOO ----------------------------------------------------------------------------------------------------------------------
def test_rloo_2_a_response_pays_for_the_sum_of_its_kl(tiny, in_tmp):
    row = run_rloo(tiny, kl_coef=0.5, learning_rate=1e-2)[-1]
    assert row["objective/rlhf_reward"] == pytest.approx(row["objective/scores"] - 0.5 * row["objective/kl"], abs=1e-5)
    assert row["objective/kl"] > 0.1 and row["val/sequence_lengths"] > 2


def test_rloo_7_with_one_step_the_ratio_is_exactly_one_whatever_the_sampler_says(tiny, in_tmp, monkeypatch):
    """Under bf16 the sampler's log-probs are off; here by 0.1 a token, which a response of 8 would turn into a ratio of 0.4."""
    real = train_rloo.sample

    def off(*args):
        responses, mask, logprobs = real(*args)
        return responses, mask, (logprobs + 0.1) * mask

    monkeypatch.setattr(train_rloo, "sample", off)
    for row in run_rloo(tiny, learning_rate=1e-2):
        assert row["val/ratio"] == 1 and row["policy/clipfrac_avg"] == row["policy/approxkl_avg"] == 0


# ---- optimisation ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("script", [train_ppo, train_rloo, train_sft, train_reward], ids=["ppo", "rloo", "sft", "reward"])
def test_opt_4_epsilon_and_weight_decay_reach_the_optimizer(tiny, in_tmp, monkeypatch, script):
    write_rows("rows.jsonl", PAIRS[:8])
    arguments = {
        train_ppo: ppo_args, train_rloo: rloo_args, train_reward: reward_args, train_sft: lambda _, **changes: sft_args(**changes)
    }  # fmt: skip
    seen, step = [], torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, *a, **k: seen.append(self.param_groups) or step(self, *a, **k))
    script.main(arguments[script](tiny, adam_eps=3e-4, weight_decay=0.07, **({} if script in RUN else {"batch_size": 4})))
    assert seen and all(groups[0]["eps"] == 3e-4 and groups[0]["weight_decay"] == 0.07 for groups in seen)


@both
def test_opt_7_gradients_cross_processes_once_a_step(tiny, in_tmp, monkeypatch, script):
    held, backward, real = [], [], Accelerator.backward

    @contextlib.contextmanager
    def no_sync(self, module):
        held.append(True)
        yield
        held.pop()

    monkeypatch.setattr(Accelerator, "no_sync", no_sync)
    monkeypatch.setattr(Accelerator, "backward", lambda self, x, **k: backward.append(bool(held)) or real(self, x, **k))
    RUN[script](tiny, micro_batch_size=4, num_ppo_epochs=2, total_episodes=32)
    assert backward == [True, True, True, False] * 4  # two updates of two passes


@both
def test_opt_9_every_pass_has_an_order_of_its_own(tiny, in_tmp, monkeypatch, script):
    calls = record(monkeypatch, utils, "permutation")
    RUN[script](tiny, num_ppo_epochs=2, total_episodes=32, **({"rloo_k": 2} if script is train_rloo else {}))
    orders = [tuple(order) for (n, *_), order in calls if n == (8 if script is train_rloo else 16)]
    assert len(orders) == 4 == len(set(orders)) and all(sorted(order) == list(range(len(order))) for order in orders)


@both
def test_opt_10_updates_are_rounded_up(tiny, in_tmp, script):
    rows = RUN[script](tiny, total_episodes=33)
    assert [row["episode"] for row in rows] == [16, 32, 48]


# ---- metrics -------------------------------------------------------------------------------------------------------------------
@both
def test_log_1_entropy_sums_over_real_tokens(tiny, in_tmp, monkeypatch, script):
    trace = Trace(script, tiny, monkeypatch)
    for row, (logprobs, mask) in zip(trace.metrics, trace.by_model[1], strict=True):
        sums = [
            -sum(x for x, real in zip(*pair, strict=True) if real) for pair in zip(logprobs.tolist(), mask.tolist(), strict=True)
        ]
        assert row["objective/entropy"] == pytest.approx(sum(sums) / 16, abs=1e-4) and row["objective/entropy"] > 0
    assert not all(mask.all() for _, mask in trace.by_model[1])


def actions_of(calls):
    """Log-ratios of all actions, as floats, of the recorded calls of a policy loss."""
    return [x for args, result in calls for x in result[1][result[3] if len(result) == 4 else args[2]].tolist()]


@both
def test_log_3_approxkl_is_half_the_mean_squared_log_ratio(tiny, in_tmp, monkeypatch, script):
    trace = Trace(script, tiny, monkeypatch, total_episodes=16, num_mini_batches=2)
    logratios = actions_of(trace.losses)
    assert trace.metrics[0]["policy/approxkl_avg"] == pytest.approx(sum(x * x / 2 for x in logratios) / len(logratios), rel=1e-4)
    assert trace.metrics[0]["policy/approxkl_avg"] > 1e-4


@both
def test_log_4_ratio_var_is_the_variance_over_actions(tiny, in_tmp, monkeypatch, script):
    trace = Trace(script, tiny, monkeypatch, total_episodes=16, num_mini_batches=2)
    ratios = torch.tensor(actions_of(trace.losses)).exp()
    assert trace.metrics[0]["val/ratio_var"] == pytest.approx(ratios.var(correction=0).item(), rel=1e-3)
    assert trace.metrics[0]["val/ratio"] == pytest.approx(ratios.mean().item(), rel=1e-4)


@both
def test_log_5_what_the_kl_adds_to_the_score_is_negative(tiny, in_tmp, script):
    row = RUN[script](tiny, kl_coef=0.5, learning_rate=1e-2)[-1]
    assert row["objective/non_score_reward"] == pytest.approx(-0.5 * row["objective/kl"], abs=1e-5) and row["objective/kl"] > 0.1


@both
def test_log_6_the_gap_is_the_samplers_to_the_first_forward_and_the_first_ratio_that_of_the_first_step(
    tiny, in_tmp, monkeypatch, script
):
    real = script.sample

    def off(*args):
        responses, mask, logprobs = real(*args)
        return responses, mask, (logprobs + 0.1) * mask

    monkeypatch.setattr(script, "sample", off)
    for row in RUN[script](tiny, num_ppo_epochs=2, learning_rate=1e-2):
        assert row["val/logprob_gap"] == pytest.approx(0.1, abs=1e-3) and abs(row["val/first_ratio"] - 1) < 1e-4
        assert abs(row["val/ratio"] - 1) > 1e-4


@pytest.mark.parametrize("script", LOOPS)
def test_no_update_leaves_a_graph_behind(tiny, in_tmp, monkeypatch, script):
    """Fault 34: a loss kept without `detach` keeps its graph. Tensors that have one are counted wherever a row is logged."""
    alive, log = [], runs.Run.log

    def counting_log(self, metrics, update):
        gc.collect()
        alive.append(sum(isinstance(x, torch.Tensor) and x.grad_fn is not None for x in gc.get_objects()))
        log(self, metrics, update)

    monkeypatch.setattr(runs.Run, "log", counting_log)
    for micro_batch_size in (16, 4):
        RUN[script](tiny, num_ppo_epochs=2, micro_batch_size=micro_batch_size)
    assert len(alive) == 6 and len(set(alive)) == 1 and alive[0] > 0
