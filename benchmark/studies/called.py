"""What the programs that runs call have in common: the flags that benchmark.py gives them, rows, and responses."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(kw_only=True)
class Called:
    """The flags of every run."""

    seed: int = 1
    """seed of what is random"""
    run_name: str = "run"
    """folder under runs/"""
    overwrite: bool = True
    """replace it"""

    def log(self, *rows, file="metrics.jsonl"):
        """Writes rows into a file of the run's folder; returns its path."""
        path = Path("runs") / self.run_name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path


@torch.no_grad()
def responses_to(prompts, n, policy, length, stop_ids, key, size):
    """A Batch of n responses to each prompt, those of a prompt adjacent. prompts: lists of token ids."""
    from rlhf_details import utils

    queries, mask = utils.left_pad([ids for ids in prompts for _ in range(n)])
    rows = torch.arange(len(queries))
    found, real, _ = utils.sample(policy.eval(), queries, mask, rows, n, length, stop_ids, key, size)
    return utils.Batch(queries, mask, found, real)
