"""
A run: what it logs, the checkpoints that it continues from, and how it ends. This is its folder:

    runs/<run_name>/config.json      arguments, versions, git commit and device
                    metrics.jsonl    one object an update
                    samples.jsonl    sample responses
                    events.out.*     TensorBoard
                    lock             held while the run goes on
                    checkpoints/     see checkpoint.py
"""

import contextlib
import fcntl
import glob
import itertools
import json
import os
import signal
import threading
import time
from pathlib import Path

import torch
from accelerate.utils import broadcast_object_list, gather_object
from safetensors import SafetensorError

from rlhf_details.plumbing import console
from rlhf_details.plumbing.inputs import cli, flags
from rlhf_details.plumbing.machine import engines
from rlhf_details.plumbing.outputs import atomic, checkpoint, health, hub, model_folder, trackers, verdict


class Run:
    """Folder, trackers and checkpoints of a run. All processes call its methods; the main process writes and prints."""

    def __init__(self, args, accelerator, tokenizer, num_updates, prompts, inputs):
        """Args: num_updates, of the whole run; prompts, data.Prompts to train on; inputs, what else decides the curve:
        first the held-out rows, then models, of which a reward model is the last.
        """
        self.args = args
        self.accelerator = accelerator
        self.tokenizer = tokenizer
        self.num_updates = num_updates
        self.is_main = accelerator.is_main_process
        self.start = time.monotonic()
        self.update = 0  # the one under way
        self.first_update = 1  # that this process trains
        self.laps = {}  # {"time/<part of the update>": seconds}
        self.tensors = {}  # see `resume`
        # What checkpoints keep: the first eval/*, the newest row of metrics, for health.look the first row and
        # the signs that it has named, and on the main process `of_each_prompt` of the first and the newest evaluation.
        self.kept = {"before": {}, "latest": {}, "first": {}, "said": [], "by_prompt": []}
        self.sampled_ahead = dict  # returns what a checkpoint holds of it: {name: tensor}; samplers.py sets it
        self.inputs = inputs
        self.heard = 0  # a signal
        self.handlers = {}  # {signal: former handler}
        self.wandb = self.repository = self.lock = self.folder = None
        self.checkpoint = None  # the folder of the newest one
        self.identity = checkpoint.identity(args, accelerator, [prompts, *inputs])
        if self.is_main:
            cli.check_output_dir(args)
            self.output = model_folder.listing(args)  # what may be replaced at the end
            if args.push_to_hub:
                self.repository = hub.open_repository(args)
            with self.writing("runs"):
                self.folder = make_folder(args)
                self.lock = lock(self.folder)
        (self.folder,) = broadcast_object_list([self.folder])
        self.logs = [self.folder / "metrics.jsonl", self.folder / "samples.jsonl"]
        before = console.read_json(self.folder / "config.json", "--resume") if args.resume else {}
        if args.resume:
            self.checkpoint = checkpoint.find(self.folder, before, self.identity)
        if self.is_main:
            with self.writing(self.folder):
                self.open_folder(before.get("wandb_id"), prompts)
        how = f"{len(prompts)} rows, {num_updates} updates of {args.batch_size}, {engines.in_words(accelerator)}"
        if hasattr(args, "reward_fn"):  # Its held-out figures are of such samples as well.
            how += f", samples at temperature {args.temperature:g} and of at most {args.response_length} tokens"
        console.say(how)

    # ---- the start ---------------------------------------------------------------------------------------------------
    def open_folder(self, wandb_id, prompts):
        """Opens the trackers before anything is trained, and writes config.json. wandb_id: of the run to continue."""
        args = self.args
        accelerator = self.accelerator
        about = self.identity | engines.about(accelerator)
        about |= {
            "run": str(self.folder),
            "commit": trackers.git("rev-parse", "HEAD"),
            "engine": engines.name(accelerator),
            "hub": self.repository,
            "wandb_id": wandb_id,
        }
        update = int(self.checkpoint.name) if self.checkpoint else 0
        self.wandb = trackers.start(args, accelerator, self.folder, about, update, prompts)
        if self.wandb:
            about["wandb_id"] = self.wandb.id
        if not self.checkpoint:
            checkpoint.clean(self.folder)
            if left := checkpoint.all_of(self.folder):  # It would be taken for this run's.
                raise OSError(f"{left[0]} cannot be removed")
        for path in self.logs:
            trackers.cut_rows(path, update)
        atomic.write_text(self.folder / "config.json", json.dumps(about, indent=1))
        self.about = about

    def resume(self, policy, optimizer, state=None):
        """Tries the last save, and loads the checkpoint that this run continues from, if any. Sets `first_update`, and
        `tensors` for samplers.py.

        Args: policy, optimizer, as prepared; state, the dictionary of the loop where a run begins. Returns: the
        dictionary of the loop, `state` or the checkpoint's. `tensors` is {} or {name: tensor on the device}.
        """
        if self.is_main:
            config = self.accelerator.unwrap_model(policy).model.config
            with self.writing(f"--output_dir {self.args.output_dir}: what the end writes there", Exception):
                card = hub.model_card(self.args, {}, {}, self.about, None)
                model_folder.try_out(self.args, config, self.tokenizer, card)
        if self.checkpoint:
            saved = checkpoint.read(self, policy, optimizer)
            state = saved["state"]
            self.tensors = saved["tensors"]
            self.kept = {name: saved[name] for name in self.kept}
            self.first_update = saved["update"] + 1
            self.start -= saved["seconds"]
            console.say(
                f"--resume: goes on after update {saved['update']} of {self.num_updates}, from {self.checkpoint}"
            )
        elif self.args.resume:
            console.say(f"--resume: no checkpoint in {self.folder}: starts at the beginning")
        with contextlib.suppress(ValueError):  # Python sets handlers in the main thread alone.
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
                # nohup has SIGHUP ignored, and the user's code may have taken either of the last two.
                is_free = signal.getsignal(number) == signal.SIG_DFL or hears(number)
                if is_free or number in (signal.SIGTERM, signal.SIGINT):
                    self.handlers[number] = signal.signal(number, self.hear)
        self.begun = self.shown = time.monotonic()
        self.begin_update(self.first_update)
        return state or {}

    # ---- every update ------------------------------------------------------------------------------------------------
    def begin_update(self, update):
        self.update = update
        self.laps = {}
        self.lap_start = time.monotonic()

    def lap(self, name):
        """Logs `time/<name>`: the seconds since the last lap, or since the update began."""
        now = time.monotonic()
        self.laps[f"time/{name}"] = now - self.lap_start
        self.lap_start = now

    def is_eval_due(self, update):
        """Whether to evaluate after this update: at the end, and every --eval_every updates."""
        every = getattr(self.args, "eval_every", 0)
        return update == self.num_updates or (every > 0 and update % every == 0)

    def log(self, update, metrics=None, samples=None, evaluation=None):
        """Writes one row of metrics everywhere, says what looks unhealthy in it, and shows samples where these are due.

        Args: update, 0 before training; metrics, {name: number or tensor of one number}, where none log nothing;
        samples, None or (list of N prompts, responses and their mask [N, R], ended, scores and kl [N], and of
        trajectories the action_mask [N, R]); evaluation, a function of nothing that returns such metrics and samples
        of the held-out rows. Where there are any and it is due, its metrics are added, and its samples shown.
        """
        held_out = self.inputs[0]
        if evaluation and held_out and (update == 0 or self.is_eval_due(update)):
            found, samples = evaluation()
            metrics = (metrics or {}) | found
        if not metrics:
            return
        row = {"update": update, "episode": update * self.args.batch_size}
        row |= {name: x.item() if isinstance(x, torch.Tensor) else x for name, x in metrics.items()}
        if update:
            row |= self.times()
            row |= health.look(self, row)
        self.kept |= {"latest": row, "before": self.kept["before"] or trackers.evaluated(row)}
        if self.is_main:
            with self.writing(self.folder):
                self.write(row, samples)
        if update == 0:
            self.begin_update(1)  # The first update's time does not include this evaluation.

    def times(self):
        """Seconds of the laps, which make up the update where there are any, and episodes a second."""
        now = time.monotonic()
        laps = self.laps
        update = sum(laps.values()) if laps else now - self.lap_start
        training = {"time/training": update - laps["time/rollout"]} if "time/rollout" in laps else {}
        eps = self.args.batch_size / max(update, 1e-9)
        return {"eps": eps} | laps | training | {"time/update": update, "time/from_scratch": now - self.start}

    def write(self, row, samples):
        """Writes a row, and samples where these are due, to files, trackers and terminal."""
        metrics, tables = self.logs
        update = row["update"]
        now = time.monotonic()
        trackers.append_rows(metrics, [row])
        trackers.log(self.accelerator, row)
        if update in (1, self.num_updates) or now - self.shown > 5:
            left = (now - self.begun) / max(1, update - self.first_update + 1) * (self.num_updates - update)
            console.say(f"{update}/{self.num_updates}  {trackers.in_words(row)}  eta {left:.0f}s")
            self.shown = now
        if samples and trackers.evaluated(row):  # Then the samples are of the held-out rows.
            self.kept["by_prompt"][1:] = [verdict.of_each_prompt(self.tokenizer, *samples)]
        count = getattr(self.args, "num_sample_generations", 0)  # spread evenly from the first to the last update
        if samples and update in torch.linspace(1, self.num_updates, count).round().int().tolist():
            rows = trackers.sample_rows(self.args, self.tokenizer, row, *samples)
            trackers.append_rows(tables, [{"update": update} | sample for sample in rows])
            trackers.print_rows(f"samples of update {update}", rows)
            if self.wandb:
                trackers.log_table(self.accelerator, "samples", rows, row["episode"])

    def checkpoint_if_due(self, update, policy, optimizer, state=None):
        """Writes a checkpoint every --checkpoint_every updates and at the end, or on a signal, which then ends the run.

        Args: policy, optimizer, as prepared; state, what the loop takes to the next update, as JSON holds it.
        """
        number = max(gather_object([self.heard]))  # All processes must stop after the same update.
        every = self.args.checkpoint_every
        if number or (every > 0 and (update % every == 0 or update == self.num_updates)):
            with self.writing(self.folder / "checkpoints"):
                self.checkpoint = checkpoint.write(self, update, policy, optimizer, state or {})
        if number:
            name = signal.Signals(number).name
            console.say(f"{name}: stopped after update {update}; --run_name {self.folder.name} --resume goes on")
            self.end(128 + number)
        self.begin_update(update + 1)

    def hear(self, number, frame):
        """Lets a signal end the run after the update under way. A second SIGINT (Ctrl-C) acts at once."""
        if number == signal.SIGINT:  # SIGTERM may come twice by itself, from a scheduler and from the launcher.
            signal.signal(number, signal.default_int_handler)
        self.heard = number
        with contextlib.suppress(RuntimeError):  # Another print is under way, perhaps into a terminal that waits.
            console.say(f"{signal.Signals(number).name}: will stop after this update, with a checkpoint")

    # ---- the end -----------------------------------------------------------------------------------------------------
    def full_weights(self, module):
        """{name: whole fp32 weight} of a prepared module, on the main process's CPU; call it on every process."""
        weights = self.accelerator.get_state_dict(module)  # Under ZeRO-3 it is None on the other processes.
        return {name: x.cpu() for name, x in weights.items()} if self.is_main else {}

    def finish(self, policy, weights=None):
        """Saves --output_dir with a model card, uploads it where asked to, judges the run, and says what to type next.

        Args: policy, as prepared; weights, where they are not the policy's own. Returns: {"before": .., "after": ..,
        "metrics": the last row, "run": folder}.
        """
        args = self.args
        weights = self.full_weights(policy) if weights is None else weights
        before = self.kept["before"]
        latest = self.kept["latest"]
        if self.is_main:
            model = engines.filled(policy, weights).model  # a model of its own, which no engine has changed
            model.config = self.accelerator.unwrap_model(policy).model.config
            model.tie_weights()  # FSDP2 has untied a head that is the embedding. Tied, the library saves it once.
            what = f"--output_dir {args.output_dir}"
            address = self.wandb and self.wandb.url
            with self.writing(what):
                folder = model_folder.save_weights(args, model, self.tokenizer, self.folder.name)
            with self.writing(f"{what}: the weights are in {folder}, but what belongs to them", Exception):
                card = hub.model_card(args, before, latest, self.about, address)
                model_folder.save_words(args, self.tokenizer, card, folder)
                args.output_dir = model_folder.put(args, folder, self.output)
        (args.output_dir,) = broadcast_object_list([args.output_dir])
        if self.repository:  # No other process waits for the upload.
            hub.push(args, self.repository)
        self.close()
        after = trackers.evaluated(latest)
        console.say("\n".join(verdict.last_lines(self, before, after, time.monotonic() - self.start)))
        return {"before": before, "after": after, "metrics": latest, "run": str(self.folder)}

    @contextlib.contextmanager
    def writing(self, what, errors=(OSError, SafetensorError)):
        """Within it an error of the file system, such as a full disk, ends the run with one line."""
        try:
            yield
        except errors as e:
            self.stop(f"{what} cannot be written ({console.in_one_line(e)})")

    def stop(self, message):
        """Ends the run over a fault with exit code 1: what happened, and the checkpoint to continue from."""
        last = "none"
        if self.checkpoint and self.checkpoint.exists():
            last = f"{self.checkpoint}; --run_name {self.folder.name} --resume goes on from it"
        console.complain(f"{message}\n  last good checkpoint: {last}")
        self.end(1)

    def end(self, exit_code):
        """Closes everything and ends this process."""
        self.close()
        console.leave(exit_code)

    def close(self):
        """Closes the trackers and gives the signals their former meaning."""
        with contextlib.suppress(ValueError):  # The thread of --overlap may end a run as well.
            for number, handler in self.handlers.items():
                signal.signal(number, handler)
        trackers.to_each(self.accelerator, lambda tracker: tracker.finish())
        if self.lock:
            self.lock.close()


