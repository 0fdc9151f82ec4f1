"""
SmolLM2-135M-Instruct, a chat model that people know: does what the toy says hold of it? (examples/smollm)

    python benchmark/studies/smollm.py run --tag TAG --workers 2 [--only base siblings_seen]
    python benchmark/studies/smollm.py draw --tag TAG --more TAG  (static/smollm.svg, results/TAG/smollm.md)
    python benchmark/studies/smollm.py products --tag TAG         (how fast this machine multiplies in fp32 and bf16)

`run` goes on where it stopped. A run takes 10 to 45 minutes of a core. models/smollm and the archive of
examples/smollm/reviews.py must be there. Three groups:

verified  GRPO and RLOO on instructions that a program checks, as in examples/smollm/grpo.toml; GRPO with LoRA; and
          GRPO for twice as long in bf16, for a processor with AMX (only where --only names it)
details   short runs of RLOO on one-sentence reviews that a lexicon scores, with one detail off, as in ablations.py
learned   a reward model from rated sentences (that of seed 1), RLOO and PPO on it without a KL penalty, and judges that
          neither saw: the lexicon, whether the instruction is obeyed, and a reward model from other sentences
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from ablations import VARIANTS, code_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from intervals import ROOT, experiments, last, mean_interval, words
from plot import blank, frame, save

from benchmark import MODELS, Run, StudyArgs, git_tag, made_with, run_all, run_command

HERE = "{root}/examples/smollm"
PATHS = f"--sft_model_path {{root}}/models/smollm --output_dir {MODELS}/smollm_NAME --checkpoint_every 0"
INSTRUCTIONS = f"--dataset {HERE}/instructions.py:train --eval_dataset {HERE}/instructions.py:test"
INSTRUCTIONS += f" --reward_fn {HERE}/instructions.py:obeys"
GRPO = f"train_grpo.py --config {HERE}/grpo.toml {INSTRUCTIONS}"
STEP = "--num_mini_batches 1 --num_ppo_epochs 1"
LIKE_GRPO = f"--reward_model_path None --response_length 48 --temperature 0.7 --kl_coef 0.04 --rloo_k 8 {STEP}"
LIKE_GRPO += " --batch_size 64 --total_episodes 1280 --learning_rate 1e-5 --lr_schedule constant"
REVIEWS = f"--dataset {HERE}/reviews.py:train --eval_dataset {HERE}/reviews.py:test"
JUDGES = f"--reward_fn {HERE}/reviews.py:lexicon {HERE}/reviews.py:obeys --reward_fn_weights"
SHORT = f"--response_length 32 --temperature 0.7 --batch_size 32 --micro_batch_size 32 --lr_schedule constant {STEP}"
GRPO_LORA = f"{GRPO} --lora_rank 16 --learning_rate 2e-4"
GRPO_LONG = f"{GRPO} --total_episodes 2560 --eval_every 10"
AUTOCAST = "ACCELERATE_MIXED_PRECISION=bf16 "
OURS = {"grpo": GRPO, "rloo": f"train_rloo.py {INSTRUCTIONS} {LIKE_GRPO}"}
BASE = f"train_rloo.py {REVIEWS} --reward_model_path None {JUDGES} 3 0 {SHORT} --rloo_k 4 --total_episodes 320"
BASE += " --learning_rate 2e-5 --kl_coef 0.03"
LEARNED = f"{REVIEWS} --reward_model_path {{root}}/models/bench/1/smollm_reward {JUDGES} 0 0 {SHORT} --kl_coef 0"
LEARNED += " --eval_every 8 --learning_rate 2e-5 --total_episodes 768"
PAIRS = "--batch_size 16 --learning_rate 3e-5 --warmup_ratio 0.1"
VERIFIED = {"grpo": "GRPO", "rloo": "RLOO", "grpo_lora": "GRPO, LoRA of rank 16"}
VERIFIED_FIGURES = {"rewards/obeys": "right answers", "scores": "score", "kl": "KL, nats", "length": "tokens"}
VERIFIED_FIGURES |= {"ended": "ended"}
LONG = {"grpo_long": "GRPO, 40 updates, bf16"}
DETAILS = {  # name: (tags, what is changed, flags, whether it would measure the KL otherwise)
    "siblings_seen": ("RLOO-9", "packed responses see the siblings before them", "", False),
    "shifted_index": ("GEN-7", "log-probs read one column late, in the token's own", "", True),
    "unmasked": ("REW-6", "log-probs of what stands behind the end count", "", True),
    "no_eos_penalty": ("REW-3", "nothing is paid for a missing EOS", "--missing_eos_penalty None", False),
    "dropout": ("MODEL-2", "dropout 0.1 in the attention", "", False),
}
OF_LEARNED = {"rloo_learned": "RLOO", "ppo_learned": "PPO"}
COLUMNS = "update episode objective/scores objective/kl policy/entropy_avg val/sequence_lengths val/equal_scores"
COLUMNS += " policy/grad_norm val/logprob_gap objective/rewards/obeys objective/rewards/lexicon"
COLUMNS += " objective/rewards/reward_model eval/objective/rewards/obeys eval/objective/rewards/lexicon"
COLUMNS += " eval/objective/rewards/reward_model eval/objective/scores eval/objective/kl eval/objective/length"
COLUMNS += " eval/objective/ended eval/rm/accuracy time/rollout time/scores time/optimise"


@dataclass(kw_only=True)
class RunArgs(StudyArgs):
    """Trains what is missing."""

    seeds: tuple[int, ...] = (1, 2, 3)
    only: tuple[str, ...] = ()
    """names of experiments; none: all"""
    columns: tuple[str, ...] = tuple(COLUMNS.split())


@dataclass
class DrawArgs:
    """The figure and the tables."""

    tag: str
    """folder of the results"""
    more: tuple[str, ...] = ()
    """folders with runs that other scripts made later"""
    output: str = "static/smollm.svg"
    """the figure"""


@dataclass
class ProductsArgs:
    """Matrix products of the model's shapes, on one thread."""

    tag: str
    """folder of the results"""


