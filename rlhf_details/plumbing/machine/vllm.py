"""
vLLM as the sampler (--sampler vllm), in the place of `utils.sample`: it takes the same arguments and returns the same.

An engine runs in a process of its own beside each training process and on its device, or one server serves all
(--vllm_server). Before each rollout it is given the policy's weights, and the log-probs of the first tokens that it
returns are compared with the training forward. Otherwise weights that were not pushed, such as a tied head, would
sample from another policy, and nothing would say so. What rounding leaves, `samplers.correct_for_sampler` makes up for.
"""

import contextlib
import copy
import functools
import json
import os
import signal
import tempfile
import urllib.request
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file

from rlhf_details import noise, utils
from rlhf_details.plumbing import console
from rlhf_details.plumbing.inputs import models
from rlhf_details.plumbing.machine import engines, stages

# How far the mean log-prob of the first tokens may be from the training forward's. In fp32 1e-5 was measured, and 0.2
# where the head was not pushed.
BOUNDS = {"fp32": 1e-3, "bf16": 0.1, "fp16": 0.1}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PROCESSED = "--logprobs-mode processed_logprobs"  # Without it a server's log-probs are those before the temperature.


def sampler(args, accelerator, rows, stop):
    """What samples in a run: utils.sample, or for --sampler vllm a function with the same arguments and results.

    Args: rows, all prompts that will be sampled from (data.Prompt); stop, ends the run with a message.
    """
    if args.sampler == "own":
        return utils.sample
    if args.vllm_server:
        engine = Server(args, accelerator)
    else:
        engine = Engine(args, accelerator, max(len(row.ids) for row in rows) + args.response_length)
    return functools.partial(sample, engine, engines.precision(accelerator), stop)


@torch.no_grad()
def sample(
    engine, precision, stop, policy, queries, query_mask, rows, n, response_length, stop_ids, key, size, room=None
):
    """As utils.sample. n and size do not matter: vLLM finds which rows share a prompt, and how many it has room for."""
    own = getattr(policy, "module", policy)  # out of DDP's wrapper
    prompts = [query[m].tolist() for query, m in zip(queries, query_mask, strict=True)]
    seeds = [int(row_key) % 2**32 for row_key in noise.keys_of_episodes(key, rows)]
    try:
        if len(key) == 3:  # The later turns of a trajectory, whose key says which, are sampled from the same weights.
            engine.push(own.model, DTYPES[precision])
        # The sampled distribution is the trained one: no top-k, no top-p, no penalties, no generation_config.
        settings = {
            "temperature": own.temperature,
            "ignore_eos": True,
            "stop_token_ids": stop_ids.tolist(),
            "logprobs": 0,
            "detokenize": False,
        }
        if surplus := range(models.num_tokens(own.model), own.model.config.get_text_config().vocab_size):
            settings["logit_bias"] = dict.fromkeys(surplus, -100.0)  # These stand for no token: e^-100 is none.
        limits = [response_length] * len(rows) if room is None else room.tolist()
        given = [settings | {"seed": seed, "max_tokens": limit} for seed, limit in zip(seeds, limits, strict=True)]
        answers = engine.generate(prompts, given)
    except (OSError, RuntimeError) as e:
        stop(f"--sampler vllm: {engine.name} failed ({e})")
    R = response_length
    device = queries.device
    responses = torch.tensor([ids + [0] * (R - len(ids)) for ids, _ in answers], device=device)
    logprobs = torch.tensor([values + [0.0] * (R - len(values)) for _, values in answers], device=device)
    mask = torch.arange(R, device=device) < torch.tensor([[len(ids)] for ids, _ in answers], device=device)
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
    queries, query_mask = queries[:4], query_mask[:4]
    responses, mask, logprobs = (x[:4, :16] for x in (responses, mask, logprobs))
    every = torch.cat([query_mask, mask], 1)
    index = torch.arange(mask.size(1), device=mask.device) + queries.size(1) - 1
    logits = policy(torch.cat([queries, responses], 1), every, utils.positions_from_mask(every), index)
    tables = (factor * logits for factor in (1, getattr(policy, "module", policy).temperature))
    own = (table.log_softmax(-1).gather(-1, responses.unsqueeze(-1)).squeeze(-1) for table in tables)
    return [float(utils.masked_mean((x - logprobs).abs(), mask)) for x in own]


def weights_of(model):
    """{name: weight} as vLLM loads them: adapters merged, and a tied head under its own name as well."""
    return (models.merge_adapters(copy.deepcopy(model)) if hasattr(model, "lora") else model).state_dict()


@contextlib.contextmanager
def written(model, dtype, parent):
    """Yields a folder with a model's configuration and weights, which goes as soon as an engine has loaded them."""
    Path(parent).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="rlhf_details_", dir=parent) as folder:
        weights = {name: x.detach().to("cpu", dtype, copy=True).contiguous() for name, x in weights_of(model).items()}
        save_file(weights, Path(folder, "model.safetensors"), metadata={"format": "pt"})
        model.config.save_pretrained(folder)
        yield folder


