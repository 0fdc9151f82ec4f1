"""The equations of the three scripts against slow loops written from their formulas, and against hand-made numbers."""

import json
import math
import random
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from conftest import tiny_config
from torch import nn
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from rlhf_details import train_reward, train_rloo, train_sft


def uniform(generator, *shape, low=-1.0, high=1.0):
    return torch.rand(*shape, generator=generator) * (high - low) + low


def ragged_mask(lengths, width):
    """[M, width] bool: the first lengths[i] columns of row i."""
    return torch.tensor([[t < length for t in range(width)] for length in lengths])


# ---- leave-one-out ---------------------------------------------------------------------------------------------------
def slow_rloo(rewards, k):
    result = []
    for first in range(0, len(rewards), k):
        group = rewards[first : first + k]
        for i, reward in enumerate(group):
            siblings = [r for j, r in enumerate(group) if j != i]
            result.append(reward - sum(siblings) / len(siblings))
    return result


def test_rloo_3_rloo_advantages_of_the_documented_example():
    blocks = torch.tensor([[1.0, 2, 3], [2, 3, 4], [5, 6, 7], [8, 9, 10]])  # k = 4 blocks over n = 3 prompts
    advantages = train_rloo.rloo_advantages(blocks.T.reshape(-1), 4).reshape(3, 4).T
    assert advantages[0, 0].item() == pytest.approx(-4)  # 1 - (2 + 5 + 8) / 3
    assert advantages[2, 1].item() == pytest.approx(6 - 14 / 3)  # the seventh of the flat blocks
    torch.testing.assert_close(advantages.sum(0), torch.zeros(3), atol=1e-5, rtol=0)


