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
    """The Sampler of a run. Args: rows, all prompts that will be sampled from (data.Prompt); prompts_of(update), the B
    prompts of an update; stop_ids [S].
    """
    sample = vllm.sampler(args, run.accelerator, rows, run.stop)
    return Ahead(args, sample, stop_ids, run, prompts_of) if args.overlap else Sampler(args, sample, stop_ids)


class Sampler:
    """Called with (policy, queries, query_mask, numbers of the rows, n, key), and perhaps room, it returns what
    `utils.sample` returns, of the response length of args and in pieces of its rollout_micro_batch_size.

    `is_another` says whether what samples is another policy than the one that trains.
    """

    def __init__(self, args, sample, stop_ids):
        self.args = args
        self.sample = sample
        self.stop_ids = stop_ids
        self.is_another = args.sampler != "own" or getattr(args, "overlap", False)

    def __call__(self, policy, *given):
        return self.in_pieces(engines.gathered(policy), *given)

    def in_pieces(self, policy, queries, query_mask, numbers, n, key, room=None):
        size = self.args.rollout_micro_batch_size // n * n  # The n responses to a prompt are sampled together.
        return self.sample(
            policy,
            queries,
            query_mask,
            numbers,
            n=n,
            response_length=self.args.response_length,
            stop_ids=self.stop_ids,
            key=key,
            size=size,
            room=room,
        )

    def behaviour_logprobs(self, logprobs, sampled_logprobs):
        """The log-probs of the policy that sampled, from those of the training forward and of the sampler."""
        return logprobs  # Only rounding, or another engine, lies between the two.

    def weigh(self, advantages, logprobs, sampled_logprobs, mask):
        """(Advantages with the weights of `correct_for_sampler`, metrics) where another policy samples."""
        if not self.is_another or self.args.sampler_correction == "none":
            return advantages, {}
        logratio = logprobs - sampled_logprobs
        return correct_for_sampler(advantages, logratio, mask, self.args.sampler_correction, self.args.sampler_cap)


def correct_for_sampler(advantages, logratio, mask, correction, cap):
    """Advantages times p(action) / p_sampler(action), which makes up for actions that another policy sampled.

    The other one is another engine's (--sampler vllm), or this one as it was an update ago (--overlap; PPO's ratio is
    then against that one, so its log-ratios here are 0 and its weights 1).
    Long products of ratios can be huge. The correction "truncate" bounds them by c = cap, and "mask" gives weight 0 to
    those whose ratio is not within [1/c, c]; they still count in the loss's mean.
    Args: advantages [B] where an action is a response, else [B, 1] or [B, R]; logratio [B, R], the training forward's
    log-probs less the sampler's; mask [B, R] bool. Returns: (advantages, of the shape of the weights, metrics).
    Source: truncated importance sampling of Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training" (2025), where c = 2; TRL v1.16.0, grpo_trainer.py, with both kinds, of tokens or responses, and c = 3.
    """
    logratio = logratio * mask
    if advantages.dim() == 1:
        logratio, mask = logratio.sum(1), mask.any(1)  # [B]
    ratio = logratio.exp()
    cut = ratio > cap
    # Both kinds bound what one response can be worth that the sampler found unlikely. [GEN-15]
    weights = ratio.clamp(max=cap)
    if correction == "mask":
        cut = cut | (ratio < 1 / cap)
        weights = ratio.masked_fill(cut, 0)
    mean_weight = utils.masked_mean(weights, mask)
    share_cut = utils.masked_mean(cut.float(), mask)
    return advantages * weights, {"val/sampler_weight": mean_weight, "val/sampler_cut": share_cut}


class Ahead(Sampler):
    """Samples training batches in a thread, one update ahead. The thread makes no collective call."""

    def __init__(self, args, sample, stop_ids, run, prompts_of):
        super().__init__(args, sample, stop_ids)
        self.run = run
        self.accelerator = run.accelerator
        self.device = run.accelerator.device
        self.prompts_of = prompts_of
        world = self.accelerator.num_processes
        rank = self.accelerator.process_index
        B = args.batch_size
        self.mine = slice(rank * B // world, (rank + 1) * B // world)  # the rows of this process
        self.thread = ThreadPoolExecutor(1)
        self.pending = None  # None, or a function that waits for the next batch
        run.sampled_ahead = self.tensors

    def __call__(self, policy, queries, query_mask, numbers, n, key):
        """Samples, and of a training batch takes what was sampled before and starts on the next one."""
        seed, purpose, update = key
        policy = engines.gathered(policy)
        found = self.take()  # An engine has the weights of one policy at a time.
        if purpose != utils.TRAINING:
            return self.in_pieces(policy, queries, query_mask, numbers, n, key)
        found = found or self.in_pieces(policy, queries, query_mask, numbers, n, key)
        self.pending = None
        if update < self.run.num_updates:
            if not engines.shards_weights(self.accelerator):  # Otherwise it is a copy already.
                policy = engines.whole_copy(self.accelerator, policy)  # Training does not change it. [GEN-10]
            self.pending = self.thread.submit(self.in_thread, policy, numbers, n, (seed, purpose, update + 1)).result
        return found

    def behaviour_logprobs(self, logprobs, sampled_logprobs):
        return sampled_logprobs  # The policy that sampled is an update old.

    def in_thread(self, policy, numbers, n, key):
        """Samples the next update. Grad mode, autocast and device hold for one thread, so they are set here."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        with torch.no_grad(), self.accelerator.autocast():
            queries, query_mask = utils.left_pad([row.ids for row in self.prompts_of(key[2])], self.device)
            return self.in_pieces(policy, queries[self.mine], query_mask[self.mine], numbers, n, key)

    def take(self):
        """Waits for what the thread samples, and returns it, or None. An error of the thread is raised here."""
        if tensors := self.run.tensors:  # of the checkpoint that the run goes on from
            self.run.tensors = {}
            found = [tensors[name][self.mine] for name in NAMES]
            self.pending = lambda: found
        return self.pending and self.pending()

    def tensors(self):
        """What a checkpoint holds of the batch that was sampled ahead: {name: tensor [B, R]}, {} at the end."""
        found = self.take()
        return dict(zip(NAMES, self.accelerator.gather(found), strict=True)) if found else {}
