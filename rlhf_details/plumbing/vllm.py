"""
vLLM as the sampler (--sampler vllm), in the place of `utils.sample`: it takes the same arguments and returns the same.

An engine runs in a process of its own beside each training process and on its device, or one server serves all
(--vllm_server). Before each rollout it is given the policy's weights, and the log-probs of the first tokens that it
returns are compared with the training forward. Otherwise weights that were not pushed, such as a tied head, would
sample from another policy, and nothing would say so. What rounding leaves, `utils.correct_for_sampler` makes up for.
"""

import contextlib
import copy
import functools
import json
import os
import shutil
import signal
import tempfile
import urllib.request
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file

from rlhf_details import utils
from rlhf_details.plumbing import cli, engines, models

# How far the mean log-prob of the first tokens may be from the training forward's. In fp32 1e-5 was measured, and 0.2
# where the head was not pushed.
BOUNDS = {"fp32": 1e-3, "bf16": 0.1, "fp16": 0.1}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PROCESSED = "--logprobs-mode processed_logprobs"  # Without it a server's log-probs are those before the temperature.
CHECKED = slice(0, 4), slice(0, 16)  # rows and tokens of a response that are compared
LAUNCHER = "RANK LOCAL_RANK GROUP_RANK ROLE_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()


def sampler(args, accelerator, rows, stop):
    """What samples in a run: utils.sample, or for --sampler vllm a function with the same arguments and results.

    Args: rows, all prompts that will be sampled from (data.Prompt); stop, ends the run with a message.
    """
    if args.sampler == "own":
        return utils.sample
    precision = engines.precision(accelerator)
    if args.vllm_server:
        engine = Server(args.vllm_server, args.vllm_folder, accelerator, stop)
    else:
        engine = Engine(accelerator, max(len(row.ids) for row in rows) + args.response_length, args.vllm_memory)
    return functools.partial(sample, engine, precision, stop)


@torch.no_grad()
def sample(engine, precision, stop, policy, queries, query_mask, rows, n, response_length, stop_ids, key, size):
    """As utils.sample. n and size do not matter: vLLM finds which rows share a prompt, and how many it has room for."""
    own = getattr(policy, "module", policy)  # out of DDP's wrapper
    prompts = [query[m].tolist() for query, m in zip(queries, query_mask, strict=True)]
    seeds = [int(row_key) % 2**32 for row_key in utils.keys_of_rows(key, rows)]
    try:
        engine.push(own.model, DTYPES[precision])
        # The sampled distribution is the trained one: no top-k, no top-p, no penalties, no generation_config.
        settings = {"temperature": own.temperature, "max_tokens": response_length, "logprobs": 0, "detokenize": False}
        if surplus := range(models.num_tokens(own.model), own.model.config.get_text_config().vocab_size):
            settings["logit_bias"] = dict.fromkeys(surplus, -100.0)  # These stand for no token: e^-100 is none.
        settings |= {"ignore_eos": True, "stop_token_ids": stop_ids.tolist()}
        answers = engine.generate(prompts, [settings | {"seed": seed} for seed in seeds])
    except (OSError, RuntimeError) as e:
        stop(f"--sampler vllm: {engine.name} failed ({e})")
    responses = torch.zeros(len(rows), response_length, dtype=torch.long)
    mask, logprobs = responses.bool(), responses.float()
    for i, (ids, values) in enumerate(answers):
        responses[i, : len(ids)], logprobs[i, : len(ids)] = torch.tensor(ids), torch.tensor(values)
        mask[i, : len(ids)] = True
    responses, mask, logprobs = (x.to(queries.device) for x in (responses, mask, logprobs))
    gap, untempered = mean_gaps(policy, queries, query_mask, responses, mask, logprobs)
    if untempered < gap / 2:  # In bf16 the bound alone would let this pass, and every weight would be wrong.
        problem = f"a temperature of 1, {own.temperature:g} was asked for"
        stop(f"--sampler vllm: {engine.name} gives log-probs at {problem}: start it with {PROCESSED}")
    if not gap <= BOUNDS[precision]:
        problem = f"its log-probs are {gap:.2g} from the policy's, and at most {BOUNDS[precision]:g} is rounding"
        stop(f"--sampler vllm: {engine.name} does not have the weights that were pushed: {problem}")
    return responses, mask, logprobs