@pytest.mark.parametrize("k", [2, 3, 4, 7])
def test_rloo_advantages_equal_the_loop_and_sum_to_zero_in_each_group(k):
    rewards = uniform(torch.Generator().manual_seed(k), 5 * k, low=-3, high=8)
    advantages = train_rloo.rloo_advantages(rewards, k)
    torch.testing.assert_close(advantages, torch.tensor(slow_rloo(rewards.tolist(), k)), atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(advantages.reshape(5, k).sum(1), torch.zeros(5), atol=1e-5, rtol=0)


@pytest.mark.parametrize("k", [2, 4])
def test_a_reward_that_is_the_prompt_number_gives_exactly_zero_advantage(k):
    assert train_rloo.rloo_advantages(torch.arange(6.0).repeat_interleave(k), k).tolist() == [0.0] * 6 * k


def test_equal_siblings_but_one_give_moderate_advantages():
    got = train_rloo.rloo_advantages(torch.tensor([1.0, 0, 0, 0]), 4)  # a leave-one-out std would be 0 here
    torch.testing.assert_close(got, torch.tensor([1.0, -1 / 3, -1 / 3, -1 / 3]))


@pytest.mark.parametrize("k", [1, 2, 4])
def test_rloo_4_token_level_advantages_equal_the_loop(k):
    generator = torch.Generator().manual_seed(k)
    scores, mask = uniform(generator, 8, low=-2, high=5), ragged_mask([1, 5, 3, 2, 4, 5, 1, 3], 5)
    kl = uniform(generator, 8, 5) * mask
    base = slow_rloo(scores.tolist(), k) if k > 1 else scores.tolist()
    expected = [[base[i] - 0.3 * sum(kl[i, u].item() for u in range(t, 5)) for t in range(5)] for i in range(8)]
    got = train_rloo.token_level_advantages(scores, kl, k, 0.3)
    torch.testing.assert_close(got, torch.tensor(expected), atol=5e-6, rtol=1e-5)


def test_one_response_a_prompt_without_kl_has_its_score_as_advantage_everywhere():
    got = train_rloo.token_level_advantages(torch.tensor([2.0, -1.0]), torch.zeros(2, 3), 1, 0.5)
    assert got.tolist() == [[2.0] * 3, [-1.0] * 3]


def test_token_level_kl_is_not_the_sequence_level_one():
    generator = torch.Generator().manual_seed(0)
    scores, kl = uniform(generator, 4), uniform(generator, 4, 3)
    tokens = train_rloo.token_level_advantages(scores, kl, 2, 0.5)
    sequences = train_rloo.rloo_advantages(scores - 0.5 * kl.sum(1), 2).unsqueeze(1)
    assert (tokens - sequences).abs().max() > 0.05
    assert (tokens[:, :1] - tokens).abs().max() > 0.05  # and it differs from token to token


# ---- scores ----------------------------------------------------------------------------------------------------------
def test_rew_3_missing_eos_subtracts_or_replaces():
    scores, ended = torch.tensor([2.0, 3.0, -4.0]), torch.tensor([True, False, False])
    assert train_rloo.missing_eos_scores(scores, ended, 1.0, "replace").tolist() == [2, -1, -1]  # -4 rises to -1
    assert train_rloo.missing_eos_scores(scores, ended, 1.0, "subtract").tolist() == [2, 2, -5]  # -4 falls
    assert train_rloo.missing_eos_scores(scores, ended, None, "subtract").tolist() == [2, 3, -4]
    assert train_rloo.missing_eos_scores(scores, ended, 0.0, "replace").tolist() == [2, 0, 0]  # 0 is not None


def slow_whiten(values):
    mean = sum(values) / len(values)
    variance = sum((v - mean) ** 2 for v in values) / len(values)
    return [(v - mean) / math.sqrt(variance + 1e-8) for v in values]


def test_rloo_13_scores_are_normalised_then_clipped_each_switch_alone_as_well():
    scores = [0.0, 0.0, 0.0, 40.0]
    white = slow_whiten(scores)  # [-0.577, -0.577, -0.577, 1.732]
    for normalize, clip in [(False, None), (True, None), (False, 10.0), (True, 1.0), (True, 0.5), (True, 10.0)]:
        expected = white if normalize else scores
        expected = expected if clip is None else [min(clip, max(-clip, s)) for s in expected]
        got = train_rloo.shape_scores(torch.tensor(scores), normalize, clip)
        torch.testing.assert_close(got, torch.tensor(expected), atol=1e-5, rtol=0)


def test_equal_scores_are_shaped_to_zero_not_nan():
    assert train_rloo.shape_scores(torch.full((4,), 3.7), True, None).tolist() == [0.0] * 4


def test_clipping_alone_cuts_both_ends():
    assert train_rloo.shape_scores(torch.tensor([-7.0, -1.0, 2.0, 9.0]), False, 2.0).tolist() == [-2, -1, 2, 2]


# ---- the policy loss -------------------------------------------------------------------------------------------------
CASES = [  # advantage, ratio, loss, clipped, at cliprange 0.2
    (1.0, 1.5, -1.2, True),
    (-1.0, 0.5, 0.8, True),
    (-1.0, 1.5, 1.5, False),
    (1.0, 0.5, -0.5, False),
    (2.0, 1.0, -2.0, False),
    (0.0, 1.5, 0.0, False),
    (1.0, 1.1, -1.1, False),
]


def test_rloo_6_policy_loss_of_a_response_has_the_hand_made_values():
    advantages, ratios, losses, flags = map(torch.tensor, zip(*CASES, strict=True))
    old = uniform(torch.Generator().manual_seed(0), len(CASES), 3, low=-3, high=0)
    new = old + (ratios.log() / 3).unsqueeze(1)  # a third of the log-ratio a token
    mask = torch.ones_like(old, dtype=torch.bool)
    got, logratio, clipped, actions = train_rloo.rloo_policy_loss(new, old, mask, advantages, 0.2)
    torch.testing.assert_close(got, losses, atol=1e-5, rtol=0)
    torch.testing.assert_close(logratio, ratios.log(), atol=1e-5, rtol=0)
    assert clipped.tolist() == flags.tolist() and actions.tolist() == [True] * len(CASES)


def test_policy_loss_of_a_token_has_the_hand_made_values():
    advantages, ratios, losses, flags = (torch.tensor([column]) for column in zip(*CASES, strict=True))
    old = uniform(torch.Generator().manual_seed(0), 1, len(CASES), low=-3, high=0)
    mask = torch.ones_like(old, dtype=torch.bool)
    got, logratio, clipped, actions = train_rloo.rloo_policy_loss(old + ratios.log(), old, mask, advantages, 0.2)
    torch.testing.assert_close(got, losses, atol=1e-5, rtol=0)
    torch.testing.assert_close(logratio, ratios.log(), atol=1e-5, rtol=0)
    assert torch.equal(clipped, flags) and torch.equal(actions, mask)


def slow_policy_loss(new, old, mask, advantages, clip):
    """Plain lists; `advantages` of numbers (a response is an action) or of lists (a token is)."""
    losses, flags = [], []
    for i, advantage in enumerate(advantages):
        logratios = [(new[i][t] - old[i][t]) if mask[i][t] else 0.0 for t in range(len(mask[i]))]
        actions = [(advantage, sum(logratios), True)]
        if isinstance(advantage, list):
            actions = list(zip(advantage, logratios, mask[i], strict=True))
        row, row_flags = [], []
        for a, logratio, real in actions:
            ratio = math.exp(logratio)
            unclipped, clipped = -a * ratio, -a * min(max(ratio, 1 - clip), 1 + clip)
            row.append(max(unclipped, clipped) if real else 0.0)
            row_flags.append(bool(real and clipped > unclipped))
        losses.append(row if isinstance(advantage, list) else row[0])
        flags.append(row_flags if isinstance(advantage, list) else row_flags[0])
    return losses, flags


@pytest.mark.parametrize("clip", [0.1, 0.2, 0.5])
@pytest.mark.parametrize("token_level", [False, True])
def test_policy_loss_equals_the_loop_and_padding_counts_for_nothing(token_level, clip):
    generator = torch.Generator().manual_seed(3)
    mask = ragged_mask([1, 4, 6, 2, 3, 6, 5, 1], 6)
    old = uniform(generator, 8, 6, low=-3, high=0)
    new = old + uniform(generator, 8, 6, low=-0.8, high=0.8)
    new, old = torch.where(mask, new, torch.tensor(7.0)), torch.where(mask, old, torch.tensor(-5.0))  # garbage there
    advantages = uniform(generator, *((8, 6) if token_level else (8,)), low=-2, high=2)
    losses, flags = slow_policy_loss(new.tolist(), old.tolist(), mask.tolist(), advantages.tolist(), clip)
    got, logratio, clipped, actions = train_rloo.rloo_policy_loss(new, old, mask, advantages, clip)
    torch.testing.assert_close(got, torch.tensor(losses), atol=1e-5, rtol=1e-5)
    assert clipped.tolist() == flags and clipped.any() and not clipped.all()
    assert logratio.shape == actions.shape == advantages.shape
    assert actions.tolist() == (mask.tolist() if token_level else [True] * 8)
    assert not token_level or (logratio[~mask] == 0).all()


def test_rloo_5_a_tenth_more_a_token_is_a_ratio_of_exp_of_a_tenth_of_the_length():
    old = torch.full((3, 8), -2.0)
    mask = ragged_mask([1, 2, 8], 8)
    losses, logratio, clipped, _ = train_rloo.rloo_policy_loss(old + 0.1, old, mask, torch.full((3,), -1.0), 0.2)
    torch.testing.assert_close(losses, torch.tensor([0.1, 0.2, 0.8]).exp())
    torch.testing.assert_close(logratio, torch.tensor([0.1, 0.2, 0.8]))
    losses, _, clipped, _ = train_rloo.rloo_policy_loss(old + 0.1, old, mask, torch.ones(3), 0.2)
    torch.testing.assert_close(losses, torch.tensor([-math.exp(0.1), -1.2, -1.2]))
    assert clipped.tolist() == [False, True, True]


@pytest.mark.parametrize("token_level", [False, True])
def test_gradient_at_ratio_one_is_the_gradient_of_reinforce(token_level):
    generator = torch.Generator().manual_seed(5)
    weights, tokens = uniform(generator, 5, 7, 11), torch.randint(11, (5, 7), generator=generator)
    mask = ragged_mask([7, 1, 4, 6, 2], 7)
    advantages = uniform(generator, *((5, 7) if token_level else (5,)), low=-2, high=2)

    def gradient(loss_of):
        w = weights.clone().requires_grad_()
        loss_of(w.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)).backward()
        return w.grad

    def reinforce(logprobs):
        a = advantages if token_level else advantages.unsqueeze(1)
        return -(a * logprobs * mask).sum()

    clipped = gradient(lambda lp: train_rloo.rloo_policy_loss(lp, lp.detach(), mask, advantages, 0.2)[0].sum())
    torch.testing.assert_close(clipped, gradient(reinforce), atol=1e-6, rtol=0)


