"""
A run: what it logs, the checkpoints that it continues from, and how it ends. This is its folder:

    runs/<run_name>/config.json      arguments, versions, git commit and device, and from where the run was resumed
                    metrics.jsonl    one object an update
                    samples.jsonl    sample responses
                    events.out.*     TensorBoard
                    checkpoints/     see checkpoint.py
"""

import contextlib
import functools
import json
import platform
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import transformers
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError

from rlhf_details.plumbing import checkpoint, cli, engines, health, hub, trackers
from rlhf_details.plumbing.chat import is_messages
from rlhf_details.utils import numbers


class Run:
    """Folder, trackers and checkpoints of a run. All processes call its methods; the main process writes and prints."""

    def __init__(self, args, accelerator, tokenizer, num_updates, prompts, inputs):
        """Args: num_updates, of the whole run; prompts, data.Prompts to train on; inputs, what else decides the curve:
        first the held-out rows, then models, of which a reward model is the last.
        """
        self.args, self.accelerator, self.tokenizer, self.prompts = args, accelerator, tokenizer, prompts
        self.num_updates, self.is_main, self.start = num_updates, accelerator.is_main_process, time.time()
        self.update, self.first_update = 0, 1  # the update under way, and the first one that this process trains
        self.laps, self.tensors = {}, {}  # {name of a part of the update: seconds}; see `resume`
        # What checkpoints keep: the first eval/*, the newest row of metrics, what health.look remembers, and on
        # the main process alone `of_each_prompt` of the first and the newest evaluation.
        self.kept = {"before": {}, "latest": {}, "health": {"first": None, "said": []}, "by_prompt": []}
        self.sampled_ahead = dict  # returns what a checkpoint holds of it: {name: tensor}; overlap.py sets it
        self.inputs, self.checkpoint = inputs, None  # the folder of the newest checkpoint
        self.wandb = self.repository = self.signals = None
        self.identity = checkpoint.identity(args, accelerator, [prompts, *inputs])
        with self.writing("runs"):
            (name,) = broadcast_object_list([choose_name(args) if self.is_main else None])
        self.folder = Path("runs") / name
        self.logs = [self.folder / "metrics.jsonl", self.folder / "samples.jsonl"]
        if args.resume:
            self.checkpoint = checkpoint.find(self.folder, self.identity, args.overwrite)
        self.signals = Signals()
        if self.is_main:
            try:
                with self.writing(self.folder):
                    self.open_folder()
            except BaseException:
                self.close(1)
                with contextlib.suppress(OSError):  # A run that did not start leaves no empty folder behind.
                    self.folder.rmdir(), self.folder.parent.rmdir()
                raise
        names = "base_model", "sft_model_path", "reward_model_path", "teacher_model_path"
        paths = [getattr(args, name, None) for name in names]
        cli.say(f"models: {', '.join(filter(None, paths))}   data: {args.dataset}, {len(prompts)} rows")
        how = f"{num_updates} updates of {args.batch_size}, {engines.in_words(accelerator)}"
        if hasattr(args, "reward_fn"):  # Its held-out figures are of such samples as well.
            how += f", samples at temperature {args.temperature:g} and of at most {args.response_length} tokens"
        cli.say(how)

    # ---- the start ---------------------------------------------------------------------------------------------------
    def open_folder(self):
        """Opens the Hub's repository and the trackers before anything is trained, and writes config.json."""
        args = self.args
        self.about = describe(args, self.accelerator, self.folder) | self.identity
        if args.push_to_hub:
            self.about["hub"] = self.repository = hub.open_repository(args)
        update = int(self.checkpoint.name) if self.checkpoint else 0
        self.wandb = trackers.start(args, self.accelerator, self.folder, self.about, update)
        if self.wandb:
            self.about["wandb_id"] = self.wandb.id
        # If this folder cannot be made, this is better known now than after a day of training.
        Path(args.output_dir).resolve().parent.mkdir(parents=True, exist_ok=True)
        checkpoint.write_text(self.folder / "config.json", json.dumps(self.about, indent=1))

    def resume(self, policy, optimizer, state=None):
        """Loads the checkpoint that this run continues from, if any. Sets `first_update`, and `tensors` for overlap.py.

        Args: policy, optimizer, as prepared; state, the dictionary of the loop where a run begins. Returns: the
        dictionary of the loop, `state` or the checkpoint's. `tensors` is {} or {name: tensor on the device}.
        """
        done, state = 0, state or {}
        if self.checkpoint:
            try:
                saved, tensors = checkpoint.read(self.checkpoint)
                checkpoint.load_policy(self.accelerator, policy, optimizer, self.checkpoint)
            except (OSError, RuntimeError, SafetensorError) as e:
                damaged, self.checkpoint = self.checkpoint, next(iter(checkpoint.all_of(self.folder)[1:]), None)
                self.stop(f"{damaged} cannot be read ({e}); remove this folder")
            self.tensors = {name: x.to(self.accelerator.device) for name, x in tensors.items()}
            if self.accelerator.scaler is not None:
                self.accelerator.scaler.load_state_dict(saved["scaler"])
            done, state, self.kept = saved["update"], saved["state"], {name: saved[name] for name in self.kept}
            self.start -= saved["seconds"]
            cli.say(f"--resume: goes on after update {done} of {self.num_updates}, from {self.checkpoint}")
        elif self.args.resume:
            cli.say(f"--resume: no checkpoint in {self.folder}: starts at the beginning")
        self.accelerator.wait_for_everyone()  # All processes have read the checkpoint.
        if self.is_main:
            with self.writing(self.folder):
                checkpoint.cut(self.folder, done)
                for path in self.logs:
                    trackers.cut(path, done)
        self.first_update, self.begun = done + 1, time.time()
        self.shown = self.begun
        self.begin_update(self.first_update)
        return state

    # ---- every update ------------------------------------------------------------------------------------------------
    def begin_update(self, update):
        self.update, self.laps, self.lap_start = update, {}, time.time()

    def lap(self, name):
        """Logs `time/<name>`: the seconds since the last lap, or since the update began."""
        now = time.time()
        self.laps[name], self.lap_start = now - self.lap_start, now

    def is_eval_due(self, update):
        """Whether to evaluate after this update: at the end, and every --eval_every updates."""
        every = getattr(self.args, "eval_every", 0)
        return update == self.num_updates or (every > 0 and update % every == 0)

    def log(self, update, metrics, samples=None):
        """Writes one row of metrics everywhere, says what looks unhealthy in it, and shows samples where these are due.

        Args: update, 0 before training; metrics, {name: number or tensor of one number}, where {} logs nothing;
        samples, None or (list of N prompts, responses and their mask [N, R], ended, scores and kl [N]).
        """
        if not metrics:
            return
        metrics = numbers(metrics)
        row = {"update": update, "episode": update * self.args.batch_size} | metrics
        if update:
            row |= self.times()
            row |= health.look(self, row, samples)
        self.kept |= {"latest": row, "before": self.kept["before"] or trackers.evaluated(row)}
        if self.is_main:
            with self.writing(self.folder):
                self.write(row, samples)
        if update == 0:
            self.begin_update(1)  # The first update's time does not include this evaluation.

    def times(self):
        """Seconds of the laps, which make up the update where there are any, and episodes a second."""
        now, laps = time.time(), {f"time/{name}": seconds for name, seconds in self.laps.items()}
        update = sum(laps.values()) if laps else now - self.lap_start
        training = {"time/training": update - laps["time/rollout"]} if "time/rollout" in laps else {}
        eps = self.args.batch_size / max(update, 1e-9)
        return {"eps": eps} | laps | training | {"time/update": update, "time/from_scratch": now - self.start}

    def write(self, row, samples):
        """Writes a row, and samples where these are due, to files, trackers and terminal."""
        (metrics, tables), update, now = self.logs, row["update"], time.time()
        trackers.append(metrics, [row])
        # openrlbenchmark reads global_step.
        self.accelerator.log(row | {"global_step": row["episode"]}, step=row["episode"])
        # A line about every fifth second, and in a long run down to one a minute.
        if update in (1, self.num_updates) or now - self.shown > max(5, min(60, (now - self.start) / 600)):
            left = (now - self.begun) / max(1, update - self.first_update + 1) * (self.num_updates - update)
            cli.say(f"{update}/{self.num_updates}  {trackers.in_words(row)}  eta {left:.0f}s")
            self.shown = now
        if samples and trackers.evaluated(row):  # Then the samples are of the held-out rows.
            self.kept["by_prompt"][1:] = [health.of_each_prompt(self.tokenizer, *samples)]
        count = getattr(self.args, "num_sample_generations", 0)  # spread evenly from the first to the last update
        if samples and update in torch.linspace(1, self.num_updates, count).round().int().tolist():
            rows = trackers.sample_rows(self.args, self.tokenizer, row, *samples)
            trackers.append(tables, [{"update": update} | sample for sample in rows])
            trackers.show(f"samples of update {update}", rows)
            if self.wandb:
                table = dict(columns=list(rows[0]), data=[list(sample.values()) for sample in rows])
                self.accelerator.get_tracker("wandb").log_table("samples", **table, step=row["episode"])

    # ---- checkpoints -------------------------------------------------------------------------------------------------
    def checkpoint_if_due(self, update, policy, optimizer, state=None):
        """Writes a checkpoint every --checkpoint_every updates and at the end, or on a signal, which then ends the run.

        Args: policy, optimizer, as prepared; state, what the loop takes to the next update, as JSON holds it.
        """
        heard = torch.full((1,), self.signals.heard, device=self.accelerator.device)
        number = int(self.accelerator.gather(heard).max())  # All processes must stop after the same update.
        every = self.args.checkpoint_every
        if number or (every > 0 and (update % every == 0 or update == self.num_updates)):
            self.write_checkpoint(update, policy, optimizer, state or {})
        if number:
            name = signal.Signals(number).name
            cli.say(f"{name}: stopped after update {update}; --run_name {self.folder.name} --resume goes on")
            self.end(128 + number)
        self.begin_update(update + 1)

    def write_checkpoint(self, update, policy, optimizer, state):
        saved = {"update": update, "state": state, "seconds": time.time() - self.start} | self.kept | self.identity
        if self.accelerator.scaler is not None:
            saved["scaler"] = self.accelerator.scaler.state_dict()
        tensors = {name: x.detach().cpu().contiguous() for name, x in self.sampled_ahead().items()}
        folder = self.folder / "checkpoints" / f"{update:06d}"
        save_policy = functools.partial(checkpoint.save_policy, self.accelerator, policy, optimizer)
        with self.writing(folder.parent):
            for path in self.logs if self.is_main else ():  # Their rows last as long as the checkpoint.
                checkpoint.sync(path)
            checkpoint.write(self.accelerator, folder, saved, tensors, save_policy)
        self.accelerator.wait_for_everyone()
        self.checkpoint = folder

    # ---- the end -----------------------------------------------------------------------------------------------------
    def full_weights(self, module):
        """{name: whole fp32 weight} of a prepared module, on the main process's CPU; call it on every process."""
        return engines.full_weights(self.accelerator, module)

    def finish(self, policy, weights=None, model=None):
        """Saves --output_dir with a model card, uploads it where asked to, judges the run, and says what to type next.

        Args: model and weights, where they are not the policy's own: a transformers model, and {name: whole tensor} of
        a module that holds it as `model`. Returns: {"before": .., "after": .., "metrics": the last row, "run": folder}.
        """
        model = model or self.accelerator.unwrap_model(policy).model
        weights = self.full_weights(policy) if weights is None else weights
        if self.is_main:
            if self.args.lora_rank:  # Adapters are merged into a model of its own, which no engine has changed.
                config, model = model.config, engines.filled(policy, weights).model
                model.config = config
            weights = {name.removeprefix("model."): x for name, x in weights.items() if name.startswith("model.")}
            self.save(model, weights)
        self.accelerator.wait_for_everyone()
        if self.repository:  # No other process waits for the upload.
            address = hub.push(self.args, self.repository)
            if self.wandb:
                self.wandb.summary["hub"] = address or "not pushed"
        self.close()
        before, latest = self.kept["before"], self.kept["latest"]
        after = trackers.evaluated(latest)
        if self.is_main:
            cli.say("\n".join(health.last_lines(self, before, after, time.time() - self.start)))
        return {"before": before, "after": after, "metrics": latest, "run": str(self.folder)}

    def save(self, model, weights):
        args, prompt = self.args, self.prompts[0].columns.get("prompt")
        about = self.about | {"prompt": prompt if is_messages(prompt) else self.prompts[0].text}
        link = self.wandb and self.wandb.url
        card = hub.model_card(args, self.repository, self.kept["before"], self.kept["latest"], link, about)
        with self.writing(f"--output_dir {args.output_dir}"):
            checkpoint.save_folder(args, model, self.tokenizer, weights, card)

    @contextlib.contextmanager
    def writing(self, what):
        """Within it an error of the file system, such as a full disk, ends the run with one line."""
        try:
            yield
        except (OSError, SafetensorError) as e:
            path = getattr(e, "filename", None) or what
            self.stop(f"{path} cannot be written ({getattr(e, 'strerror', None) or e})")

    def stop(self, message):
        """Ends the run over a fault with exit code 1: what happened, and the checkpoint to continue from."""
        if self.is_main:
            last = self.checkpoint and f"{self.checkpoint}; --run_name {self.folder.name} --resume goes on from it"
            print(f"error: {message}\n  last good checkpoint: {last or 'none'}", file=sys.stderr, flush=True)
        self.end(1)

    def end(self, exit_code):
        """Closes everything and ends this process."""
        self.close(exit_code)
        cli.leave(exit_code)

    def close(self, exit_code=0):
        """Closes the trackers and gives the signals their former meaning."""
        if self.signals:
            self.signals.restore()
        if self.wandb:
            self.wandb.finish(exit_code)
        for tracker in self.accelerator.trackers:
            # What could not be written has been reported already. A tracker that never started has nothing to finish.
            with contextlib.suppress(OSError, AttributeError):
                tracker.finish()


