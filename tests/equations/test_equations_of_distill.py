"""What of train_distill.py's equations no whole update shows: limits, memory, and the mean over a tiny world.

The tiny world has 4 tokens and responses of 3: the 21 states of a response have a row of logits each, and the gradient
of a mean over responses is the sum over all 64 of them.
"""

import itertools

import pytest
import torch
from helpers import random_batch, tiny_model
from oracles import ragged_mask

from rlhf_details import train_distill, utils
from rlhf_details.train_distill import distill_advantages, distill_policy_loss, generalized_jsd

RESPONSES = list(itertools.product(range(4), repeat=3))
STATES = [()] + [state for n in (1, 2) for state in itertools.product(range(4), repeat=n)]


def two_distributions(*shape, dtype=torch.float32):
    """Logits of a student, which has a gradient, and of a teacher."""
    student, teacher = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0), dtype=dtype)
    return (2 * student).requires_grad_(), 3 * teacher


# ---- the divergence --------------------------------------------------------------------------------------------------
def test_distill_4_near_its_ends_the_formula_is_beta_times_a_kl_and_so_nothing():
    student, teacher = (x.log_softmax(-1) for x in two_distributions(7, dtype=torch.float64))
    for beta, end in ((1e-6, 0), (1 - 1e-6, 1)):
        got, kl = (generalized_jsd(student, teacher, x).item() for x in (beta, end))
        assert got == pytest.approx(1e-6 * kl, rel=1e-3) and kl > 0.1


@pytest.mark.slow  # It needs TRL, which CI installs after the fast suite.
@pytest.mark.parametrize("beta", [0, 0.1, 0.5, 0.9, 1])
def test_distill_3_loss_and_gradient_are_those_of_trls_gkd(beta, monkeypatch):
    """A mean over the tokens of responses, as TRL's labels of -100 leave the others out."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    pytest.importorskip("trl", minversion="1.16")
    from trl.experimental.gkd import GKDTrainer

    (student, teacher), mask = two_distributions(4, 6, 19), ragged_mask([6, 1, 3, 5], 6)
    labels = torch.where(mask, 0, -100)
    theirs = GKDTrainer.generalized_jsd_loss(student, teacher, labels, beta=beta)
    ours = (generalized_jsd(student.log_softmax(-1), teacher.log_softmax(-1), beta) * mask).sum() / mask.sum()
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-6) and ours.item() > 0.01
    gradients = [torch.autograd.grad(loss, student)[0] for loss in (ours, theirs)]
    assert (gradients[0] - gradients[1]).abs().max() < 1e-6 < gradients[0].abs().max()


def test_gen_8_no_more_logits_than_asked_for_exist_at_a_time_of_either_model(monkeypatch):
    """Divergences and gradients are those of all logits at once."""
    student, teacher = train_distill.Policy(tiny_model("gpt2"), 0.7), train_distill.Teacher(tiny_model("llama"), 0.7)
    batch, results, sizes = utils.Batch(*random_batch(k=2)), [], []
    for module in (student, teacher):
        module.head.model[0].get_output_embeddings().register_forward_hook(lambda *call: sizes.append(call[2].numel()))
    states = teacher(*train_distill.join(batch)).detach()

    def compare(logp, part):
        return generalized_jsd(logp, teacher.logits(part).log_softmax(-1), 0.3)

    for at_once in (2**24, 3 * 97):
        monkeypatch.setattr(student, "logits_at_once", at_once)
        sizes.clear()
        *_, got = train_distill.response_logprobs(student, batch, compare=compare, states=states)
        results.append((got, *torch.autograd.grad(got.sum(), list(student.parameters()))))
        assert max(sizes) <= at_once
    for whole, pieced in zip(*results, strict=True):
        torch.testing.assert_close(pieced, whole, atol=1e-4, rtol=1e-5)


# ---- the policy gradient ---------------------------------------------------------------------------------------------
def of_response(table, response):
    """Log-probs [1, 3] of a response's tokens. Args: table [21, 4], the log-softmax in each of STATES."""
    return torch.stack([table[STATES.index(response[:t]), token] for t, token in enumerate(response)]).unsqueeze(0)


def expected_gradient(logits, teacher, gamma):
    """The gradient of `sampled`, a sum over all responses, each as often as the student says it."""
    table, total = logits.log_softmax(-1), 0.0
    for response in RESPONSES:
        logprobs = of_response(table, response)
        rewards = (of_response(teacher, response) - logprobs).detach()
        share = logprobs.detach().sum().exp()
        total = total + share * distill_policy_loss(logprobs, distill_advantages(rewards, gamma)).sum()
    return torch.autograd.grad(total, logits)[0]


def test_distill_2_with_a_discount_of_1_the_mean_gradient_is_that_of_the_whole_responses_kl():
    logits, teacher = two_distributions(len(STATES), 4, dtype=torch.float64)
    teacher = teacher.log_softmax(-1)
    ours = [of_response(logits.log_softmax(-1), response).sum() for response in RESPONSES]
    kl = sum(x.exp() * (x - of_response(teacher, y).sum()) for x, y in zip(ours, RESPONSES, strict=True))
    wanted = torch.autograd.grad(kl, logits)[0]
    torch.testing.assert_close(expected_gradient(logits, teacher, 1), wanted, atol=1e-12, rtol=1e-9)
    assert (expected_gradient(logits, teacher, 0) - wanted).abs().max() > 0.01


def test_distill_2_with_a_discount_of_0_it_is_that_of_the_reverse_kl_at_the_states_that_were_sampled():
    """What is left out is how the chances of these states change. [DISTILL-1]"""
    logits, teacher = two_distributions(len(STATES), 4, dtype=torch.float64)
    table, teacher = logits.log_softmax(-1), teacher.log_softmax(-1)
    reached = {(): torch.tensor(1.0)}  # how likely a state is, a constant
    for state in STATES[1:]:
        reached[state] = reached[state[:-1]] * table[STATES.index(state[:-1]), state[-1]].detach().exp()
    shares = torch.stack([reached[state] for state in STATES])
    wanted = torch.autograd.grad((shares * generalized_jsd(table, teacher, 1)).sum(), logits)[0]
    torch.testing.assert_close(expected_gradient(logits, teacher, 0), wanted, atol=1e-12, rtol=1e-9)


# ---- whose responses -------------------------------------------------------------------------------------------------