# ---- rows and masks --------------------------------------------------------------------------------------------------
def test_rows_per_forward_is_the_largest_that_fits():
    for k in range(1, 25):
        for size in range(1, 40):
            n, episodes = train_rloo.rows_per_forward(k, size)
            fitting = [d for d in range(1, k + 1) if k % d == 0 and (d <= size or d == 1)]
            assert n == max(fitting), (k, size)
            assert episodes == max(m for m in range(1, size + 1) if m % n == 0), (k, size)


def pack_example(n, prompts=2, Q=4, R=3, seed=0):
    """Two groups of n adjacent rows: left-padded prompts, right-padded responses, distinct token ids."""
    generator = torch.Generator().manual_seed(seed)
    query_lengths = [Q - 1, Q] * prompts
    query_mask = ragged_mask([query_lengths[p] for p in range(prompts) for _ in range(n)], Q).flip(1)
    response_mask = ragged_mask([1 + int(torch.randint(R, (), generator=generator)) for _ in range(prompts * n)], R)
    queries = (1 + torch.arange(prompts * Q).reshape(prompts, Q)).repeat_interleave(n, 0) * query_mask
    responses = (100 + torch.arange(prompts * n * R).reshape(-1, R)) * response_mask
    return queries, query_mask, responses, response_mask


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_rloo_11_pack_draws_the_rows_of_its_definition(n, seed):
    Q, R, prompts = 4, 3, 2
    batch = queries, query_mask, responses, response_mask = pack_example(n, prompts, Q, R, seed)
    tokens, mask, positions, index = train_rloo.pack(*batch, n)
    L = Q + n * R
    assert tokens.shape == positions.shape == (prompts, L) and index.tolist() == [
        Q - 1 if i == 0 else Q + r * R + i - 1 for r in range(n) for i in range(R)
    ]
    for p in range(prompts):
        # column -> (None or response number, step, real, token)
        columns = [(None, t, query_mask[p * n, t].item(), queries[p * n, t].item()) for t in range(Q)]
        for r in range(n):
            e = p * n + r
            columns += [(r, i, response_mask[e, i].item(), responses[e, i].item()) for i in range(R)]
        prompt_length = sum(real for owner, _, real, _ in columns if owner is None)
        for c, (owner, step, real, token) in enumerate(columns):
            if not real:
                continue
            before = sum(columns[t][2] for t in range(step)) if owner is None else prompt_length + step
            assert tokens[p, c] == token and positions[p, c] == before, (p, c)
            if n == 1:
                continue
            for other, (other_owner, other_step, other_real, _) in enumerate(columns):
                if owner is None:
                    sees = other_owner is None and other_real and other_step <= step
                elif other_owner is None:
                    sees = other_real
                else:
                    sees = other_owner == owner and other_real and other_step <= step
                value = mask[p, 0, c, other].item()
                assert value == 0 if sees else value < -1e30, (p, c, other)
        if n == 1:
            assert mask[p].tolist() == [real for _, _, real, _ in columns]
        else:
            assert mask.shape == (prompts, 1, L, L)
            assert (mask[p, 0] == 0).any(1).all() and torch.isfinite(mask.bfloat16()).all()  # no row of NaN


