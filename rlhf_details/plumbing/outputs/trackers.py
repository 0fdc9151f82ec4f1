"""
Where a run shows its numbers: the terminal, metrics.jsonl and samples.jsonl, TensorBoard, and Weights & Biases.

metrics: {name: number}   rows of a table: [{column: text or number}]
"""

import contextlib
import json
import subprocess
from pathlib import Path

from accelerate.tracking import TensorBoardTracker, WandBTracker

from rlhf_details.plumbing import console
from rlhf_details.plumbing.inputs import flags, token_ids
from rlhf_details.plumbing.outputs import atomic

SHOWN = (  # in the line of an update, where a script has them
    "eps objective/scores objective/kl objective/divergence objective/gold train/sft/loss train/sft/lr train/rm/loss "
    "train/rm/accuracy train/rm/lr train/dpo/loss rewards/accuracies train/dpo/lr"
).split()


def git(*words):
    """What git says of this repository, and "" where there is none. Other repositories around it are not sought."""
    root = Path(__file__).resolve().parents[3]
    words = ["git", f"--git-dir={root}/.git", f"--work-tree={root}", *words]
    try:
        return subprocess.run(words, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


# ---- TensorBoard and Weights & Biases --------------------------------------------------------------------------------
def start(args, accelerator, folder, about, update, prompts):
    """Opens accelerate's trackers, of which the axis is episodes. Call it on the main process only.

    Args: folder, of the run; about, its config.json as a dictionary, in which `wandb_id`, if it is there, names the run
    to continue; update, the last one that stays; prompts, to train on. Returns: the run of Weights & Biases, or None.
    """
    # Event files are never cut. TensorBoard is told to forget what they say about later updates.
    purge_step = update * args.batch_size + 1 if update else 0
    board = TensorBoardTracker(folder.name, folder.parent, purge_step=purge_step)
    board.start()
    accelerator.trackers.append(board)
    if not args.track:
        return None
    import wandb

    # The commit is a tag as well, so that filters compare versions. 64 letters are the most that wandb takes.
    tags = [*args.wandb_tags, *filter(None, [git("describe", "--tags", "--always", "--dirty")[:64]])]
    tracker = WandBTracker(
        args.wandb_project_name,
        entity=args.wandb_entity,
        name=folder.name,
        group=flags.experiment(args),
        tags=tags,
        job_type=args.exp_name,
        config=about["args"] | about,
        save_code=True,
        id=about.get("wandb_id"),
        resume="allow",
    )
    try:
        # Where there is a terminal, it asks for a key. Behind a launcher nobody may see the question.
        if wandb.setup().settings.mode == "online" and not wandb.login(timeout=10, verify=False):
            raise ValueError("no login")
        tracker.start()
    except (wandb.errors.Error, ValueError, OSError) as e:  # ValueError: wandb does not take the tag or the name.
        hint = "run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline"
        console.fail(f"--track: Weights & Biases cannot be started ({console.in_one_line(e)}); {hint}")
    accelerator.trackers.append(tracker)
    code = str(Path(__file__).parents[2])  # all Python files of the package
    to_each(accelerator, lambda tracker: tracker.name == "wandb" and tracker.tracker.log_code(code))
    if not update:
        rows = [{name: str(x) for name, x in prompt.columns.items()} for prompt in prompts[:8]]
        log_table(accelerator, "data/rows", rows, 0)
    return tracker.tracker


def to_each(accelerator, act):
    """Calls act(tracker) with each tracker. One that fails is left out from then on, since the run's files have all."""
    for tracker in list(accelerator.trackers):
        try:
            act(tracker)
        except Exception as e:  # such as an error of the network, which no full disk is
            accelerator.trackers.remove(tracker)
            console.say(
                f"warning: {tracker.name} has failed ({console.in_one_line(e)}); metrics.jsonl has what it lacks"
            )


def log(accelerator, row):
    """Shows a row of metrics in each tracker."""
    values = row | {"global_step": row["episode"]}  # openrlbenchmark reads it.
    to_each(accelerator, lambda tracker: tracker.log(values, step=row["episode"]))


def log_table(accelerator, name, rows, step):
    """Shows rows as a table of Weights & Biases."""
    import pandas

    table = pandas.DataFrame(rows)
    to_each(accelerator, lambda each: each.name == "wandb" and each.log_table(name, dataframe=table, step=step))


# ---- the run's own files ---------------------------------------------------------------------------------------------
def append_rows(path, rows):
    """Appends objects to a file of JSON lines."""
    # backslashreplace: half a pair, which UTF-8 cannot say, becomes what JSON has for it.
    with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def cut_rows(path, update):
    """Leaves in a file of JSON lines the rows up to an update, none for update 0."""
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if update and path.exists() else []:
        with contextlib.suppress(ValueError, KeyError, TypeError):  # A kill may have torn the last line.
            kept += [line] if json.loads(line)["update"] <= update else []
    atomic.write_text(path, "".join(f"{line}\n" for line in kept))


# ---- the terminal ----------------------------------------------------------------------------------------------------
def in_words(metrics):
    """The metrics that the line of an update shows."""
    return "  ".join(f"{name.split('/')[-1]} {metrics[name]:.4g}" for name in SHOWN if name in metrics)


def sample_rows(args, tokenizer, metrics, prompts, responses, mask, ended, scores, kl, action_mask=None):
    """Rows of a table: the first response to each of the first four prompts, and the token with which it ended.

    Args: metrics, of the update; prompts and all that follows, of Run.log's `samples`.
    """
    # The responses to a prompt are adjacent, and share one object.
    shown = [i for i, prompt in enumerate(prompts) if i == 0 or prompt is not prompts[i - 1]][:4]
    rows = []
    kl_coef = metrics.get("objective/kl_coef", getattr(args, "kl_coef", None))
    own = mask if action_mask is None else action_mask
    for i, text in zip(
        shown, token_ids.decode_turns(tokenizer, *(x[shown] for x in (responses, mask, own))), strict=True
    ):
        score = None if scores[i].isnan() else float(scores[i])  # A reward may have abstained.
        row = {
            "query": prompts[i].text,
            "response": text,
            "ended": bool(ended[i]),
            "end": tokenizer.decode(responses[i][mask[i]][-1:]).strip() if ended[i] else "",
            "score": score,
            "kl": float(kl[i]),
        }
        if kl_coef is not None:  # A teacher's page has no KL beside it.
            row["total"] = None if score is None else score - kl_coef * row["kl"]
        rows.append(row)
    return rows


def print_rows(title, rows):
    """Prints the rows of a table, each in a line: numbers with two decimals, and texts without their line breaks."""
    console.say(f"-- {title}")
    for row in rows:
        cells = (f"{name}: {x:z.2f}" if isinstance(x, float) else f"{name}: {x}" for name, x in row.items())
        console.say(" | ".join(cells).replace("\n", "⏎"))


def evaluated(metrics):
    """The eval/* of a row of metrics."""
    return {name: value for name, value in metrics.items() if name.startswith("eval/")}