# ---- run -------------------------------------------------------------------------------------------------------------
def commands(tag):
    """{experiment: (command, folder of its code or None)}, the reward models before what needs them."""
    found = {name: (command, None) for name, command in OURS.items()}
    found["grpo_lora"] = GRPO_LORA, None
    found["grpo_long"] = GRPO_LONG, None
    found["base"] = BASE, None
    mutations = {variant.name: variant.mutations for variant in VARIANTS}
    for name, (_, _, flags, _) in DETAILS.items():
        changes = mutations.get(name, ())
        found[name] = f"{BASE} {flags}".strip(), code_of(f"smollm_{name}", changes, tag) if changes else None
    for name, rows in (("reward", "comparisons"), ("reward_other", "comparisons_other")):
        rows = f"--dataset {HERE}/reviews.py:{rows} --eval_dataset {HERE}/reviews.py:comparisons_test"
        found[name] = f"train_reward.py {rows} {PAIRS}", None
    found["rloo_learned"] = f"train_rloo.py {LEARNED} --rloo_k 4", None
    found["ppo_learned"] = f"train_ppo.py {LEARNED}", None
    precision = {"grpo_long": AUTOCAST}
    return {
        name: (f"{precision.get(name, '')}python rlhf_details/{command} {PATHS.replace('NAME', name)}", folder)
        for name, (command, folder) in found.items()
    }


def run(args: RunArgs):
    """Returns the names of the runs that failed."""
    tag = args.tag or git_tag()
    wanted = args.only or [name for name in commands(tag) if name not in LONG]
    found = {name: x for name, x in commands(tag).items() if name in wanted}
    runs = [
        Run(name, command, seed, tag, "smollm", folder)
        for seed in args.seeds
        for name, (command, folder) in found.items()
        if seed == 1 or not name.startswith("reward")  # One reward model serves all seeds.
    ]
    return run_all(runs, args, tag)


# ---- draw ------------------------------------------------------------------------------------------------------------
def ends(seed, name):
    """(a held-out figure before training, after it)"""
    column = seed[f"eval/objective/{name}"]
    return column[~np.isnan(column)][[0, -1]]


def risen(seeds, names):
    """Cells: a held-out figure before -> after, means over seeds, and the mean rise with Student's 95 % interval."""
    cells = []
    for name in names:
        before, after = np.array([ends(seed, name) for seed in seeds.values()]).T
        rise = words(mean_interval(after - before)) if len(seeds) > 1 else "one seed"
        cells.append(f"{before.mean():.2f} -> {after.mean():.2f}, {rise}")
    return cells