def test_trim_removes_only_columns_that_are_padding_in_every_row():
    query_mask = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 1, 1, 1], [0, 0, 0, 0, 1]]).bool()
    response_mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]]).bool()
    queries, responses = torch.arange(15).reshape(3, 5), torch.arange(100, 112).reshape(3, 4)
    got = train_rloo.trim((queries, query_mask, responses, response_mask))
    expected = queries[:, 2:], query_mask[:, 2:], responses[:, :3], response_mask[:, :3]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    full = queries, torch.ones_like(query_mask), responses, torch.ones_like(response_mask)
    assert all(torch.equal(a, b) for a, b in zip(train_rloo.trim(full), full, strict=True))


# ---- noise -----------------------------------------------------------------------------------------------------------
def slow_hash(x):
    x &= 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def int32_values():
    some = random.Random(0)
    edges = [0, 1, 2, -1, -2, 2**31 - 1, -(2**31), 1 << 15, 1 << 16, 65535, -65536]
    return edges + [some.randrange(-(2**31), 2**31) for _ in range(2000)]


def test_hash32_is_lowbias32():
    values = int32_values()
    got = train_rloo.hash32(torch.tensor(values, dtype=torch.int32))
    assert got.dtype == torch.int32
    assert [v & 0xFFFFFFFF for v in got.tolist()] == [slow_hash(v) for v in values]


def test_fold_hashes_key_xor_coordinate_for_numbers_and_tensors():
    keys = torch.tensor(int32_values(), dtype=torch.int32)
    coordinates = keys.flip(0)
    expected = [slow_hash(a ^ b) for a, b in zip(keys.tolist(), coordinates.tolist(), strict=True)]
    assert [v & 0xFFFFFFFF for v in train_rloo.fold(keys, coordinates).tolist()] == expected
    assert [v & 0xFFFFFFFF for v in train_rloo.fold(keys, 77).tolist()] == [slow_hash(k ^ 77) for k in keys.tolist()]


class FixedLogits(nn.Module):
    """Stands in for a language model: the same logits after every context."""

    def __init__(self, logits):
        super().__init__()
        self.logits, self.config, self.device = logits, GPTNeoXConfig(num_hidden_layers=1, vocab_size=len(logits)), logits.device

    def base_model(self, input_ids, **inputs):
        return SimpleNamespace(last_hidden_state=torch.zeros(*input_ids.shape, 1))

    def get_output_embeddings(self):
        return lambda states: self.logits.expand(*states.shape[:-1], -1)

    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, use_cache=False):
        return SimpleNamespace(logits=self.logits.expand(*input_ids.shape, -1))


