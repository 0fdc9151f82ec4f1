"""What of train_distill.py's equations no whole update shows: limits, memory, and the share of the student."""

import pytest
import torch
from helpers import random_batch, tiny_model

from rlhf_details import train_distill, utils
from rlhf_details.train_distill import generalized_jsd


# ---- the divergence --------------------------------------------------------------------------------------------------
def test_distill_4_near_its_ends_the_formula_is_beta_times_a_kl_and_so_nothing():
    logits = torch.randn(2, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    student, teacher = (3 * logits).log_softmax(-1)
    for beta, end in ((1e-6, 0), (1 - 1e-6, 1)):
        got, kl = (generalized_jsd(student, teacher, x).item() for x in (beta, end))
        assert got == pytest.approx(1e-6 * kl, rel=1e-3) and kl > 0.1


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


# ---- whose responses -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("share", [0, 0.1, 0.25, 0.29, 0.5, 0.7, 1])
def test_distill_7_the_share_holds_in_every_stretch_of_updates(share):
    sampled = [train_distill.is_sampled(update, share) for update in range(1, 101)]
    assert sum(sampled) == round(100 * share)
    for n in (10, 20):
        counts = [sum(sampled[i : i + n]) for i in range(100 - n)]
        assert max(abs(count - n * share) for count in counts) <= 1
