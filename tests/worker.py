"""Runs train_rloo.main in a process of its own, under torchrun or not, and writes down what the tests look at.

usage: worker.py ARGS.json OUT_FOLDER [prompt_scores]
ARGS.json: the fields of train_rloo.Args. OUT_FOLDER gets rank<r>.pt: the world size, the kind of distribution, every
batch of training responses that this process sampled, the advantages it optimised and the dtypes it computed in.
prompt_scores: the reward of a response becomes a function of its prompt alone.
"""

import json
import sys

import torch
from accelerate import PartialState

from rlhf_details import train_rloo


def main():
    values, out = json.loads(open(sys.argv[1]).read()), sys.argv[2]
    record = {"sampled": [], "advantages": [], "matmul_dtypes": set()}
    why_not_share, sample, loss, policy_forward = (
        train_rloo.why_not_share,
        train_rloo.sample,
        train_rloo.rloo_policy_loss,
        train_rloo.Policy.forward,
    )

    def recording_sample(policy, queries, query_mask, rows, n, response_length, stop_id, coordinates):
        result = sample(policy, queries, query_mask, rows, n, response_length, stop_id, coordinates)
        if coordinates[1] == train_rloo.TRAINING:
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
        assert (result[0] if isinstance(result, tuple) else result).dtype == torch.float32
        return result

    def without_record(*args):
        reason = why_not_share(*args)
        record["matmul_dtypes"].clear()  # the probe computes in fp32 on purpose
        return reason

    train_rloo.why_not_share = without_record
    train_rloo.sample, train_rloo.rloo_policy_loss = recording_sample, recording_loss
    train_rloo.Policy.forward = recording_forward
    if sys.argv[3:] == ["prompt_scores"]:
        train_rloo.response_scores = lambda model, batch, n: (batch[0] * batch[1]).sum(1).float()
    train_rloo.main(train_rloo.Args(**values))
    state = PartialState()
    record |= {"world": state.num_processes, "kind": state.distributed_type.value}
    torch.save(record, f"{out}/rank{state.process_index}.pt")


if __name__ == "__main__":
    main()