def hears(number):
    """Whether a Run of this process hears a signal, perhaps one that has failed."""
    return getattr(signal.getsignal(number), "__func__", None) is Run.hear


FORK = threading.local()


def hold_sigterm():
    """Keeps SIGTERM waiting while a process is forked: a child that has not yet begun would forget it."""
    FORK.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def free_parent():
    """Hears SIGTERM again."""
    signal.pthread_sigmask(signal.SIG_SETMASK, FORK.mask)


def free_child():
    """Lets SIGTERM end a process that the user's code has forked, as pools of processes rely on.

    A SIGTERM to the run's group, such as torchrun's, does not reach it: a pool without its workers would wait for ever.
    """
    if hears(signal.SIGTERM):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, FORK.mask)


# It cannot be undone, and changes nothing where no run is under way.
os.register_at_fork(before=hold_sigterm, after_in_parent=free_parent, after_in_child=free_child)


# ---- the folder of a run ---------------------------------------------------------------------------------------------
def make_folder(args):
    """Makes the run's folder and returns it. Its name is the given one, or with --resume that of the newest run of this
    kind, or a new one, which no other run has that starts in this second."""
    kind = f"{flags.experiment(args)}__{args.seed}__"
    now = time.strftime("%Y%m%d-%H%M%S")
    started = [path.name for path in Path("runs").glob(f"{glob.escape(kind)}[0-9]*")] if args.resume else []
    given = args.run_name or max(started, default=None)
    for number in itertools.count(1):
        folder = Path("runs", given or f"{kind}{now}-{number}".removesuffix("-1"))
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True, exist_ok=bool(given))
            return folder


def lock(folder):
    """The file by which this process holds a run's folder until it ends. Processes that it starts do not hold it."""
    file = open(folder / "lock", "w")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        console.fail(f"--run_name {folder.name}: a run that has not ended writes into {folder}; give another name")
    except OSError as e:
        console.say(f"warning: {file.name}: {console.in_one_line(e)}; a second run in {folder} would not be noticed")
    return file
