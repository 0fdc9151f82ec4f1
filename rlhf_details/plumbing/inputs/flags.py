"""
The flags that scripts share, as base classes of their Args. The string below a flag is its text in --help, and the
comment above some flags the name of their group.
"""

import ast
import inspect
import json
import re
from dataclasses import dataclass
from typing import Literal

# These flags bound memory or choose kernels. They never change a result.
MEMORY_KNOBS = (
    "micro_batch_size rollout_micro_batch_size gradient_checkpointing share_prompts attn_implementation offload_frozen "
    "vllm_memory vllm_server vllm_folder"
).split()
# These flags say where a run writes. A resumed run may be given others.
OUTPUTS = (
    "resume overwrite checkpoint_every config run_name track wandb_project_name wandb_entity wandb_tags output_dir "
    "push_to_hub hub_model_id"
).split()
# These flags may differ when a run writes into the output folder of an earlier one, because the model is the same.
NOT_THE_MODEL = [*MEMORY_KNOBS, *OUTPUTS]
NOT_THE_MODEL += "exp_name eval_dataset eval_every num_sample_generations template_date".split()


@dataclass
class RunArgs:
    """The flags that all training scripts have."""

    # run
    exp_name: str = "train"
    """part of the run's name"""
    seed: int = 1
    """seed of everything random"""
    track: bool = False
    """log to Weights & Biases as well (WANDB_MODE=offline needs no account)"""
    wandb_project_name: str = "rlhf_details"
    """Weights & Biases project"""
    wandb_entity: str | None = None
    """Weights & Biases team or user"""
    wandb_tags: tuple[str, ...] = ()
    """Weights & Biases tags"""
    run_name: str | None = None
    """name of the run's folder in runs/; None: dataset, exp_name, seed and time"""
    config: str | None = None
    """TOML file with defaults for these flags; the command line wins"""
    output_dir: str = "models/train"
    """folder of the trained model"""
    overwrite: bool = False
    """replace an output folder that holds another model"""
    resume: bool = False
    """continue from the last whole checkpoint of --run_name, or of the newest run of this dataset, exp_name and seed"""
    checkpoint_every: int = 50
    """updates between checkpoints, of which the run's folder keeps the last two; 0: only on SIGTERM and SIGINT"""
    push_to_hub: bool = False
    """upload output_dir to the Hugging Face Hub at the end"""
    hub_model_id: str | None = None
    """the Hub repository, "name" or "owner/name"; None: output_dir with - in place of /"""

    # data
    dataset: str = "toy"
    """rows: "toy", "toy-sum", a .jsonl/.json/.ndjson/.csv/.tsv/.parquet file (also .gz), a folder, or NAME or
    NAME@REVISION of a Hub data set, with :SPLIT, :CONFIGURATION, :CONFIGURATION:SPLIT or :FILE for a part of it, or
    FILE.py:FUNCTION, which returns rows"""
    eval_dataset: str | None = None
    """held-out rows, evaluated before and after training and every --eval_every updates; None: no such evaluation"""
    take: int | None = None
    """use only this many rows of --dataset, the first ones"""
    prompt_template: str | None = None
    """the prompt, with the row's columns in their places: "Question: {question}\\nAnswer:"; one column alone,
    "{messages}", may hold messages; None: column `prompt`, or else the messages"""
    chat_template_kwargs: str = "{}"
    """JSON of what the chat template is given beside the messages: '{"enable_thinking": false}'"""
    template_date: str | None = None
    """the day, 2026-11-27, that a chat template writes which writes one; None: that on which the run starts"""
    max_prompt_length: int | None = None
    """drop rows whose prompt has more tokens than this; the number of dropped rows is printed"""

    # models
    trust_remote_code: bool = False
    """run the Python code that comes with a model; only for models whose authors you trust"""
    lora_rank: int | None = None
    """train adapters of this rank (LoRA, alpha is twice the rank) in place of all weights; output_dir holds the model
    with its adapters merged, and output_dir/adapter the adapters; None: train all weights"""

    # memory and speed: never changes the result
    micro_batch_size: int = 16
    """rows or episodes that a device puts through one forward and backward pass"""
    gradient_checkpointing: bool = False
    """compute activations again in the backward pass, which saves memory"""
    attn_implementation: Literal["sdpa", "eager"] | None = None
    """attention kernel; None: the library's choice for the model"""