def draw(logits, temperature, rows, steps, coordinates=(1, 0, 1), stop_id=None):
    """Tokens, mask and log-probs [len(rows), steps] that the shipped sampler draws from fixed logits."""
    policy = train_rloo.Policy(FixedLogits(logits), temperature)
    queries = torch.ones(len(rows), 1, dtype=torch.long)
    return train_rloo.sample(policy, queries, queries.bool(), rows, 1, steps, stop_id, coordinates)


def noise_of(monkeypatch, coordinates, rows, steps, vocab_size=40):
    """The noise [rows, steps, V] that the sampler adds to the logits."""
    original, seen = train_rloo.gumbel_noise, []

    def spy(keys, size):
        seen.append(original(keys, size))
        return seen[-1]

    with monkeypatch.context() as patch:
        patch.setattr(train_rloo, "gumbel_noise", spy)
        draw(torch.zeros(vocab_size), 1.0, torch.as_tensor(rows), steps, coordinates)
    return torch.stack(seen, 1)


def correlation(x, y):
    x, y = x.double().reshape(-1), y.double().reshape(-1)
    return torch.corrcoef(torch.stack([x, y]))[0, 1].item()


def test_noise_has_the_moments_and_the_distribution_of_gumbel(monkeypatch):
    noise = noise_of(monkeypatch, (1, 0, 1), range(500), 10, 40).double().reshape(-1).sort().values
    n = noise.numel()
    assert n == 200_000 and torch.isfinite(noise).all()
    # tolerances are 4 standard errors: of the mean pi / sqrt(6 n), of the variance (kurtosis 5.4) pi^2/6 sqrt(4.4 / n)
    assert abs(noise.mean().item() - 0.57722) < 4 * math.pi / math.sqrt(6 * n)
    assert abs(noise.var().item() - math.pi**2 / 6) < 4 * math.pi**2 / 6 * math.sqrt(4.4 / n)
    cdf = (-(-noise).exp()).exp()
    steps = torch.arange(n + 1).double() / n
    distance = torch.maximum((cdf - steps[:-1]).abs(), (cdf - steps[1:]).abs()).max().item()
    assert distance < 2.7 / math.sqrt(n)  # Kolmogorov: exceeded with probability 2 exp(-2 * 2.7^2), 1 in 10^6


def test_noise_is_finite_for_every_hash_value_and_reaches_far_into_the_upper_tail():
    noise = train_rloo.gumbel_noise(torch.arange(20_000, dtype=torch.int32), 500)  # 10^7 draws
    assert torch.isfinite(noise).all() and noise.dtype == torch.float32
    # the largest of N is about log N = 16.1 +- 1.3, and the smallest about -log log N = -2.8
    assert 14 < noise.max() < 22 and -3.3 < noise.min() < -2.4
    assert (noise > 10).float().mean().item() == pytest.approx(math.exp(-10), rel=0.2)


def test_noise_of_the_extreme_hash_values_is_finite_and_finest_in_the_upper_tail(monkeypatch):
    extremes = []
    for value in (0, 1, 2**31 - 1, -1, -(2**31), -(2**31) + 1):  # no search finds keys that hash to these
        monkeypatch.setattr(train_rloo, "hash32", lambda x, v=value: torch.full_like(x, v))
        extremes.append(train_rloo.gumbel_noise(torch.zeros(1, dtype=torch.int32), 3))
    noise = torch.stack(extremes)
    assert torch.isfinite(noise).all()
    assert 20 < noise.max() < 23  # log of 2^31 is 21.5; 24-bit numbers next to 1 would end at 17
    assert noise.min() < -2.5


def test_noise_is_a_function_of_its_coordinates(monkeypatch):
    torch.manual_seed(0)
    one = noise_of(monkeypatch, (1, 2, 3), range(6), 5)
    torch.manual_seed(1)
    torch.rand(3)
    assert torch.equal(one, noise_of(monkeypatch, (1, 2, 3), range(6), 5))
    assert torch.equal(one[[4, 1]], noise_of(monkeypatch, (1, 2, 3), [4, 1], 5))  # grouping changes nothing
    assert torch.equal(one[:, :2], noise_of(monkeypatch, (1, 2, 3), range(6), 2))
    assert torch.equal(one[..., :7], noise_of(monkeypatch, (1, 2, 3), range(6), 5, 7))