def mean_gaps(policy, queries, query_mask, responses, mask, logprobs):
    """Mean distances of the first tokens' log-probs from the policy's own forward, at its temperature and at 1."""
    few, first = CHECKED
    queries, query_mask = queries[few], query_mask[few]
    responses, mask, logprobs = (x[few, first] for x in (responses, mask, logprobs))
    every = torch.cat([query_mask, mask], 1)
    index = torch.arange(mask.size(1), device=mask.device) + queries.size(1) - 1
    logits = policy(torch.cat([queries, responses], 1), every, utils.positions_from_mask(every), index)
    tables = (factor * logits for factor in (1, getattr(policy, "module", policy).temperature))
    own = (table.log_softmax(-1).gather(-1, responses.unsqueeze(-1)).squeeze(-1) for table in tables)
    return [float(utils.masked_mean((x - logprobs).abs(), mask)) for x in own]


def weights_of(model):
    """{name: weight} as vLLM loads them: adapters merged, and a tied head under its own name as well."""
    return (models.merge_adapters(copy.deepcopy(model)) if hasattr(model, "lora") else model).state_dict()


# ---- an engine beside this process -----------------------------------------------------------------------------------
class Engine:
    """vLLM in a process of its own, since it changes torch's threads and some classes of transformers.

    In that process it runs without another one. So it schedules the same rows alike, and a run repeats itself.
    """

    name = "vLLM's process"

    def __init__(self, accelerator, length, memory):
        self.accelerator, self.length, self.memory = accelerator, length, memory
        self.config = self.process = None

    def push(self, model, dtype):
        """Gives the engine the model's weights. It starts the engine for the first model of a configuration."""
        if self.config != config_of(model):
            self.start(model, dtype)
        for weight, place in zip(weights_of(model).values(), self.shared, strict=True):
            place.copy_(weight)
        self.ask("push")

    def generate(self, prompts, settings):
        """[(token ids, log-probs)]. Args: prompts, lists of ids; settings, for each a dictionary of SamplingParams."""
        return self.ask(prompts, settings)

    def start(self, model, dtype):
        if self.process:
            self.process.kill()
        self.config, device = config_of(model), self.accelerator.device
        shapes = [(name, weight.shape) for name, weight in weights_of(model).items()]
        # One piece of memory that both processes see. Its parts are the weights.
        flat = torch.empty(sum(shape.numel() for _, shape in shapes), dtype=dtype).share_memory_()
        self.shared = parts(flat, shapes)
        with tempfile.TemporaryDirectory() as folder:
            model.config.save_pretrained(folder)
            options = {"model": folder, "load_format": "dummy", "skip_tokenizer_init": True, "dtype": dtype}
            options |= {"max_model_len": self.length, "logprobs_mode": "processed_logprobs"}
            options |= {"generation_config": "vllm", "disable_log_stats": True}
            environ = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
            if device.type == "cuda":
                visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
                index = torch.cuda.current_device() if device.index is None else device.index
                environ["CUDA_VISIBLE_DEVICES"] = visible[index] if visible != [""] else str(index)
                options |= {"gpu_memory_utilization": self.memory, "enable_sleep_mode": True}
            else:
                environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # It would bind this process's threads elsewhere.
                environ |= {"VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")}  # GiB
                options["enforce_eager"] = True
            context = torch.multiprocessing.get_context("spawn")
            self.pipe, theirs = context.Pipe()
            arguments = theirs, flat, shapes, options, environ
            self.process = context.Process(target=serve, args=arguments, daemon=True)
            self.process.start()
            theirs.close()  # Otherwise this end would never learn that the process has ended.
            cli.say("starting vLLM, which takes a minute or two")
            version = self.answer()
            cli.say(f"vLLM {version} samples on {device}, in {str(dtype).removeprefix('torch.')}")

    def ask(self, *task):
        self.pipe.send(task)
        return self.answer()

    def answer(self):
        try:
            found, error = self.pipe.recv()
        except EOFError:
            self.process.join()
            raise RuntimeError(f"it ended with exit code {self.process.exitcode}") from None
        if error:
            raise RuntimeError(error)
        return found


def config_of(model):
    """What an engine depends on. Models that were trained from one another differ in their paths."""
    return model.config.to_dict() | {"_name_or_path": None}


