"""
Log-probs, entropies, values and scores of every page on every architecture, against plain forwards of unpadded rows;
packed rows against plain ones; and the architectures that packing.py must find not to be packed.
"""

from types import SimpleNamespace

import pytest
import torch
from tiny_models import PACKED, PAGES, REWARDED, plain_logprobs, random_batch, rest, rows_of, tiny_model, tiny_reward
from torch import nn

from rlhf_details import train_reward, train_rloo, utils
from rlhf_details.plumbing.machine import packing

PLAIN = ["mistral", "gpt_neo", "bloom", "gemma2"]  # their layers look at a window, or know no positions
SCALED = ["cohere", "granite"]  # Their logits are scaled after the output embedding, and those of gemma2 are capped.
pages = pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
rewarded = pytest.mark.parametrize("page", REWARDED.values(), ids=REWARDED)


@pytest.fixture(scope="module")
def models():
    """models(kind): a tiny model of that architecture, made once; tests must not change it."""
    made = {}
    return lambda kind: made[kind] if kind in made else made.setdefault(kind, tiny_model(kind))


# ---- log-probs -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", PACKED + PLAIN + SCALED)
@pages
@torch.no_grad()
def test_gen_7_log_probs_equal_a_plain_forward_of_each_row_on_every_architecture(models, page, kind):
    """Neither padding nor packing nor which logits are made shows. The softmax is the tempered one. [GEN-3] [RLOO-9]"""
    model, batch = models(kind), random_batch()
    for n in (1, 2, 4) if rest(page) and kind in PACKED else (1,):
        outputs = page.response_logprobs(page.Policy(model, 0.7), batch, *rest(page, n))
        for i, (prompt, response) in enumerate(rows_of(batch)):
            for ours, expected in zip(outputs, plain_logprobs(model, prompt, response, 0.7), strict=False):
                assert (ours[i, : len(response)] - expected).abs().max() < 2e-5
        assert outputs[0].dtype == torch.float32 and outputs[0][batch[3]].std() > 0.3


@pages
@pytest.mark.parametrize("at_once", [1, 200])
def test_gen_8_logits_in_pieces_give_the_same_log_probs_and_gradients(page, at_once):
    """The pieces: one token each, and uneven ones. No logits are made of a prompt's columns, and never all at once."""
    batch, results = random_batch(), []
    for size in (10**9, at_once):
        policy, pieces = page.Policy(tiny_model("gpt_neox"), 0.7), []
        policy.logits_at_once = size
        hook = lambda module, inputs, logits, pieces=pieces: pieces.append(logits.numel())  # noqa: E731
        policy.model.get_output_embeddings().register_forward_hook(hook)
        outputs = page.response_logprobs(policy, batch, *rest(page))
        sizes = list(pieces)  # The backward pass may compute the pieces once more.
        (outputs[0] * torch.arange(6)).sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in policy.parameters()])
        results.append((*outputs, gradient, sizes))
    (*whole, one), (*pieced, many) = results
    assert len(one) == 1 and one[0] <= 12 * 6 * 97 and len(many) > 1 and max(many) <= max(at_once, 97)
    for a, b in zip(whole, pieced, strict=True):
        assert (a - b).abs().max() < 1e-5 * max(1, a.abs().max())


def test_a_head_that_is_not_known_is_refused_in_one_line(capsys):
    model = tiny_model("llama")
    model.lm_head.register_forward_hook(lambda module, args, logits: logits)
    train_rloo.Policy(model, 1.0)  # a hook that changes nothing
    real = model.forward
    model.forward = lambda **inputs: type("Output", (), {"logits": real(**inputs).logits.square()})
    with pytest.raises(SystemExit) as end:
        train_rloo.Policy(model, 1.0)
    line = capsys.readouterr().err
    assert end.value.code == 2 and "llama" in line and line.count("\n") == 1


@pages
@torch.no_grad()
def test_rew_6_log_probs_and_entropies_are_zero_behind_the_end_whatever_stands_there(models, page):
    policy, batch = page.Policy(models("gpt_neox"), 1.0), random_batch()
    outputs = page.response_logprobs(policy, batch, *rest(page))
    assert all((x[~batch[3]] == 0).all() and (x[batch[3]] != 0).all() for x in outputs)
    other = batch._replace(responses=torch.where(batch[3], batch[2], 1))
    again = page.response_logprobs(policy, other, *rest(page))
    assert all(torch.equal(x, y) for x, y in zip(outputs, again, strict=True))


# ---- scores ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "llama", "qwen2", "mistral"])
@rewarded
@torch.no_grad()
def test_rew_2_scores_are_read_at_each_responses_own_end(page, kind):
    """Prompts and responses hold 0, the model's padding token: nothing is found by looking for it. [RLOO-10]"""
    model, batch = tiny_reward(kind), random_batch()
    batch[0][:, -1], batch[2][::3, 0] = 0, 0
    states = [model.base_model(torch.tensor([p + r])).last_hidden_state[0, -1] for p, r in rows_of(batch)]
    expected = model.score(torch.stack(states)).squeeze(1)
    for n in (1, 2, 4) if rest(page) and kind in PACKED else (1,):
        (ours,) = page.response_scores(page.Reward(model), batch, *rest(page, n))
        torch.testing.assert_close(ours, expected, atol=2e-5, rtol=0)
    assert expected.std() > 0.05