@dataclass
class SampledArgs:
    """Who samples, and the functions that are given what was sampled."""

    # sampling
    sampler: Literal["own", "vllm"] = "own"
    """who samples: "own", the sampler in utils.py, or "vllm", an engine beside each process, which is faster on GPUs"""
    vllm_memory: float = 0.3
    """share of the GPU's memory that vLLM takes while it samples"""
    vllm_server: str | None = None
    """URL of a `vllm serve` that samples for all processes; None: an engine beside each of them"""
    vllm_folder: str = "/dev/shm"
    """folder through which vLLM gets the weights; a server must see it as well"""

    # reward and KL
    reward_fn: tuple[str, ...] = ()
    """functions f(prompts, completions, **columns) -> rewards, FILE.py:function or package.module:function; they
    replace the reward model, or are added to its score"""
    reward_fn_format: Literal["text", "messages"] = "text"
    """what reward functions get: strings, or messages {"role", "content"}, whatever the data set holds"""

    # memory and speed: never changes the result
    rollout_micro_batch_size: int = 64
    """episodes that a device samples at once, and evaluate.py also scores"""


@dataclass
class RewardArgs(SampledArgs):
    """What says how good a response is: the flags of training on rewards and of evaluate.py."""

    # reward and KL
    reward_model_path: str | None = None
    """reward model, a sequence-classification model with one label; one that has another tokenizer is given text
    (training requires it, unless --dataset is toy or toy-sum, or --reward_fn is given)"""
    allow_untrained_reward_model: bool = False
    """accept a reward model without a trained head; the head is drawn at random (dummy runs)"""
    reward_fn_weights: tuple[float, ...] = ()
    """the factor of each reward function, in their order; none given: 1 for each"""


@dataclass
class SamplingArgs(SampledArgs, RunArgs):
    """What the scripts that train a policy on its own responses have in addition."""

    # run
    num_sample_generations: int = 10
    """how many tables of sample responses to show, spread evenly over the run"""
    eval_every: int = 0
    """updates between held-out evaluations; 0: only before and after training"""

    # data
    filter_length: bool = False
    """drop rows whose prompt has more than 0.9 * response_length tokens"""

    # models
    sft_model_path: str | None = None
    """the policy to start from, which is also the reference of a KL in reward or loss; a folder, or NAME or
    NAME@REVISION on the Hub (required unless --dataset is toy or toy-sum)"""

    # sampling
    overlap: bool = False
    """sample the responses of the next update while this one trains, by the weights from before it"""
    sampler_correction: Literal["none", "truncate", "mask"] = "truncate"
    """what is done where vLLM, or --overlap, sampled from another policy: advantages are multiplied by the ratio
    p / p_sampler, which is at most sampler_cap, or counts as 0 where it is outside of [1 / sampler_cap, sampler_cap];
    in PPO --overlap has no need of it, since its ratio is against the policy that sampled"""
    sampler_cap: float = 2.0
    """bound of that ratio, of a token, or in RLOO and GSPO of a response"""

    # memory and speed: never changes the result
    offload_frozen: bool = False
    """keep the frozen models (reference, reward model, teacher) in the CPU's memory while they have nothing to do"""

    def __post_init__(self):
        if self.sampler == "vllm":  # It decides by itself how many rows it computes at once.
            self.rollout_micro_batch_size = self.batch_size


@dataclass
class PolicyArgs(RewardArgs, SamplingArgs):
    """What the scripts that train a policy on rewards have in addition."""


def described(kind):
    """{flag: (the comment above its group, up to a comma; its text)} of an Args class, from its source."""
    found = {}
    for base in reversed(kind.__mro__[:-1]):
        group = ""
        source = inspect.getsource(base)
        for title, name, text in re.findall(r'^    (?:# (.+)|(\w+): .+\n    """((?s:.*?))""")$', source, re.M):
            group = title.partition(",")[0] or group
            if name:  # A page may give a flag another default, and that leaves it in its group.
                first, _ = found.get(name, (group, ""))
                found[name] = first, " ".join(ast.literal_eval(f'"""{text}"""').split())
    return found


def as_words(values):
    """{flag: value} as words of a command line."""
    words = []
    for name, value in values.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no_{name}")
            continue
        parts = value if isinstance(value, list | tuple) else [value]
        words += [f"--{name}", *(json.dumps(x) if isinstance(x, dict) else str(x) for x in parts)]
    return words


def differences(before, now, may_differ=()):
    """Texts that name where two dictionaries differ in what `now` holds. before: as JSON has returned it."""
    now = json.loads(json.dumps(now))
    return [
        f"{key} {before.get(key)!r} there, {now[key]!r} here"
        for key in now
        if key not in may_differ and before.get(key) != now[key]
    ]


def experiment(args):
    """What the runs of all seeds share in their names."""
    return f"{args.dataset.split('/')[-1].split('[')[0]}__{args.exp_name}"
