"""
Where a run shows its numbers: the console, metrics.jsonl and samples.jsonl, TensorBoard, and Weights & Biases.

Each has `log(update, metrics)`, `table(update, rows)` and `close(exit_code)`. Files and wandb also show `data`. They
exist on the main process only, but for the console, which is silent on the others.
metrics: {name: number}   rows of a table: [{column: text or number}]
"""

import contextlib
import json
import os
import subprocess
import time
from pathlib import Path

import rich.console
import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch.utils.tensorboard import SummaryWriter

from rlhf_details.plumbing import checkpoint, cli, errors, health, models, progress

SHOWN = (  # on the console, where a script has them
    "eps objective/scores objective/kl objective/gold train/sft/loss train/sft/lr train/rm/loss train/rm/accuracy "
    "train/rm/lr train/dpo/loss rewards/accuracies train/dpo/lr"
).split()


def git(*words):
    """What git says about this repository, and "" where there is no git or no repository."""
    try:
        return subprocess.run(["git", *words], capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()
    except OSError:
        return ""


class Terminal(rich.console.Console):
    """A console that falls silent when its reader is gone, as in `| tee` after Ctrl-C. rich would end the process."""

    def on_broken_pipe(self):
        with contextlib.suppress(SystemExit):
            super().on_broken_pipe()


class Console:
    """One live line and tables on a terminal. Elsewhere some twenty plain lines a run, and else one every ten seconds.

    After ten minutes these become rarer, up to one every thirty seconds.
    """

    def __init__(self, num_updates, quiet):
        self.num_updates, self.console, self.bar = num_updates, Terminal(quiet=quiet), None

    def begin(self, name, done_before):
        """Starts the live line, and the clock of the remaining time."""
        self.done_before, self.start = done_before, time.time()
        self.last_line = self.last_update = self.start
        if self.console.is_terminal and not self.console.quiet:
            columns = [TextColumn("{task.description}"), BarColumn(bar_width=20), TimeRemainingColumn()]
            self.bar = Progress(*columns, TextColumn("{task.fields[shown]}"), console=self.console)
            self.task = self.bar.add_task(name, total=self.num_updates, completed=done_before, shown="")
            self.bar.start()

    def say(self, line):
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)
        progress.heard()

    def log(self, update, metrics):
        shown = "  ".join(f"{name.split('/')[-1]} {metrics[name]:.4g}" for name in SHOWN if name in metrics)
        N, now, done = self.num_updates, time.time(), update - self.done_before
        # The next update may take as long as this one.
        silence, self.last_update = now - self.last_line + now - self.last_update, now
        is_silent = silence >= max(9, min(30, (now - self.start) / 60))
        if self.bar:
            self.bar.update(self.task, completed=update, shown=f"{update}/{N}  {shown}")
            progress.heard()
        elif update in (1, N) or (update and (is_silent or update % max(1, N // 20) == 0)):
            self.last_line = now
            # The first update is slow, so it says nothing of the others.
            eta = f"  eta {(now - self.start) / done * (N - update):.0f}s" if done > 1 else ""
            self.say(f"{update}/{N}  {shown}{eta}")

    def table(self, update, rows):
        title, rows = f"samples of update {update}", [{name: as_cell(x) for name, x in row.items()} for row in rows]
        if not self.console.is_terminal:
            lines = [" | ".join(f"{name}: {text}" for name, text in row.items()) for row in rows[:2]]
            self.say("\n".join([f"-- {title}", *lines]))
            return
        table = Table(*rows[0], title=title, show_lines=True)
        for row in rows:
            # Responses may hold square brackets, which rich would read as its markup.
            table.add_row(*[self.console.render_str(text, markup=False, emoji=False) for text in row.values()])
        self.console.print(table)

    def close(self, exit_code):
        if self.bar:
            self.bar.stop()


def as_cell(x):
    """A number with two decimals, yes or no, a text on one line, or - where there is nothing."""
    x = {True: "yes", False: "no", None: "-"}[x] if x is None or isinstance(x, bool) else x
    return f"{x:z.2f}" if isinstance(x, float) else str(x).replace("\n", "⏎")


class Files:
    """In the run's folder: metrics.jsonl (an object an update), samples.jsonl (one a response), and TensorBoard's."""

    def __init__(self, folder, update, episode, config):
        """Opens the files and cuts off all rows after an update (0: all rows), as if they had never been written.

        TensorBoard's axis is that of Weights & Biases: episodes, of which the update has finished `episode`.
        """
        self.metrics, self.samples = (cut(folder / name, update) for name in ("metrics.jsonl", "samples.jsonl"))
        # Event files are never cut. TensorBoard is told to forget what they say about later updates.
        self.tensorboard = SummaryWriter(folder, purge_step=episode + 1 if update else 0)
        self.tensorboard.add_text("config", f"```\n{config}\n```")

    def log(self, update, metrics):
        self.metrics.write(json.dumps(metrics) + "\n")
        self.metrics.flush()
        for name, value in metrics.items():
            self.tensorboard.add_scalar(name, value, metrics["episode"])

    def table(self, update, rows):
        self.samples.writelines(json.dumps({"update": update} | row) + "\n" for row in rows)
        self.samples.flush()

    def data(self, prompts):
        self.tensorboard.add_histogram("data/prompt_lengths", torch.tensor([len(prompt.ids) for prompt in prompts]), 0)

    def sync(self):
        """Returns once all rows are on the disk, so that they last as long as the checkpoint that follows."""
        for file in (self.metrics, self.samples):
            os.fsync(file.fileno())

    def close(self, exit_code):
        for file in (self.metrics, self.samples, self.tensorboard):
            with contextlib.suppress(OSError):  # What could not be written has been reported already.
                file.close()


def cut(path, update):
    """Opens a file of JSON lines to append to it, without the rows after an update."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines() if update and path.exists() else []:
        with contextlib.suppress(ValueError):  # A kill may have torn the last line.
            kept += [line] if json.loads(line)["update"] <= update else []
    checkpoint.write_text(path, "".join(f"{line}\n" for line in kept))
    return open(path, "a", encoding="utf-8")


class WeightsAndBiases:
    """A run of Weights & Biases with its configuration, code and tags. A group holds the seeds of an experiment."""

    def __init__(self, args, name, group, about):
        """Args: about, the run's config.json as a dictionary. Its `wandb_id`, if it has one, is the run to continue."""
        import wandb

        described = git("describe", "--tags", "--always", "--dirty")[:64]  # which is the longest tag that wandb takes
        options = dict(project=args.wandb_project_name, entity=args.wandb_entity, name=name, group=group)
        options |= dict(job_type=args.exp_name, config=about["args"] | about)
        options |= dict(tags=[*args.wandb_tags, *([described] if described else [])])
        if about.get("wandb_id"):  # Rows that are logged again have the same numbers, and wandb keeps the first ones.
            options |= dict(id=about["wandb_id"], resume="allow")
        try:
            self.run = wandb.init(**options)
        except (wandb.errors.Error, ValueError) as e:  # ValueError: wandb does not take the tag or the name.
            hint = "run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline"
            cli.fail(f"--track: Weights & Biases cannot be started ({errors.in_one_line(e)}); {hint}")
        self.run.log_code(str(Path(__file__).parent.parent))  # all Python files of the package
        self.run.define_metric("*", step_metric="episode")  # one axis for runs of any batch size
        self.Table, self.Histogram = wandb.Table, wandb.Histogram

    def log(self, update, metrics):
        self.run.log(metrics | {"global_step": metrics["episode"]}, step=update)

    def table(self, update, rows):
        table = self.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self.run.log({"samples": table}, step=update)

    def data(self, prompts):
        rows, lengths = [prompt.columns for prompt in prompts[:8]], [len(prompt.ids) for prompt in prompts]
        columns = list(dict.fromkeys(column for row in rows for column in row))
        cells = [["-" if row.get(column) is None else str(row[column]) for column in columns] for row in rows]
        table = self.Table(columns=columns, data=cells)
        self.run.log({"data/rows": table, "data/prompt_lengths": self.Histogram(lengths)}, step=0)

    def close(self, exit_code):
        self.run.finish(exit_code)


def evaluated(metrics):
    """The eval/* of a row of metrics."""
    return {name: value for name, value in metrics.items() if name.startswith("eval/")}


def sample_rows(args, tokenizer, metrics, prompts, responses, mask, ended, scores, kl):
    """Rows of a table: the first response to each of the first four prompts.

    Whether a response ended, and with which token, is said where there is a token that ends it. Args: metrics, of the
    update; prompts and all that follows, of Run.log's `samples`.
    """
    # The responses to a prompt are adjacent, and share one object.
    shown = [i for i, prompt in enumerate(prompts) if i == 0 or prompt is not prompts[i - 1]][:4]
    texts = models.decode(tokenizer, responses[shown], mask[shown])
    rows, kl_coef = [], metrics.get("objective/kl_coef", args.kl_coef)
    for i, text, score, nats in zip(shown, texts, scores[shown].tolist(), kl[shown].tolist(), strict=True):
        row = {"query": prompts[i].text, "response": text}
        if health.has_end(args):
            last = responses[i][mask[i]][-1:].tolist()
            row |= {"ended": bool(ended[i]), "end": tokenizer.decode(last).strip() if ended[i] else ""}
        rows.append(row | {"score": score, "kl": nats, "total": score - kl_coef * nats})
    return rows