def parts(flat, shapes):
    """Views of a flat tensor, of shapes [(name, shape)]."""
    pieces = flat.split([shape.numel() for _, shape in shapes])
    return [piece.view(shape) for piece, (_, shape) in zip(pieces, shapes, strict=True)]


def serve(pipe, flat, shapes, options, environ):
    """The engine's process. It ends with the training process, whose end closes the pipe."""
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C lets the trainer finish its update, for which it may sample.
    for name in LAUNCHER:  # vLLM is a group of its own.
        os.environ.pop(name, None)
    os.environ |= environ
    with contextlib.suppress(EOFError, BrokenPipeError):
        try:
            import vllm

            llm, sleeps = vllm.LLM(**options), options.get("enable_sleep_mode")
            pipe.send((vllm.__version__, None))
            while True:
                task = pipe.recv()
                if task == ("push",):
                    if sleeps:  # Between rollouts the training process has the memory of weights and cache.
                        llm.wake_up(tags=["weights"])
                    weights = zip((name for name, _ in shapes), parts(flat, shapes), strict=True)
                    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
                    if sleeps:
                        llm.wake_up(tags=["kv_cache"])
                    llm.reset_prefix_cache()  # What is in it was computed with the weights before.
                    pipe.send((None, None))
                else:
                    prompts = [{"prompt_token_ids": ids} for ids in task[0]]
                    settings = [vllm.SamplingParams(**given) for given in task[1]]
                    answers = [x.outputs[0] for x in llm.generate(prompts, settings, use_tqdm=False)]
                    if sleeps:
                        llm.sleep(level=2)
                    found = [
                        (list(x.token_ids), [y[i].logprob for i, y in zip(x.token_ids, x.logprobs, strict=True)])
                        for x in answers
                    ]
                    pipe.send((found, None))
        except (EOFError, BrokenPipeError):
            raise
        except Exception as e:  # vLLM may fail in any way, and the training process then says why in one line.
            pipe.send((None, f"{type(e).__name__}: {e}"))


# ---- one server for all processes ------------------------------------------------------------------------------------
class Server:
    """`vllm serve` at a URL, which reads the weights from a folder that it shares with the main process."""

    def __init__(self, url, folder, accelerator, stop):
        self.url, self.accelerator, self.name = url.rstrip("/"), accelerator, f"the server at {url}"
        self.folder = Path(folder) / f"rlhf_details_{os.getpid()}"
        self.group = None
        if accelerator.num_processes > 1:  # An actor's thread must not meet the learner's collective calls.
            self.group = torch.distributed.new_group(backend="gloo", timeout=engines.PATIENCE)
        try:
            self.post("/reset_prefix_cache")
        except OSError as e:
            stop(f"--vllm_server {url}: cannot be reached ({e}); docs/guides has the command that starts it")

    def push(self, model, dtype):
        """Writes the model's weights and lets the server load them; the other processes wait."""
        if self.accelerator.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                weights = {name: x.detach().to("cpu", dtype, copy=True) for name, x in weights_of(model).items()}
                save_file(weights, self.folder / "model.safetensors", metadata={"format": "pt"})
                call = {"method": "reload_weights", "kwargs": {"weights_path": str(self.folder)}}
                self.post("/collective_rpc", call)
                self.post("/reset_prefix_cache")
            finally:
                shutil.rmtree(self.folder, ignore_errors=True)
        self.wait()

    def generate(self, prompts, settings):
        """As Engine's. The server schedules rows as they arrive, so two runs may differ by rounding."""

        def one(ids, given):
            (choice,) = self.post("/inference/v1/generate", {"token_ids": ids, "sampling_params": given})["choices"]
            return choice["token_ids"], [x["logprob"] for x in choice["logprobs"]["content"]]

        with ThreadPoolExecutor(min(len(prompts), 256)) as pool:
            found = list(pool.map(one, prompts, settings))
        self.wait()  # Nobody pushes while another process still samples.
        return found

    def wait(self):
        """Waits for the other processes."""
        if self.group:
            torch.distributed.barrier(self.group)

    def post(self, path, body=None):
        """The JSON that the server answers, or None."""
        data = json.dumps(body or {}).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=engines.PATIENCE.total_seconds()) as answer:
            text = answer.read()
        return json.loads(text) if text else None
