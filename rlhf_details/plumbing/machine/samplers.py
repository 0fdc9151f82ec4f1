"""
What samples in a run: `utils.sample`, vLLM (--sampler vllm), or with --overlap either of them one update ahead.

    main thread   sample 1, copy W0 | train 1 -> W1     | take 2, copy W1 | train 2 -> W2     | take 3, copy W2 | ..
    thread                          | sample 2 by W0 .. |                 | sample 3 by W1 .. |                 | ..

So the responses of an update come from the weights before the update before it, and those of updates 1 and 2 from the
first ones. A copy follows a take, so neither side can run ahead, and speed changes no result. The prompts of the next
update are known, because they depend on the seed and the update's number alone.
Source: open-instruct, ppo_vllm_thread_ray_gtrl.py, with its two queues of size one.
"""

from concurrent.futures import ThreadPoolExecutor

import torch

from rlhf_details import utils
from rlhf_details.plumbing.machine import engines, vllm

NAMES = "responses", "response_mask", "sampled_logprobs"  # of what a checkpoint holds of the batch sampled ahead


def choose(args, run, rows, prompts_of, stop_ids):
    """What samples in a run: a function of (policy, queries, query_mask, numbers of the rows, n, key), which returns
    what `utils.sample` returns, of the response length of args and in pieces of its rollout_micro_batch_size.

    Args: rows, all prompts that will be sampled from (data.Prompt); prompts_of(update), the B prompts of an update;
    stop_ids [S].
    """
    sample = vllm.sampler(args, run.accelerator, rows, run.stop)

    def in_pieces(policy, queries, query_mask, numbers, n, key):
        size = args.rollout_micro_batch_size // n * n  # The n responses to a prompt are sampled together.
        how = dict(n=n, response_length=args.response_length, stop_ids=stop_ids, key=key, size=size)
        return sample(policy, queries, query_mask, numbers, **how)

    if args.overlap:
        return Ahead(args, run, in_pieces, prompts_of)
    return lambda policy, *given: in_pieces(engines.gathered(policy), *given)


class Ahead:
    """Samples training batches in a thread, one update ahead. The thread makes no collective call."""

    def __init__(self, args, run, sample, prompts_of):
        self.run, self.accelerator, self.device = run, run.accelerator, run.accelerator.device
        self.sample, self.prompts_of = sample, prompts_of
        world, rank, B = self.accelerator.num_processes, self.accelerator.process_index, args.batch_size
        self.mine = slice(rank * B // world, (rank + 1) * B // world)  # the rows of this process
        self.thread, self.pending = ThreadPoolExecutor(1), None  # None, or a function that waits for the next batch
        run.sampled_ahead = self.tensors

    def __call__(self, policy, queries, query_mask, numbers, n, key):
        """Samples, and of a training batch takes what was sampled before and starts on the next one."""
        (seed, purpose, update), policy = key, engines.gathered(policy)
        found = self.take()  # An engine has the weights of one policy at a time.
        if purpose != utils.TRAINING:
            return self.sample(policy, queries, query_mask, numbers, n, key)
        found, self.pending = found or self.sample(policy, queries, query_mask, numbers, n, key), None
        if update < self.run.num_updates:
            if not engines.shards_weights(self.accelerator):  # Otherwise it is a copy already.
                policy = engines.whole_copy(self.accelerator, policy)  # Training does not change it. [GEN-10]
            self.pending = self.thread.submit(self.in_thread, policy, numbers, n, (seed, purpose, update + 1)).result
        return found

    def in_thread(self, policy, numbers, n, key):
        """Samples the next update. Grad mode, autocast and device hold for one thread, so they are set here."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        with torch.no_grad(), self.accelerator.autocast():
            queries, query_mask = utils.left_pad([row.ids for row in self.prompts_of(key[2])], self.device)
            return self.sample(policy, queries[self.mine], query_mask[self.mine], numbers, n, key)

    def take(self):
        """Waits for what the thread samples, and returns it, or None. An error of the thread is raised here."""
        if tensors := self.run.tensors:  # of the checkpoint that the run goes on from
            self.run.tensors, found = {}, [tensors[name][self.mine] for name in NAMES]
            self.pending = lambda: found
        return self.pending and self.pending()

    def tensors(self):
        """What a checkpoint holds of the batch that was sampled ahead: {name: tensor [B, R]}, {} at the end."""
        found = self.take()
        return dict(zip(NAMES, self.accelerator.gather(found), strict=True)) if found else {}