# ---- an engine beside this process -----------------------------------------------------------------------------------
class Engine:
    """vLLM in a process of its own, since it changes torch's threads and some classes of transformers.

    In that process it runs without another one. So it schedules the same rows alike, and a run repeats itself.
    """

    name = "vLLM's process"

    def __init__(self, args, accelerator, length):
        self.args = args
        self.device = accelerator.device
        self.length = length
        # Between rollouts the training process has the GPU's memory. On level 1 vLLM keeps its weights in the CPU's,
        # from where later turns have them, and on level 2 it forgets them.
        self.sleeps = (1 if hasattr(args, "max_turns") else 2) * (self.device.type == "cuda")
        self.config = self.process = None

    def push(self, model, dtype):
        """Gives the engine the model's weights. It starts the engine for the first model of a configuration."""
        with written(model, dtype, self.args.vllm_folder) as folder:
            # Models that were trained from one another differ in their paths.
            config = model.config.to_dict() | {"_name_or_path": None}
            if self.config == config:
                self.ask(load, folder, self.sleeps)
            else:
                self.config = config
                self.start(folder, dtype)

    def generate(self, prompts, settings):
        """[(token ids, log-probs)]. Args: prompts, lists of ids; settings, for each a dictionary of SamplingParams."""
        return self.ask(generate, prompts, settings, self.sleeps)

    def start(self, folder, dtype):
        """Starts the engine, with the model in a folder."""
        if self.process:
            self.process.kill()
        options = {
            "model": folder,
            "dtype": dtype,
            "max_model_len": self.length,
            "skip_tokenizer_init": True,
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
            "disable_log_stats": True,
        }
        environ = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
        if self.sleeps:
            index = torch.cuda.current_device()
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[index] if visible else str(index)
            options |= {"gpu_memory_utilization": self.args.vllm_memory, "enable_sleep_mode": True}
        else:
            environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # It would bind this process's threads elsewhere.
            environ["VLLM_CPU_KVCACHE_SPACE"] = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
            options["enforce_eager"] = True
        context = torch.multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, options, environ), daemon=True)
        self.process.start()
        theirs.close()  # Otherwise this end would never learn that the process has ended.
        console.say("starting vLLM, which takes a minute or two")
        console.say(f"vLLM {self.answer()} samples on {self.device}, in {str(dtype).removeprefix('torch.')}")

    def ask(self, function, *args):
        """What a function of the engine and of args returns in the engine's process."""
        self.pipe.send((function, args))
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


def serve(pipe, options, environ):
    """The engine's process. It ends with the training process, whose end closes the pipe."""
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C lets the trainer finish its update, for which it may sample.
    for name in filter(stages.LAUNCHER.match, list(os.environ)):  # vLLM is a group of its own.
        del os.environ[name]
    os.environ |= environ
    with contextlib.suppress(EOFError, BrokenPipeError):
        try:
            import vllm

            llm = vllm.LLM(**options)
            found = vllm.__version__
            while True:
                pipe.send((found, None))
                function, args = pipe.recv()
                found = function(llm, *args)
        except (EOFError, BrokenPipeError):
            raise
        except Exception as e:  # vLLM may fail in any way, and the training process then says why in one line.
            pipe.send((None, f"{type(e).__name__}: {e}"))


def load(llm, folder, sleeps):
    """Gives vLLM the weights in a folder."""
    if sleeps:
        llm.wake_up(tags=["weights"])
    llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
    if sleeps:
        llm.wake_up(tags=["kv_cache"])
    llm.reset_prefix_cache()  # What is in it was computed with the weights before.


def generate(llm, prompts, settings, sleeps):
    """What vLLM samples: [(token ids, log-probs)]."""
    import vllm

    if sleeps == 1:
        llm.wake_up()
    prompts = [{"prompt_token_ids": ids} for ids in prompts]
    answers = llm.generate(prompts, [vllm.SamplingParams(**given) for given in settings], use_tqdm=False)
    if sleeps:
        llm.sleep(level=sleeps)
    found = [answer.outputs[0] for answer in answers]
    return [(list(x.token_ids), [y[i].logprob for i, y in zip(x.token_ids, x.logprobs, strict=True)]) for x in found]


# ---- one server for all processes ------------------------------------------------------------------------------------
class Server:
    """`vllm serve` at a URL, which reads the weights from a folder that it shares with the main process."""

    def __init__(self, args, accelerator):
        self.url = args.vllm_server.rstrip("/")
        self.folder = args.vllm_folder
        self.is_main = accelerator.is_main_process
        self.name = f"the server at {self.url}"
        self.group = None
        if accelerator.num_processes > 1:  # An actor's thread must not meet the learner's collective calls.
            self.group = torch.distributed.new_group(backend="gloo", timeout=engines.PATIENCE)

    def push(self, model, dtype):
        """Writes the model's weights and lets the server load them; the other processes wait."""
        if self.is_main:
            with written(model, dtype, self.folder) as folder:
                self.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})
                self.post("/reset_prefix_cache")
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
        headers = {
            "Content-Type": "application/json",
            "Authorization": f"Bearer {os.environ.get('VLLM_API_KEY', 'no-key')}",
        }
        request = urllib.request.Request(self.url + path, data, headers)
        with urllib.request.urlopen(request, timeout=engines.PATIENCE.total_seconds()) as answer:
            return json.loads(answer.read() or "null")
