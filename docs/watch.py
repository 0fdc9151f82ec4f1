"""Watch it learn: two committed toy runs, with and without the KL penalty, as a page that one can step through."""

import json

from source import ROOT

RUNS = ROOT / "docs" / "toy_runs"  # how they were made: docs/toy_runs/README.md
NAMES = {"rloo": "with the KL penalty", "rloo_nokl": "without the KL penalty"}
CHARTS = {
    "gold": "Gold, the true reward",
    "scores": "Score of the reward model",
    "kl": "KL, nats per response",
    "parses": "Share that is still in the task's grammar",
}
PAGE = """\
---
title: Watch it learn
hide: [navigation, toc]
---

# Watch it learn

RLOO on the embedded task: the policy finishes short reviews, the reward model has learnt from the choices of an
imaginary human, and what this human really wants ("gold") is known. Two runs start from the same SFT policy and the
same reward model, {updates} updates each. One pays for moving away from the SFT policy (`--kl_coef 0.1`), the other
does not (`--kl_coef 0`). Move the slider: the same four held-out prompts are answered with the same noise at each
stop, so what changes is the policy alone.

<noscript>This page needs JavaScript.</noscript>

<div class="watch">
<div class="controls">
<button type="button" class="play" aria-pressed="false">Play</button>
<button type="button" class="back" aria-label="one stop back">‹</button>
<input type="range" min="0" max="{last}" value="0" step="1" aria-label="update">
<button type="button" class="on" aria-label="one stop on">›</button>
<output></output>
</div>
<ul class="legend"><li class="rloo">{with_kl}</li><li class="rloo_nokl">{without_kl}</li></ul>
<div class="charts"></div>
<div class="answers"></div>
</div>

<script type="application/json" id="runs">{data}</script>

## What to look for

* **Both learn fast.** In the first updates gold and score rise together: the reward model is right about what it sees.
* **Then they part.** Without the penalty the score goes on rising while gold falls. The policy has found answers that
  the reward model likes and the human does not. Read them: they praise without end, and fewer and fewer are sentences
  of the task's grammar.
* **The KL shows it coming.** It counts how far the policy has moved from where the reward model was trained. With the
  penalty it stays small; without it nothing holds it.

The curves are means over {held_out} held-out prompts; both runs have seed 1, and `docs/toy_runs/README.md` has their
commands. One seed shows how it looks and not how often it happens. For that there are [ten
seeds](evidence/2_overoptimisation.md).
"""


def rows(run, name):
    """The rows of a committed JSON Lines file."""
    return [json.loads(line) for line in (RUNS / run / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def data():
    """{"updates": [..], "prompts": [..], .., run: {curve: [..], "answers": [[{text, score, kl}, ..], ..]}}."""
    before = {0: rows("before", "samples")}
    found = {"names": NAMES, "charts": CHARTS, "prompts": [row["query"] for row in before[0]]}
    for run in NAMES:
        metrics = [row for row in rows(run, "metrics") if "eval/objective/gold" in row]
        samples = dict(before)
        for row in rows(run, "samples"):
            samples.setdefault(row["update"], []).append(row)
        found["updates"] = [row["update"] for row in metrics]
        found[run] = {name: [round(row[f"eval/objective/{name}"], 3) for row in metrics] for name in CHARTS}
        found[run]["answers"] = [
            [{"text": s["response"], "score": round(s["score"], 2), "kl": round(s["kl"], 1)} for s in samples[update]]
            for update in found["updates"]
        ]
    return found


def page():
    """Markdown of the page."""
    found = data()
    return PAGE.format(
        updates=found["updates"][-1],
        last=len(found["updates"]) - 1,
        with_kl=NAMES["rloo"],
        without_kl=NAMES["rloo_nokl"],
        held_out=512,
        data=json.dumps(found).replace("<", "\\u003c"),
    )
