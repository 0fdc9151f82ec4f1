"""Runs the main of train_rloo or train_ppo in a process of its own, under torchrun or not, and writes down what the tests look at.

usage: worker.py ARGS.json OUT_FOLDER [prompt_scores]
ARGS.json: the fields of that script's Args; their exp_name says which script. OUT_FOLDER gets rank<r>.pt: the world size,
the kind of distribution, every batch of training responses that this process sampled, the advantages it optimised, the
dtypes it computed in and those of its weights.
prompt_scores: the reward of a response becomes a function of its prompt alone.
"""

import contextlib
import json
import sys
from unittest.mock import patch

import torch
from accelerate import PartialState

from rlhf_details import train_ppo, train_rloo, utils

SCRIPTS = {"train_rloo": train_rloo, "train_ppo": train_ppo}
LOSSES = {"train_rloo": "rloo_policy_loss", "train_ppo": "ppo_policy_loss"}


@contextlib.contextmanager
def recording(name, *options):
    """Within it the script `name` fills the dictionary that is given out."""
    script, loss_name = SCRIPTS[name], LOSSES[name]
    record = {"sampled": [], "advantages": [], "matmul_dtypes": set(), "weight_dtypes": set()}
    sample, loss, policy_forward = script.sample, getattr(script, loss_name), script.Policy.forward

    def recording_sample(*args):
        rows, coordinates = args[3], next(x for x in args if isinstance(x, tuple))
        result = sample(*args)
        if coordinates[1] == script.TRAINING:
            record["sampled"].append((coordinates[2], rows.cpu(), result[0].cpu(), result[1].cpu()))
        return result

    def recording_loss(logprobs, old_logprobs, mask, advantages, cliprange):
        record["advantages"].append(advantages.cpu())
        return loss(logprobs, old_logprobs, mask, advantages, cliprange)

    def recording_forward(self, *args, **kwargs):
        hook = self.model.get_output_embeddings().register_forward_hook(
            lambda module, inputs, output: record["matmul_dtypes"].add(str(output.dtype))
        )
        result = policy_forward(self, *args, **kwargs)
        hook.remove()
        assert all(x.dtype == torch.float32 for x in (result if isinstance(result, tuple) else [result]))
        record["weight_dtypes"] |= {str(p.dtype) for p in self.parameters()}
        return result

    def without_record(*args):
        reason = why_not_share(*args)
        record["matmul_dtypes"].clear()  # the probe computes in fp32 on purpose
        return reason

    changed = {"sample": recording_sample, loss_name: recording_loss}
    if name == "train_rloo":
        why_not_share = script.why_not_share
        changed["why_not_share"] = without_record
    if "prompt_scores" in options:
        changed["response_scores"] = lambda model, batch, *n: (batch[0] * batch[1]).sum(1).float()
    with patch.multiple(script, **changed), patch.object(script.Policy, "forward", recording_forward):
        yield record
    state = PartialState()
    record |= {"world": state.num_processes, "kind": state.distributed_type.value}


def main():
    values, out = json.loads(open(sys.argv[1]).read()), sys.argv[2]
    script = SCRIPTS[values["exp_name"]]
    with recording(values["exp_name"], *sys.argv[3:]) as record:
        script.main(script.Args(**values))
    torch.save(record, f"{out}/rank{PartialState().process_index}.pt")
    utils.leave_process_group()


if __name__ == "__main__":
    main()
