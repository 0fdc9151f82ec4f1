"""
What a run leaves behind: its folder and trackers, checkpoints to go on from, and one clear report where it has to stop.
Nothing runs at import.

    runs/<run_name>/config.json       arguments, versions, git commit, device; where it was resumed
                    metrics.jsonl     one object an update
                    samples.jsonl     the sample tables
                    events.out.*      TensorBoard
                    checkpoints/000040/weights.safetensors, exp_avg.safetensors, exp_avg_sq.safetensors   whole, fp32, by name
                                       pending.safetensors   --async_rollouts: the batch that waits to be trained on
                                       state.json            arguments, and what the loop carries from update to update
                                       manifest.json         size and SHA-256 of each of these files
"""

import contextlib
import dataclasses
import glob
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
import transformers
from accelerate.utils import broadcast_object_list, gather_object
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.utils.tensorboard import SummaryWriter

from rlhf_details import data, engines, health, hub, lora, utils

# what a resumed run may be given anew: nothing here changes a number of the curve
OUTPUTS = (
    "resume overwrite checkpoint_every config run_name track wandb_project_name wandb_entity wandb_tags output_dir "
    "push_to_hub hub_model_id"
).split()
MAY_CHANGE = utils.MEMORY_KNOBS + OUTPUTS


def git(*words):
    """What git says of this repository; "" where there is no git, or no repository."""
    try:
        return subprocess.run(["git", *words], capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()
    except OSError:
        return ""


class Terminal(Console):
    """A console that falls silent where nobody reads it any more (`| tee` after Ctrl-C); rich would end the process there."""

    def on_broken_pipe(self):
        with contextlib.suppress(SystemExit):
            super().on_broken_pipe()


class Run:
    """Folder `runs/<run_name>/`, TensorBoard, optionally wandb, and the terminal. Only the main process writes or prints.

    On a terminal: one live line and rich tables; elsewhere: some twenty plain lines a stage. SIGTERM and SIGINT end the run
    after the update in progress, with a checkpoint; a second one at once.
    Args: num_steps, updates of the whole run; watch, names of the metrics to show; learnt_from, as any JSON: the
    rows and the checksums of the models. A run goes on with the same only.
    """

    def __init__(self, args, accelerator, num_steps, watch, learnt_from=()):
        self.args, self.accelerator, self.num_steps, self.watch = args, accelerator, num_steps, watch
        self.health, self.latest = health.Health(args, accelerator), {}
        self.main, self.start, self.signal = accelerator.is_main_process, time.time(), None
        self.done = self.resumed_at = 0
        self.data = hashlib.sha256(json.dumps(learnt_from).encode()).hexdigest()
        if len(set(gather_object([self.data]))) > 1:
            utils.fail(
                "--dataset: the processes read other rows; a function that returns rows must return the same on each of them"
            )
        self.console, self.wandb, self.bar, self.repository = Terminal(quiet=not self.main), None, None, None
        self.metrics_file = self.samples_file = self.tensorboard = None
        self.last, self.stopping, self.handlers = None, 0, {}  # the newest whole checkpoint; the signal that all processes stop for
        (name,) = broadcast_object_list([self.choose_name()])
        self.folder = Path("runs") / name
        if args.resume:
            self.last = self.choose_checkpoint()  # before anything is written
        in_main_thread = threading.current_thread() is threading.main_thread()  # only there can signals be caught
        signals = (signal.SIGTERM, signal.SIGINT) if in_main_thread else ()
        self.handlers = {number: signal.signal(number, self.on_signal) for number in signals}
        if self.main:
            try:
                with self.writing(f"runs/{name}"):
                    self.open()
            except BaseException:
                with contextlib.suppress(OSError):  # nothing is left of a run that did not start
                    self.folder.rmdir(), self.folder.parent.rmdir()
                raise

    def choose_name(self):
        """The run's name: as given; under --resume that of the newest run of this data, experiment and seed; else a new one."""
        args = self.args
        if args.run_name is not None:
            return args.run_name
        prefix = utils.default_run_name(args)
        named = Path("runs").glob(f"{glob.escape(prefix)}[0-9]*")
        before = sorted(folder for folder in named if folder.is_dir() and any(folder.iterdir()))  # an empty one never started
        if args.resume and before:
            return before[-1].name
        name = prefix + time.strftime("%Y%m%d-%H%M%S")
        while self.main:
            with self.writing(f"runs/{name}"):
                Path("runs").mkdir(exist_ok=True)
                try:
                    (Path("runs") / name).mkdir()
                    return name
                except FileExistsError:  # another run of a sweep has it, started in the same second
                    name += "_"

    def open(self):
        """Opens the files, or opens them again, and the trackers."""
        args, accelerator = self.args, self.accelerator
        commit = git("rev-parse", "HEAD")
        versions = {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
        about = {"args": dataclasses.asdict(args), "versions": versions, "commit": commit, "device": str(accelerator.device)}
        about |= {"num_processes": accelerator.num_processes, "mixed_precision": engines.precision(accelerator)}
        about |= {"engine": engines.name(accelerator), "resumed": [], "run": str(self.folder)}
        if args.push_to_hub:
            about["hub"] = self.repository = hub.open_repository(args)
        if args.resume and (self.folder / "config.json").exists():
            with contextlib.suppress(ValueError, TypeError, KeyError):  # a torn file is written anew
                before = json.loads((self.folder / "config.json").read_text())
                about["resumed"] = [*before["resumed"], {key: before[key] for key in ("commit", "num_processes")}]
                about["wandb_id"] = before.get("wandb_id")
        if args.track:
            self.wandb = self.start_wandb(about)
            about["wandb_id"] = self.wandb.id
        self.about = about
        self.folder.mkdir(parents=True, exist_ok=True)
        Path(args.output_dir).resolve().parent.mkdir(parents=True, exist_ok=True)  # found out now, not after a day
        write_whole(self.folder / "config.json", json.dumps(about, indent=1))
        self.config = f"```\n{json.dumps(about, indent=1)}\n```"
        if not args.resume:
            self.rewind(None)
        if self.console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                TimeRemainingColumn(),
                TextColumn("{task.fields[shown]}"),
            )
            self.bar = Progress(*columns, console=self.console)
            self.task = self.bar.add_task(args.exp_name, total=self.num_steps, shown="")
            self.bar.start()

    def start_wandb(self, about):
        """The Weights & Biases run, with configuration, code and tags; a group holds the seeds of an experiment."""
        import wandb

        args, here = self.args, Path(__file__).parent
        described = git("describe", "--tags", "--always", "--dirty")
        where = dict(project=args.wandb_project_name, entity=args.wandb_entity, name=self.folder.name)
        where |= dict(tags=[*args.wandb_tags, *([described[:64]] if described else [])], job_type=args.exp_name)
        where |= dict(group=utils.default_run_name(args).rpartition(f"__{args.seed}__")[0], config=about["args"] | about)
        if about.get("wandb_id"):  # what is logged again has the same numbers as before; wandb keeps the first
            where |= dict(id=about["wandb_id"], resume="allow")
        try:
            run = wandb.init(**where)
        except (wandb.errors.Error, ValueError) as e:  # ValueError: a tag or name that it does not take
            hint = "run `wandb login`, set WANDB_API_KEY, or WANDB_MODE=offline"
            utils.fail(f"--track: Weights & Biases cannot be started ({hub.first_line(e)}); {hint}")
        run.log_code(str(here))
        run.define_metric("*", step_metric="episode")  # one axis for runs of any batch size
        return run

    def show_data(self, prompt_set):
        """The first rows of a data set and the lengths of its prompts for the trackers, and a prompt for the model card."""
        rows, lengths = prompt_set.rows, [len(tokens) for tokens in prompt_set.ids]
        self.prompt = rows[0]["prompt"] if data.is_messages(rows[0]["prompt"]) else prompt_set.texts[0]
        if not self.main or self.last:
            return
        if self.tensorboard:
            self.tensorboard.add_histogram("data/prompt_lengths", torch.tensor(lengths), 0)
        if self.wandb:
            import wandb

            columns = list(dict.fromkeys(column for row in rows[:8] for column in row))
            table = [[str(row.get(column, "")) for column in columns] for row in rows[:8]]
            shown = {"data/rows": wandb.Table(columns=columns, data=table), "data/prompt_lengths": wandb.Histogram(lengths)}
            self.wandb.log(shown, step=0)

    def rewind(self, update):
        """Cuts logs and checkpoints after an update, as if nothing later had ever happened; None: there is nothing before."""
        files = []
        for name in ("metrics.jsonl", "samples.jsonl"):
            path, kept = self.folder / name, []
            for line in path.read_text().splitlines() if update is not None and path.exists() else ():
                with contextlib.suppress(ValueError):  # the last line may be torn
                    kept += [line] if json.loads(line)["update"] <= update else []
            write_whole(path, "".join(f"{line}\n" for line in kept))
            files.append(open(path, "a"))
        self.metrics_file, self.samples_file = files
        for unfinished in self.folder.glob("checkpoints/*.partial"):
            shutil.rmtree(unfinished)
        for later in checkpoints_of(self.folder):
            if update is None:  # all those of a run that this one replaces
                shutil.rmtree(later)
            elif int(later.name) > update:  # damaged, but perhaps not all of it
                shutil.rmtree(f"{later}.damaged", ignore_errors=True)
                later.rename(f"{later}.damaged")
        # TensorBoard's files are never cut: it is told to forget what they say of these steps
        self.tensorboard = SummaryWriter(self.folder, purge_step=0 if update is None else update + 1)
        self.tensorboard.add_text("config", self.config)

    def say(self, line):
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def note_combination(self, script, architecture, layout):
        """Says so where no test has run this script and architecture under this engine, precision and layout of rows.

        layout: "packed" or "plain". The tests run on CPUs.
        """
        found = json.loads(Path(__file__).with_name("validated.json").read_text())
        combination = [architecture, engines.precision(self.accelerator), layout, engines.name(self.accelerator), script]
        if self.accelerator.device.type != "cpu":
            combination.append(f"on {self.accelerator.device.type}")
        if combination not in found:
            self.say(
                f"note: no test has run {', '.join(combination)} (README, Validated on): look at val/logprob_gap and val/ratio"
            )

    def log(self, metrics, step):
        """Writes one row of metrics ({name: number}) everywhere, shows `watch` of it, and says what looks unhealthy in it."""
        found, warnings = self.health(metrics)
        self.latest = metrics = metrics | found
        if not self.main:
            return
        for line in warnings:
            self.say(line)
        with self.writing(self.folder / "metrics.jsonl"):
            self.metrics_file.write(json.dumps(metrics) + "\n")
            self.metrics_file.flush()
            for name, value in metrics.items():
                self.tensorboard.add_scalar(name, value, step)
        if self.wandb:
            self.wandb.log(metrics | {"global_step": metrics["episode"]}, step=step)
        shown = "  ".join(f"{name.split('/')[-1]} {metrics[name]:.4g}" for name in self.watch if name in metrics)
        if self.bar:
            self.bar.update(self.task, completed=step, shown=f"{step}/{self.num_steps}  {shown}")
        elif step in (1, self.num_steps) or (step and step % max(1, self.num_steps // 20) == 0):
            left = (time.time() - self.start) / max(1, step - self.resumed_at) * (self.num_steps - step)
            self.say(f"{step}/{self.num_steps}  {shown}  eta {left:.0f}s")

    def table(self, title, rows, step):
        """Shows sample rows ([{column: value}]) and appends them, with their step, to samples.jsonl and to wandb."""
        if not self.main:
            return
        with self.writing(self.folder / "samples.jsonl"):
            for row in rows:
                self.samples_file.write(json.dumps({"update": step, **row}) + "\n")
            self.samples_file.flush()
        text = [{k: f"{v:.2f}" if isinstance(v, float) else str(v).replace("\n", "⏎") for k, v in row.items()} for row in rows]
        if self.console.is_terminal:
            table = Table(*rows[0], title=title, show_lines=True)
            for row in text:
                table.add_row(*[Console().render_str(v, markup=False) for v in row.values()])
            self.console.print(table)
        else:
            self.say("\n".join([f"-- {title}", *(" | ".join(f"{k}: {v}" for k, v in row.items()) for row in text[:2])]))
        if self.wandb:
            import wandb

            self.wandb.log({"samples": wandb.Table(columns=list(rows[0]), data=[list(r.values()) for r in rows])}, step=step)

    def save_model(self, model, weights, tokenizer):
        """Writes --output_dir with a model card, and then pushes it, where asked for.

        weights, {name: whole tensor} of a module that holds this model as its `model`; a model with adapters needs none of them.
        """
        if not self.main:
            return
        args, link = self.args, self.wandb.url if self.wandb else None
        weights = {key.removeprefix("model."): w for key, w in weights.items() if key.startswith("model.")}

        def write(folder, weights):
            if hasattr(model, "peft_config"):
                lora.save(model, folder, getattr(args, "sft_model_path", None) or args.base_model, args.lora_merge)
            else:
                model.save_pretrained(folder, state_dict=weights)
            card = hub.model_card(args, self.repository, self.latest, link, self.about | {"prompt": self.prompt})
            (folder / "README.md").write_text(card, encoding="utf-8")

        with self.writing(f"--output_dir {args.output_dir}"):
            utils.save_model(args, model, tokenizer, weights, write)
        if self.repository:
            address, line = hub.push(args, self.repository)
            print(line, file=sys.stdout if address else sys.stderr, flush=True)
            if self.wandb:
                self.wandb.summary["hub"] = address or "not pushed"

    def close(self, summary):
        """Prints the closing lines and closes every file."""
        self.close_files()
        for line in [*summary, f"curves: python benchmark/plot.py {self.folder}"]:
            self.say(line)

    def close_files(self, exit_code=0):
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        if self.bar:
            self.bar.stop()
        for file in (self.metrics_file, self.samples_file, self.tensorboard) if self.main else ():
            with contextlib.suppress(OSError):  # what it could not write has been said
                file and file.close()
        if self.wandb:
            self.wandb.finish(exit_code)

    # ---- checkpoints: whole weights and moments by name, so that a run goes on under any engine and number of processes --
    def is_checkpoint_due(self, update):
        """Whether to write one after this update: every `checkpoint_every`, at the end, and on a signal to any process."""
        self.done, every = update, self.args.checkpoint_every
        heard = torch.tensor([self.signal or 0], device=self.accelerator.device)
        self.stopping = int(self.accelerator.gather(heard).max())  # all processes must stop after the same update
        return bool(self.stopping) or (every > 0 and (update % every == 0 or update == self.num_steps))

    def checkpoint(self, update, module, optimizer, carried, pending=None):
        """Writes a checkpoint, keeps the last two, and ends the run (exit code 128 + signal) if it was told to.

        Args: module, optimizer as prepared; carried, whatever else the loop takes from one update to the next (JSON);
        pending, {name: tensor of the whole batch}. Call it on every process.
        """
        weights, moments, steps = engines.full_state(self.accelerator, module, optimizer)
        state = {"args": dataclasses.asdict(self.args), "mixed_precision": engines.precision(self.accelerator), "data": self.data}
        state |= {"update": update, "adam_steps": steps, "carried": carried, "health": self.health.memory, "latest": self.latest}
        if self.accelerator.scaler is not None:
            state["scaler"] = self.accelerator.scaler.state_dict()
        folder = self.folder / "checkpoints" / f"{update:06d}"
        if self.main:
            tensors = {"weights": weights, **moments} | ({"pending": pending} if pending else {})
            with self.writing(f"{self.folder}/checkpoints"):
                for file in (self.metrics_file, self.samples_file):  # the rows before a checkpoint last as long as it does
                    os.fsync(file.fileno())
                write_checkpoint(folder, state, tensors)
        self.accelerator.wait_for_everyone()
        self.last = folder
        if self.stopping:
            name = signal.Signals(self.stopping).name
            self.say(f"{name}: stopped after update {update}; --run_name {self.folder.name} --resume goes on")
            self.end(128 + self.stopping)

    def choose_checkpoint(self):
        """The folder to go on from, or None: the main process looks, all take the same. A line says what is damaged."""
        found = [None, [], []]
        if self.main:
            with self.writing(self.folder, "read"):
                folder, damaged = newest_checkpoint(self.folder)
            found = [str(folder) if folder else None, damaged, [] if folder else self.differences_from_log()]
        folder, damaged, differences = broadcast_object_list(found)
        for line in damaged:
            self.say(line)
        if folder is None:
            if damaged and not self.args.overwrite:
                utils.fail(f"--resume: no checkpoint in {self.folder} is whole; --overwrite starts anew")
            if differences and not self.args.overwrite:  # its log would be lost
                others = "; ".join(differences)
                utils.fail(f"--resume: {self.folder} has no checkpoint and other arguments: {others}; --overwrite starts anew")
            return None
        missing = torch.tensor([not (Path(folder) / "state.json").exists()], device=self.accelerator.device)
        if self.accelerator.gather(missing).any():
            utils.fail(f"--resume: {folder} is not seen by every process; runs/ must be on a file system that all share")
        self.check_same_run(Path(folder))
        return Path(folder)

    def differences(self, before):
        """The arguments that would change a number of the curve and are others than before, {"args": .., "mixed_precision": ..}."""
        now = {"mixed_precision": engines.precision(self.accelerator)} | json.loads(json.dumps(dataclasses.asdict(self.args)))
        before = {"mixed_precision": before["mixed_precision"]} | before["args"]
        return [
            f"{key} {before.get(key)!r} there, {now.get(key)!r} here"
            for key in before | now
            if key not in MAY_CHANGE and before.get(key) != now.get(key)
        ]

    def differences_from_log(self):
        """`differences` to the run whose log is in the folder; none where there is no log, or it is torn."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            if (self.folder / "metrics.jsonl").stat().st_size:
                return self.differences(json.loads((self.folder / "config.json").read_text()))
        return []

    def check_same_run(self, folder):
        """Ends with one line where a checkpoint is of other arguments, rows or models."""
        state = json.loads((folder / "state.json").read_text())
        if differences := self.differences(state):
            utils.fail(f"--resume: {folder} has other arguments: {'; '.join(differences)}")
        if state["data"] != self.data:
            utils.fail(
                f"--resume: {folder} had other rows than --dataset {self.args.dataset} holds now, or started from other weights"
            )

    def resume(self, module, optimizer):
        """Puts the newest whole checkpoint into module and optimizer; call it on every process, once they are prepared.

        Returns: (update that it was written after, carried, pending), as given to `checkpoint`; (0, {}, {}) for a new run.
        """
        self.done = 0
        if not self.args.resume:
            return 0, {}, {}
        folder = self.last
        if folder is None:
            self.say(f"--resume: no checkpoint in {self.folder}: starts at the beginning")
            if self.main:
                with self.writing(self.folder):
                    self.rewind(None)
            return 0, {}, {}
        state = json.loads((folder / "state.json").read_text())
        tensors = {file.stem: load_file(file) for file in folder.glob("*.safetensors")}
        pending = {name: x.to(self.accelerator.device) for name, x in tensors.pop("pending", {}).items()}
        engines.load_full_state(self.accelerator, module, optimizer, tensors, state["adam_steps"])
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.done = self.resumed_at = state["update"]
        self.health.memory, self.latest = state["health"], state["latest"]
        self.accelerator.wait_for_everyone()  # all have read it
        if self.main:
            with self.writing(self.folder):
                self.rewind(self.done)
        self.say(f"--resume: goes on after update {self.done} of {self.num_steps}, from {folder}")
        return self.done, state["carried"], pending

    # ---- how a run ends before its time --------------------------------------------------------------------------------
    def on_signal(self, number, frame):
        if number == signal.SIGINT:  # the next one ends at once; SIGTERM comes twice, from a scheduler and from the launcher
            signal.signal(number, self.handlers[number])
        self.signal = number
        self.say(f"{signal.Signals(number).name}: will stop after this update, with a checkpoint")

    @contextlib.contextmanager
    def writing(self, what, verb="written"):
        """Within it an error of the file system ends the run with one line."""
        try:
            yield
        except (OSError, SafetensorError) as e:
            self.stop(f"{getattr(e, 'filename', None) or what} cannot be {verb} ({getattr(e, 'strerror', None) or e})")

    def stop(self, message, *details):
        """Ends the run over a fault, exit code 1: what, where, and the checkpoint to go on from. Weights on disk stay."""
        if self.main:
            last = f"{self.last}; --run_name {self.folder.name} --resume goes on from it" if self.last else "none"
            print(f"error: {message}", *details, f"last good checkpoint: {last}", sep="\n  ", file=sys.stderr, flush=True)
        if self.accelerator.num_processes > 1:  # the others may wait in a collective, and leaving their group would be another
            self.close_files(1)
            sys.stdout.flush()
            os._exit(1)  # so that the launcher ends them
        self.end(1)

    def end(self, exit_code):
        self.close_files(exit_code)
        utils.leave_process_group()
        raise SystemExit(exit_code)

    def check_finite(self, what, update, values, show, rows=None, unit="episode"):
        """Stops the run where a number is not finite; call it on every process, with the same numbers.

        Args: values, a tensor [N], one number a row, or a float that all rows have made; rows, their numbers (None: 0 .. N - 1)
        and unit, what they are called; show(row), that row as text. The report names the rows and shows the first.
        """
        values = torch.as_tensor(values)
        if values.isfinite().all():
            return
        wrong = values.isfinite().logical_not().expand(len(values) if rows is None else len(rows)).nonzero().flatten().tolist()
        bad = wrong if rows is None else [int(rows[i]) for i in wrong]
        more = f" and {len(bad) - 16} more" if len(bad) > 16 else ""
        value = values.expand(len(bad)) if values.dim() == 0 else values[wrong]
        names = f"{unit}s {', '.join(map(str, bad[:16]))}{more}"
        self.stop(f"update {update}: {what} is {value[0].item()}", names, f"{unit} {bad[0]}: {show(bad[0])}")


def write_whole(path, text):
    """Writes a text file that is never seen half: to a file beside it, which takes its name once it is on disk."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text)
    utils.sync(partial)
    partial.replace(path)


def write_checkpoint(folder, state, tensors):
    """Writes state (JSON) and tensors ({file: {name: tensor}}) to a new folder, whole or not at all, and removes all but two."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        for name, content in tensors.items():
            save_file(content, partial / f"{name}.safetensors")
        (partial / "state.json").write_text(json.dumps(state, indent=1))
        files = {file.name: [file.stat().st_size, digest(file)] for file in sorted(partial.iterdir())}
        (partial / "manifest.json").write_text(json.dumps(files, indent=1))
        for path in (*partial.iterdir(), partial):
            utils.sync(path)
    except (OSError, SafetensorError):
        shutil.rmtree(partial, ignore_errors=True)  # on a full disk its room may save the older ones
        raise
    partial.rename(folder)
    utils.sync(folder.parent)
    for old in checkpoints_of(folder.parent.parent)[2:]:
        shutil.rmtree(old)


def digest(file):
    """SHA-256 of a file."""
    with open(file, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def checkpoints_of(run_folder):
    """Folders of a run's checkpoints, the newest first."""
    folders = [folder for folder in Path(run_folder).glob("checkpoints/*") if folder.name.isdecimal()]
    return sorted(folders, key=lambda folder: int(folder.name), reverse=True)


def newest_checkpoint(run_folder):
    """(folder of a run's newest whole checkpoint or None, a line on each newer one that is damaged)."""
    damaged = []
    for folder in checkpoints_of(run_folder):
        try:
            files = json.loads((folder / "manifest.json").read_text())
            files["weights.safetensors"], files["state.json"]  # an empty list would make anything whole
            wrong = [name for name, (size, sha) in files.items() if not is_whole(folder / name, size, sha)]
        except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError):  # not EIO and its like, which may pass
            wrong = ["manifest.json"]
        if not wrong:
            return folder, damaged
        damaged.append(f"--resume: {folder} is damaged ({', '.join(wrong)}): passed over")
    return None, damaged


def is_whole(file, size, sha):
    return file.is_file() and file.stat().st_size == size and digest(file) == sha