def course(seeds):
    """Lines of a table: held-out means over seeds at each evaluation, and the mean rise over the second half."""
    kept = next(iter(seeds.values()))
    updates = kept["update"][~np.isnan(kept["eval/objective/kl"])].astype(int)
    rows = []
    for name, label in VERIFIED_FIGURES.items():
        y = np.array([seed[f"eval/objective/{name}"] for seed in seeds.values()])
        y = y[:, ~np.isnan(y[0])]  # [seeds, evaluations]
        rise = words(mean_interval(y[:, -1] - y[:, len(updates) // 2]))
        rows.append([label, *(f"{x:.2f}" for x in y.mean(0)), rise])
    half = f"from {updates[len(updates) // 2]} to {updates[-1]}"
    return table(["held out, at update", *map(str, updates), half], rows)


def table(head, rows):
    """Lines of a table. Args: head, [cell]; rows, [[cell]]."""
    return [f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows]]


def of_details(found):
    """{detail: {figure: [variant less base, of each seed that both have]}}"""
    effects = {}
    for name, (*_, measures_kl) in DETAILS.items():
        common = sorted(found.get(name, {}).keys() & found.get("base", {}).keys())
        pairs = [(found[name][seed], found["base"][seed]) for seed in common]
        if len(pairs) < 2:
            continue
        effects[name] = {
            kind: np.array([ends(a, kind)[1] - ends(b, kind)[1] for a, b in pairs])
            for kind in ("rewards/lexicon", "rewards/obeys", "ended", "kl")[: 3 if measures_kl else 4]
        }
        course = "objective/rewards/lexicon"
        effects[name]["course"] = np.array([np.nanmean(a[course]) - np.nanmean(b[course]) for a, b in pairs])
    return effects


def draw_verified(axis, found):
    """The mean score of each batch, a line for each seed."""
    for (name, label), colour in zip(VERIFIED.items(), ("#c4501b", "#3465a4", "#4e9a06"), strict=True):
        for number, seed in enumerate(found.get(name, {}).values()):
            y = seed["objective/scores"]
            axis.plot(seed["update"], y, color=colour, linewidth=1, alpha=0.8, label=None if number else label)
    axis.legend(frameon=False, fontsize=7)
    frame(axis, "verified: score of the batch", "update")


def draw_long(axis, found):
    """Held-out shares over the longer run, a line for each seed."""
    for kind, colour, label in (("rewards/obeys", "#c4501b", "right answers"), ("ended", "#3465a4", "ended")):
        for number, seed in enumerate(found["grpo_long"].values()):
            y = seed[f"eval/objective/{kind}"]
            kept = ~np.isnan(y)
            axis.plot(seed["update"][kept], y[kept], marker=".", color=colour, label=None if number else label)
    axis.legend(frameon=False, fontsize=7)
    frame(axis, "GRPO, 40 updates: held-out shares", "update")


def draw_details(axis, found):
    """What a detail that is off does to the lexicon's verdict, a point for each seed."""
    effects = of_details(found)
    for place, name in enumerate(effects):
        x = effects[name]["rewards/lexicon"]
        axis.plot(x, [place] * len(x), "o", color="#3465a4", markersize=5)
    axis.axvline(0, color="grey", linewidth=0.8)
    axis.set_yticks(range(len(effects)), [name.replace("_", " ") for name in effects])
    axis.invert_yaxis()
    frame(axis, "a detail off: lexicon at the end, less the base", "each seed")


def draw_learned(axis, found):
    """The learned score and the lexicon's over the KL, held out: a colour for each algorithm, a line for each seed."""
    for (name, algorithm), colour in zip(OF_LEARNED.items(), ("#3465a4", "#75507b"), strict=True):
        for number, seed in enumerate(found.get(name, {}).values()):
            kept = ~np.isnan(seed["eval/objective/kl"])
            for kind, style, label in (("reward_model", "o-", "learned score"), ("lexicon", "x--", "lexicon")):
                y, label = seed[f"eval/objective/rewards/{kind}"][kept], None if number else f"{algorithm}: {label}"
                axis.plot(seed["eval/objective/kl"][kept], y, style, markersize=4, color=colour, label=label)
    axis.legend(frameon=False, fontsize=7, handlelength=4)
    frame(axis, "learned: held-out score and its judge", "KL, nats a response")


def figure(found, output):
    """A panel for each group that has been run."""
    panels = [(draw_verified, VERIFIED.keys() & found.keys()), (draw_long, LONG.keys() & found.keys())]
    panels += [(draw_details, of_details(found))]
    panels = [panel for panel, there in [*panels, (draw_learned, OF_LEARNED.keys() & found.keys())] if there]
    rows = 1 if len(panels) < 4 else 2
    columns = -(-len(panels) // rows)
    picture, axes = blank(rows, columns, figsize=(4.2 * columns, 3.4 * rows))
    for panel, axis in zip(panels, np.ravel(axes), strict=True):
        panel(axis, found)
    picture.tight_layout()
    save(picture, output, "smollm")


def draw(args: DrawArgs):
    """Writes the tables and the figure."""
    results = ROOT / "benchmark" / "results" / args.tag
    found = experiments(results / "smollm")
    for tag in args.more:
        found = found | experiments(results.parent / tag / "smollm")
    more = f" --more {' '.join(args.more)}" if args.more else ""
    lines = ["# SmolLM2-135M-Instruct", ""]
    lines += [f"Written by `python benchmark/studies/smollm.py draw --tag {args.tag}{more}`."]
    lines += [
        "Held-out figures are means over 96 prompts, before -> after, then over seeds. What follows is the mean rise"
    ]
    lines += ["(or the mean difference to the base) with Student's 95 % interval over seeds.", ""]
    names, runs = VERIFIED_FIGURES, VERIFIED | LONG
    rows = [[label, str(len(found[x])), *risen(found[x], names)] for x, label in runs.items() if x in found]
    lines += table(["verified", "seeds", *names.values()], rows)
    if "grpo_long" in found:
        lines += ["", *course(found["grpo_long"])]
    if "base" in found:
        names = {"rewards/lexicon": "lexicon", "rewards/obeys": "obeyed", "ended": "ended", "kl": "KL, nats"}
        lines += ["", *table(["details", "seeds", *names.values()],
                             [["the base", str(len(found["base"])), *risen(found["base"], names)]])]  # fmt: skip
        names |= {"course": "lexicon over the run"}
        rows = []
        for name, effect in of_details(found).items():
            tags, what, *_ = DETAILS[name]
            cells = [words(mean_interval(effect[x])) if x in effect else "not comparable" for x in names]
            rows.append([tags, what, str(len(effect["ended"])), *cells])
        lines += ["", *table(["detail", "what is changed", "seeds", *names.values()], rows)]
    for name in ("reward", "reward_other"):
        if name in found:
            accuracy = last(found[name][1]["eval/rm/accuracy"])
            lines += ["", f"`{name}`: right in {accuracy:.3f} of 193 held-out comparisons."]
    names = {"rewards/reward_model": "learned score", "rewards/lexicon": "lexicon", "rewards/obeys": "obeyed"}
    names |= {"kl": "KL, nats", "length": "tokens", "ended": "ended"}
    rows = [[label, str(len(found[x])), *risen(found[x], names)] for x, label in OF_LEARNED.items() if x in found]
    lines += ["", *table(["learned", "seeds", *names.values()], rows)] if rows else []
    phases = [f"time/{phase}" for phase in ("rollout", "scores", "optimise")]
    rows = [
        [name, *(f"{np.nanmedian(np.concatenate([seed[x] for seed in seeds.values()])):.0f}" for x in phases)]
        for name, seeds in found.items()  # The long runs had more than one neighbour.
        if name not in LONG and phases[0] in next(iter(seeds.values()))
    ]
    lines += ["", "Median seconds of an update, on one thread; the other core ran another experiment.", ""]
    lines += table(["experiment", "rollout", "scores", "optimise"], rows)
    (results / "smollm.md").write_text("\n".join(lines) + "\n")
    figure(found, args.output)
    print("\n".join(lines))


def products(args: ProductsArgs):
    """Writes results/TAG/smollm_products.md."""
    torch.set_num_threads(1)
    rows = []
    for what, shape in {"MLP of 64 rows": (64, 576, 1536), "MLP of 1,024 rows": (1024, 576, 1536),
                        "head of 1,024 rows": (1024, 576, 49152)}.items():  # fmt: skip
        m, k, n = shape
        cells = []
        for dtype in (torch.float32, torch.bfloat16):
            x, weight = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
            torch.nn.functional.linear(x, weight)
            count, start = max(1, int(6e9 / (2 * m * k * n))), time.time()
            for _ in range(count):
                torch.nn.functional.linear(x, weight)
            cells.append(f"{2 * m * k * n * count / (time.time() - start) / 1e9:.0f}")
        rows.append([what, *cells])
    head = ["# Matrix products", "", f"Written by `python benchmark/studies/smollm.py products --tag {args.tag}`:"]
    head += [f"GFLOP/s of one thread. {made_with()}", ""]
    lines = [*head, *table(["product", "fp32", "bf16"], rows)]
    (ROOT / "benchmark" / "results" / args.tag / "smollm_products.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


COMMANDS = {"run": (RunArgs, run), "draw": (DrawArgs, draw), "products": (ProductsArgs, products)}

if __name__ == "__main__":
    sys.exit(run_command(COMMANDS))