# ---- the folder of a run ---------------------------------------------------------------------------------------------
def choose_name(args):
    """The run's name: as given, with --resume that of the run that goes on, or a new one."""
    if args.run_name is not None:
        return args.run_name
    if folder := cli.folder_to_resume(args):
        return folder.name
    name = f"{cli.experiment(args)}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
    while True:
        try:
            (Path("runs") / name).mkdir(parents=True)
            return name
        except FileExistsError:  # Another run of a sweep started in the same second.
            name += "_"


def describe(args, accelerator, folder):
    """Versions, git commit, device and engine of a run, and from where it is resumed, as a dictionary."""
    versions = dict(python=platform.python_version(), torch=torch.__version__, transformers=transformers.__version__)
    about = dict(run=str(folder), versions=versions, commit=trackers.git("rev-parse", "HEAD"), resumed=[])
    about |= dict(device=str(accelerator.device), num_processes=accelerator.num_processes)
    about["engine"] = engines.name(accelerator)
    config = folder / "config.json"
    if args.resume and config.exists():
        before = json.loads(config.read_text())
        about["resumed"] = [*before["resumed"], {key: before[key] for key in ("commit", "num_processes")}]
        about["wandb_id"] = before.get("wandb_id")
    return about


# ---- SIGTERM and SIGINT (Ctrl-C): a run ends after the update under way, and with a second SIGINT at once ------------
class Signals:
    """Remembers the last signal in `heard` (0: none), until `restore` gives the signals their former meaning."""

    def __init__(self):
        self.heard = 0
        is_main_thread = threading.current_thread() is threading.main_thread()  # Python allows handlers there alone.
        numbers = (signal.SIGTERM, signal.SIGINT) if is_main_thread else ()
        self.before = {number: signal.signal(number, self.hear) for number in numbers}

    def hear(self, number, frame):
        if number == signal.SIGINT:  # SIGTERM may come twice by itself, from a scheduler and from the launcher.
            signal.signal(number, self.before[number])
        self.heard = number
        cli.say(f"{signal.Signals(number).name}: will stop after this update, with a checkpoint")

    def restore(self):
        for number, handler in self.before.items():
            signal.signal(number, handler)