def test_noise_changes_with_each_coordinate_and_with_their_order(monkeypatch):
    one = noise_of(monkeypatch, (1, 2, 3), range(6), 5)
    for other in [(2, 2, 3), (1, 3, 3), (1, 2, 4), (2, 1, 3), (1, 3, 2), (3, 2, 1), (0, 2, 3), (1, 2, 2), (3, 1, 2)]:
        assert (one == noise_of(monkeypatch, other, range(6), 5)).float().mean() < 0.01, other
    for row in range(6):
        for step in range(5):
            for other_row, other_step in [(r, t) for r in range(6) for t in range(5) if (r, t) != (row, step)]:
                same = (one[row, step] == one[other_row, other_step]).float().mean()
                assert same < 0.1, (row, step, other_row, other_step)
    swapped = noise_of(monkeypatch, (1, 2, 5), [3], 1), noise_of(monkeypatch, (1, 2, 3), [5], 1)  # update and row
    assert (swapped[0] == swapped[1]).float().mean() < 0.1


def test_noise_of_neighbours_is_uncorrelated(monkeypatch):
    noise = noise_of(monkeypatch, (1, 0, 1), range(500), 10, 40)
    pairs = {
        "rows": (noise[1:], noise[:-1]),
        "steps": (noise[:, 1:], noise[:, :-1]),
        "tokens": (noise[..., 1:], noise[..., :-1]),
        "row and step": (noise[1:, :-1], noise[:-1, 1:]),
        "row and token": (noise[1:, :, :-1], noise[:-1, :, 1:]),
    }
    for number, name in enumerate(("seeds", "purposes", "updates")):
        coordinates = [1, 0, 1]
        coordinates[number] += 1
        pairs[name] = noise, noise_of(monkeypatch, tuple(coordinates), range(500), 10, 40)
    for name, (x, y) in pairs.items():
        assert abs(correlation(x, y)) < 4 / math.sqrt(x.numel()), name  # 4 standard errors


def chi_square_limit(degrees, z=4.26):
    """What a chi-square variable exceeds once in 10^5 (z: that quantile of a normal), by Wilson and Hilferty's cube."""
    part = 2 / (9 * degrees)
    return degrees * (1 - part + z * math.sqrt(part)) ** 3


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("rows,steps", [(200_000, 1), (2_000, 100)])
def test_sampled_tokens_follow_the_softmax_of_the_tempered_logits(temperature, rows, steps):
    logits = uniform(torch.Generator().manual_seed(0), 20, low=-2, high=2)
    tokens, mask, logprobs = draw(logits, temperature, torch.arange(rows), steps)
    weights = [math.exp(x / temperature) for x in logits.tolist()]
    probabilities = [w / sum(weights) for w in weights]
    assert mask.all() and tokens.numel() == 200_000
    counts = tokens.reshape(-1).bincount(minlength=20).tolist()
    statistic = sum((c - 200_000 * p) ** 2 / (200_000 * p) for c, p in zip(counts, probabilities, strict=True))
    assert statistic < chi_square_limit(19)
    torch.testing.assert_close(logprobs, torch.tensor(probabilities).log()[tokens], atol=1e-5, rtol=0)


def test_consecutive_tokens_of_a_row_are_independent():
    logits = torch.tensor([0.0, 0.5, -0.5, 1.0])
    tokens, _, _ = draw(logits, 1.0, torch.arange(4_000), 20)
    p = logits.softmax(0)
    pairs = (tokens[:, 1:] * 4 + tokens[:, :-1]).reshape(-1)
    expected = (p.unsqueeze(1) * p).reshape(-1) * pairs.numel()
    assert ((pairs.bincount(minlength=16) - expected) ** 2 / expected).sum().item() < chi_square_limit(15)


# ---- reward model ----------------------------------------------------------------------------------------------------
def test_equal_scores_lose_log_4():
    loss = train_reward.best_of_k_loss(torch.full((3, 4), 0.7), torch.tensor([0, 2, 3]))
    assert loss.item() == pytest.approx(3 * math.log(4), rel=1e-6)  # a sum over the comparisons


def test_rm_7_best_of_two_is_the_pairwise_logistic_loss():
    chosen, rejected = torch.tensor([1.0, -2.0, 0.0, 3.0]), torch.tensor([0.5, 1.0, 0.0, -9.0])
    expected = sum(math.log1p(math.exp(r - c)) for c, r in zip(chosen.tolist(), rejected.tolist(), strict=True))
    assert train_reward.best_of_k_loss(torch.stack([chosen, rejected], 1), torch.zeros(4).long()).item() == (
        pytest.approx(expected, rel=1e-5)
    )
    assert train_reward.best_of_k_loss(torch.zeros(1, 2), torch.zeros(1).long()).item() == pytest.approx(math.log(2))