@pytest.mark.parametrize("page", [*REWARDED.values(), train_reward], ids=[*REWARDED, "reward"])
@torch.no_grad()
def test_rm_6_scores_are_fp32_under_bf16(page):
    reward = page.Reward(tiny_reward("gpt_neox"))
    tokens, mask = utils.left_pad([[3, 4, 5, 6, 7], [8, 9, 10]])
    more = () if page is train_reward else (utils.positions_from_mask(mask), torch.full((2, 1), 4))
    seen = []
    reward.model.base_model.register_forward_hook(lambda module, args, out: seen.append(out.last_hidden_state[:, -1]))
    with torch.autocast("cpu", torch.bfloat16):
        scores = reward(tokens, mask, *more).flatten()
    expected = nn.functional.linear(seen[0].float(), reward.model.score.weight).flatten()
    assert scores.dtype == torch.float32 and torch.allclose(scores, expected, atol=1e-6)
    assert not torch.equal(scores, scores.bfloat16().float())


# ---- the layout that a run chooses -----------------------------------------------------------------------------------
def choose(policy_model, reward_model=None, **changes):
    """The packing of k = 4, micro-batches of 4 and 8 for sampling, with the functions of train_rloo."""
    args = dict(micro_batch_size=4, rollout_micro_batch_size=8, share_prompts=True, response_length=3)
    reward_model = train_rloo.Reward(reward_model) if reward_model else None
    prompts = [SimpleNamespace(ids=list(range(n))) for n in (3, 11, 5)]
    page = train_rloo.response_logprobs, train_rloo.response_scores
    policy = train_rloo.Policy(policy_model, 1.0)
    return packing.choose(SimpleNamespace(**(args | changes)), 4, policy, reward_model, prompts, *page)


@pytest.mark.parametrize("kind", PACKED)
def test_ordinary_layers_are_packed(models, kind, capsys):
    reward = tiny_reward(kind) if kind in ("gpt2", "gpt_neox", "llama", "qwen2") else None
    assert choose(models(kind), reward) == (4, 4, 4)
    assert "packed rows" in capsys.readouterr().out


ONE = dict(micro_batch_size=1, rollout_micro_batch_size=1)


@pytest.mark.parametrize(
    "policy, reward, changes, expected, why",
    [
        ("mistral", None, {}, (1, 4, 1), "the policy (mistral) has"),
        ("gpt_neo", None, {}, (1, 4, 1), "the policy (gpt_neo) has"),
        ("gemma2", None, {}, (1, 4, 1), "the policy (gemma2) has"),
        ("llama", "mistral", {}, (1, 4, 1), "the reward model (mistral) has"),
        ("bloom", None, {}, (1, 4, 1), "packed "),
        ("llama", "bloom", {}, (1, 4, 1), "packed "),
        ("llama", None, dict(share_prompts=False), (1, 4, 1), "--no_share_prompts"),
        ("llama", None, ONE, (1, 1, 1), "a micro-batch holds one response to a prompt"),
        ("llama", None, dict(micro_batch_size=3), (2, 2, 4), ""),
    ],
)
def test_rows_are_plain_where_a_model_or_the_user_wants_them(models, policy, reward, changes, expected, why, capsys):
    """test_gen_7_... compares the plain rows of these architectures with single forwards."""
    found = choose(models(policy), reward and tiny_reward(reward), **changes)
    assert found == expected
    assert not why or capsys.readouterr().out.startswith(f"plain rows, one response each: {why}")


@pytest.mark.parametrize("broken", ["policy", "reward model", "no packing"])
def test_rloo_12_a_window_that_the_configuration_hides_is_found_by_the_numbers(broken, capsys):
    """What fails on packed rows runs in plain ones as well."""
    policy, reward = tiny_model("llama"), tiny_reward("llama")
    model = reward.model if broken == "reward model" else policy.model
    real = model.forward

    def windowed(input_ids=None, attention_mask=None, position_ids=None, **inputs):
        if attention_mask is not None and attention_mask.dim() == 4:  # It looks at the last four columns only.
            if broken == "no packing":
                raise ValueError("a mask of two dimensions, please")
            L = torch.arange(attention_mask.size(-1))
            lowest = torch.finfo(torch.bfloat16).min
            attention_mask = attention_mask.masked_fill(L.unsqueeze(1) - L >= 4, lowest)
        return real(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **inputs)

    model.forward = windowed
    assert choose(policy, reward) == (1, 4, 1)
    said = "(ValueError: a mask of two dimensions, please)" if broken == "no packing" else "differ by"
    assert said in capsys.readouterr().out
