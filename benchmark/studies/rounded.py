"""
A run whose rollouts a copy of the policy with rounded matrices samples, as --sampler vllm would (the study `mismatch`):

    python benchmark/studies/rounded.py BITS SCRIPT --sampler vllm [flags]        BITS: 16 for bf16, or 8, 4, 3
"""

import copy
import runpy
import sys

import torch


@torch.no_grad()
def rounded(policy, bits):
    """A copy of a policy with rounded matrices: bf16 for 16 bits, else whole multiples of a scale for each output."""
    found = copy.deepcopy(policy)
    for p in found.parameters():
        if p.dim() > 1 and bits == 16:
            p.copy_(p.bfloat16())
        elif p.dim() > 1:
            scale = (p.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)).clamp(min=1e-12)
            p.copy_((p / scale).round() * scale)
    return found


def main(bits, script, *flags):
    from rlhf_details import utils
    from rlhf_details.plumbing.machine import vllm

    def sample(policy, *rows, **how):
        policy = rounded(policy, bits) if how["key"][1] == utils.TRAINING else policy
        return utils.sample(policy, *rows, **how)

    vllm.sampler = lambda *_: sample
    sys.argv = [script, *flags]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