def test_best_of_k_loss_equals_the_loop_and_is_blind_to_a_shift():
    generator = torch.Generator().manual_seed(0)
    scores, best = uniform(generator, 6, 4, low=-3, high=3), torch.randint(4, (6,), generator=generator)
    expected = sum(
        -math.log(math.exp(row[b]) / sum(map(math.exp, row))) for row, b in zip(scores.tolist(), best.tolist(), strict=True)
    )
    assert train_reward.best_of_k_loss(scores, best).item() == pytest.approx(expected, rel=1e-5)
    shifted = scores + uniform(generator, 6, 1, low=-5, high=5)
    assert train_reward.best_of_k_loss(shifted, best).item() == pytest.approx(expected, rel=1e-5)


def test_rm_8_a_tie_is_wrong():
    scores = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0], [3.0, -1.0]])
    assert train_reward.num_correct(scores, torch.tensor([0, 0, 0, 0])).item() == 2
    assert train_reward.num_correct(scores, torch.tensor([1, 1, 1, 1])).item() == 1
    assert train_reward.num_correct(torch.tensor([[1.0, 5.0, 5.0, 0.0]]), torch.tensor([1])).item() == 0


def test_num_correct_equals_the_loop():
    scores = torch.randint(-3, 4, (200, 4), generator=torch.Generator().manual_seed(0)).float()
    best = torch.arange(200) % 4
    expected = sum(
        all(row[b] > s for i, s in enumerate(row) if i != b) for row, b in zip(scores.tolist(), best.tolist(), strict=True)
    )
    assert 0 < train_reward.num_correct(scores, best).item() == expected < 200


@pytest.mark.parametrize("mean,std", [(0.0, 1.0), (1.5, 0.25)])
def test_gain_and_bias_give_the_wanted_mean_and_biased_std(mean, std):
    raw = uniform(torch.Generator().manual_seed(0), 7, low=-4, high=9)
    gain, bias = train_reward.gain_and_bias(raw, mean, std)
    values = (raw * gain + bias).tolist()
    got_mean = sum(values) / 7
    assert got_mean == pytest.approx(mean, abs=1e-5)
    assert math.sqrt(sum((v - got_mean) ** 2 for v in values) / 7) == pytest.approx(std, abs=1e-5)
    assert gain > 0  # the order of the responses stays


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_read_comparisons_takes_both_shapes(tmp_path):
    pairs = write_jsonl(tmp_path / "pairs.jsonl", [{"prompt": "p", "chosen": "a", "rejected": "b"}])
    assert train_reward.read_comparisons(pairs, "--dataset") == [("p", ["a", "b"], 0)]
    rows = [
        {"prompt": "p", "candidates": list("abcd"), "best": 2},
        {"prompt": "q", "candidates": list("efgh"), "best": 0},
    ]
    many = write_jsonl(tmp_path / "many.jsonl", rows)
    assert train_reward.read_comparisons(many, "--dataset") == [("p", list("abcd"), 2), ("q", list("efgh"), 0)]


@pytest.mark.parametrize(
    "change,words",
    [
        ({"candidates": ["a"]}, ["row 2", "'candidates'", "2 strings"]),
        ({"candidates": ["a", "b", "c"]}, ["row 2", "'candidates'"]),
        ({"candidates": ["a", 3]}, ["row 2", "'candidates'"]),
        ({"candidates": "ab"}, ["row 2", "'candidates'"]),
        ({"best": 2}, ["row 2", "'best'"]),
        ({"best": -1}, ["row 2", "'best'"]),
        ({"best": "0"}, ["row 2", "'best'"]),
        ({"prompt": None}, ["row 2", "'prompt'"]),
    ],
)
def test_read_comparisons_names_the_faulty_row(tmp_path, capsys, change, words):
    good = {"prompt": "p", "candidates": ["a", "b"], "best": 1}
    path = write_jsonl(tmp_path / "rows.jsonl", [good, good | change])
    with pytest.raises(SystemExit) as e:
        train_reward.read_comparisons(path, "--eval_dataset")
    message = capsys.readouterr().err
    assert e.value.code == 2 and message.startswith("error: --eval_dataset") and message.count("\n") == 1
    assert all(word in message for word in words)


def test_read_comparisons_wants_one_of_the_two_shapes(tmp_path, capsys):
    for rows in ([{"prompt": "p", "chosen": "a"}], [{"prompt": "p", "candidates": ["a", "b"]}]):
        with pytest.raises(SystemExit) as e:
            train_reward.read_comparisons(write_jsonl(tmp_path / "rows.jsonl", rows), "--dataset")
        assert e.value.code == 2
        assert ("'rejected'" if "chosen" in rows[0] else "'best'") in capsys.readouterr().err


# ---- SFT -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "response,reference,expected",
    [
        ("the cat sat", "the cat sat", 1.0),
        ("the cat sat", "the cat ran", 2 / 3),
        ("a b c d", "a c", 4 / 6),
        ("b a", "a b", 0.5),
        ("The CAT, sat!", "the cat sat.", 1.0),
        ("room 12", "room12", 0.0),
        ("", "a", 0.0),
        ("a", "", 0.0),
        ("", "", 0.0),
        (". . .", ". . .", 0.0),
        ("a a a", "a", 0.5),
    ],
)
def test_rouge_l_of_hand_made_cases(response, reference, expected):
    assert train_sft.rouge_l(response, reference) == pytest.approx(expected)


def slow_rouge_l(a, b):
    @cache
    def common(i, j):
        if i == len(a) or j == len(b):
            return 0
        return 1 + common(i + 1, j + 1) if a[i] == b[j] else max(common(i + 1, j), common(i, j + 1))

    if not common(0, 0):
        return 0.0
    precision, recall = common(0, 0) / len(a), common(0, 0) / len(b)
    return 2 * precision * recall / (precision + recall)


def test_rouge_l_equals_the_recursive_definition():
    some = random.Random(0)
    for _ in range(200):
        a, b = ([some.choice("abcdef") for _ in range(some.randrange(12))] for _ in range(2))
        assert train_sft.rouge_l(" ".join(a), " , ".join(b)) == pytest.approx(slow_rouge_l(a, b)), (a, b)


PAIRS = [([5, 6, 7], [8, 9, 1]), ([10, 11], [12, 13, 14, 15, 1]), ([16], [1]), ([17, 18, 19, 20, 21], [22, 1])]


@pytest.fixture(scope="module")
def language_model():
    torch.manual_seed(0)
    return train_sft.LanguageModel(GPTNeoXForCausalLM(tiny_config(initializer_range=0.2)).eval(), 1.0)


def padded(pairs, completion_only, extra=0):
    """Inputs: left-padded tokens, mask, and the target mask of the definition: completion with its EOS, or every real token."""
    width = extra + max(len(p) + len(c) for p, c in pairs)
    tokens, mask, targets = [], [], []
    for p, c in pairs:
        pad = width - len(p) - len(c)
        tokens.append([0] * pad + p + c)
        mask.append([False] * pad + [True] * (len(p) + len(c)))
        targets.append([False] * pad + [not completion_only] * len(p) + [True] * len(c))
    return {"tokens": torch.tensor(tokens), "mask": torch.tensor(mask), "is_target": torch.tensor(targets)}


@torch.no_grad()
def slow_loss(model, pairs, completion_only):
    """Sum of -log p(token | tokens before), one forward of an unpadded prefix a token; a row's first token has no past."""
    total = 0.0
    for p, c in pairs:
        row = p + c
        for t in range(max(1, len(p) if completion_only else 1), len(row)):
            logits = model(torch.tensor([row[:t]])).logits[0, -1].double()
            total -= logits.log_softmax(0)[row[t]].item()
    return total


@pytest.mark.parametrize("extra", [0, 3])
@pytest.mark.parametrize("completion_only", [True, False])
def test_sft_2_sft_loss_equals_the_loop_over_tokens_whatever_the_padding(language_model, completion_only, extra):
    with torch.no_grad():
        got = language_model(**padded(PAIRS, completion_only, extra)).item()
    assert got == pytest.approx(slow_loss(language_model.model, PAIRS, completion_only), rel=1e-5)


def test_eos_is_a_target_of_the_sft_loss(language_model):
    pairs = [([5, 6, 7], [1])]
    with torch.no_grad():
        loss = language_model(**padded(pairs, True)).item()
        logits = language_model.model(torch.tensor([[5, 6, 7]])).logits[0, -1]
    assert loss == pytest.approx(-logits.log_softmax(0)[1].item(), rel=1e-5) and loss > 0


def test_without_a_prompt_completion_only_changes_nothing(tiny, in_tmp):
    path = write_jsonl(in_tmp / "rows.jsonl", [{"text": "the room was lovely ."}] * 2)
    sft = dict(dataset=path, base_model=str(tiny / "policy"), batch_size=2, run_name="run", overwrite=True)
    losses = [train_sft.main(train_sft.Args(completion_only=c, **sft))["train/sft/loss"] for c in (True, False)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
