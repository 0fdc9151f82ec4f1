"""train_both.py: both trainings in one command, the policy on the reward model just trained, one launch of the processes."""

import json
from pathlib import Path

import pytest
import torch
from conftest import launch, read_metrics
from safetensors.torch import load_file
from test_stages import write_rows
from transformers import AutoModelForSequenceClassification
from wandb_file import read_run_file

from rlhf_details import runs, toy, train_both, train_ppo, train_reward, train_rloo


def flags(tiny, **more):
    """A command line: eight comparisons, then two updates of the policy."""
    write_rows("pairs.jsonl", [{"prompt": r["prompt"], "chosen": r["completion"], "rejected": "we ."} for r in rows()])
    shared = dict(dataset="pairs.jsonl", sft_model_path=tiny / "policy")
    values = {f"reward.{k}": v for k, v in (shared | dict(batch_size=4, output_dir="reward", learning_rate=1e-2)).items()}
    sizes = dict(batch_size=8, total_episodes=16, response_length=8, num_sample_generations=1, output_dir="policy", seed=3)
    values |= {f"policy.{k}": v for k, v in (shared | sizes).items()}
    return [str(word) for k, v in (values | more).items() for word in ((f"--{k}",) if v is True else (f"--{k}", v))]


def rows():
    return toy.rows("sft", "train")[:8]


def recorded(monkeypatch, algorithm):
    """Where the policy's script reads its reward model, and the weights that it finds there."""
    seen = []
    module = {"ppo": train_ppo, "rloo": train_rloo}[algorithm]
    load = module.utils.load_reward_model

    def recording(folder, flag, *rest, **options):
        model = load(folder, flag, *rest, **options)
        if flag == "--reward_model_path":
            seen.append((folder, {k: v.clone() for k, v in model.state_dict().items()}))
        return model

    monkeypatch.setattr(module.utils, "load_reward_model", recording)
    return seen


@pytest.mark.parametrize("algorithm", ["ppo", "rloo"])
def test_the_policy_is_trained_on_the_reward_model_just_trained(tiny, in_tmp, monkeypatch, algorithm):
    seen = recorded(monkeypatch, algorithm)
    result = train_both.main(flags(tiny, algorithm=algorithm))
    ((folder, weights),) = seen
    saved = load_file("reward/model.safetensors")
    assert folder == "reward" and all(torch.equal(weights[name], tensor) for name, tensor in saved.items())
    untrained = AutoModelForSequenceClassification.from_pretrained(tiny / "reward").state_dict()
    assert not torch.equal(weights["gpt_neox.embed_in.weight"], untrained["gpt_neox.embed_in.weight"])
    assert len(read_metrics(result["run"])) == 2 and result["run"].endswith(tuple("0123456789"))
    assert f"train_{algorithm}" in result["run"] and (Path("policy") / "config.json").exists()
    assert json.loads(Path("policy/training_args.json").read_text())["seed"] == 3


def test_both_can_be_resumed(tiny, in_tmp, monkeypatch):
    """Killed while the policy trains: the reward model is not trained again, and the end is that of an untouched run."""
    names = {"reward.run_name": "r", "policy.run_name": "p", "reward.checkpoint_every": 1, "policy.checkpoint_every": 1}
    train_both.main(flags(tiny, **names, **{"policy.output_dir": "untouched", "policy.overwrite": True, "reward.overwrite": True}))
    log = runs.Run.log

    def dying(self, metrics, step):
        log(self, metrics, step)
        if "objective/kl" in metrics and step == 2:
            raise KeyboardInterrupt

    overwrite = {"reward.overwrite": True, "policy.overwrite": True}
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(runs.Run, "log", dying)
        train_both.main(flags(tiny, **names, **overwrite))
    steps = []
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, *a, step=torch.optim.AdamW.step: steps.append(1) or step(self, *a))
    train_both.main(flags(tiny, **names, **{"reward.resume": True, "policy.resume": True}))
    assert len(steps) == 4  # the policy's second update, of four steps
    a, b = (load_file(f"{folder}/model.safetensors") for folder in ("untouched", "policy"))
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
def test_both_runs_are_tracked_offline(tiny, in_tmp):
    words = flags(tiny) + ["--reward.track", "--policy.track"]
    done = launch(
        "train_both.py",
        words,
        cwd=in_tmp,
        WANDB_MODE="offline",
        WANDB_SILENT="true",
        WANDB_DIR=str(in_tmp),
        WANDB_DATA_DIR=str(in_tmp),
    )
    assert done.returncode == 0, done.stderr
    offline = sorted((in_tmp / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(offline) == 2
    found = {run.job_type: run for run in map(read_run_file, offline)}
    assert found.keys() == {"train_reward", "train_ppo"}
    assert found["train_reward"].column("train/rm/loss") and found["train_ppo"].column("objective/kl")
    assert len(list((in_tmp / "runs").iterdir())) == 2


@pytest.mark.slow
def test_two_processes_are_launched_once_and_give_the_curves_of_one(tiny, tmp_path, monkeypatch):
    curves = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        folder.mkdir()
        monkeypatch.chdir(folder)
        done = launch("train_both.py", flags(tiny), processes, cwd=folder)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count(f"{processes} process(es)") == 2
        (run,) = (folder / "runs").glob("*train_ppo*")
        curves.append([(row["objective/scores"], row["objective/kl"], row["loss/value_avg"]) for row in read_metrics(run)])
    assert torch.allclose(torch.tensor(curves[0]), torch.tensor(curves[1]), atol=1e-4)


def test_arguments_go_to_their_script(tiny):
    words = ["--algorithm", "rloo", "--reward.dataset", "a.jsonl", "--reward.sft_model_path", "base", "--policy.kl-coef=0.5"]
    words += ["--policy.dataset", "b.jsonl", "--policy.wandb_tags", "x", "y", "--reward.output_dir=r", "--reward.track"]
    reward, module, policy = train_both.parse(words)
    assert module is train_rloo and isinstance(reward, train_reward.Args) and isinstance(policy, train_rloo.Args)
    assert (reward.dataset, reward.track, policy.dataset, policy.track) == ("a.jsonl", True, "b.jsonl", False)
    assert (policy.kl_coef, policy.wandb_tags, policy.reward_model_path, policy.sft_model_path) == (0.5, ("x", "y"), "r", "base")


def test_without_arguments_it_is_the_embedded_task_with_its_defaults():
    reward, module, policy = train_both.parse([])
    assert module is train_ppo
    for args, values in ((reward, toy.DEFAULTS["train_reward"]), (policy, toy.DEFAULTS["train_ppo"])):
        assert {name: getattr(args, name) for name in values} == values


def test_the_policy_starts_from_the_reward_models_start_unless_it_is_named(in_tmp):
    start = ["--reward.sft_model_path", "base"]
    assert train_both.parse(start)[2].sft_model_path == "base"
    assert train_both.parse([*start, "--policy.dataset", "x.jsonl"])[2].sft_model_path == "base"
    assert train_both.parse([*start, "--policy.sft_model_path", "other"])[2].sft_model_path == "other"
    Path("policy.toml").write_text('sft_model_path = "third"\n')
    assert train_both.parse([*start, "--policy.config", "policy.toml"])[2].sft_model_path == "third"


@pytest.mark.parametrize("algorithm, flag", [("ppo", "--policy.gamma"), ("rloo", "--policy.rloo-k")])
def test_help_shows_the_arguments_of_the_algorithm_with_the_toys_defaults(capsys, algorithm, flag):
    with pytest.raises(SystemExit) as end:
        train_both.parse(["--algorithm", algorithm, "--help"])
    shown = capsys.readouterr().out
    assert end.value.code == 0 and flag in shown and "models/toy/" + algorithm in shown
    assert ("--policy.rloo-k" in shown) == (algorithm == "rloo")


def test_a_config_file_belongs_to_its_group(in_tmp):
    Path("policy.toml").write_text('kl_coef = 0.7\nsft_model_path = "start"\n')
    reward, _, policy = train_both.parse(["--policy.config", "policy.toml", "--policy.dataset", "x.jsonl"])
    assert policy.kl_coef == 0.7 and policy.sft_model_path == "start" and reward.sft_model_path == "models/toy/sft"


@pytest.mark.parametrize(
    "words, message",
    [
        (["--policy.reward_model_path", "x"], "--policy.reward_model_path"),
        (["--policy.reward-model-path=x"], "--policy.reward_model_path"),
        (["--policy.output_dir", "models/toy/reward"], "--policy.output_dir"),
        (["--policy.output_dir", "./models/../models/toy/reward"], "--policy.output_dir"),
        (["--policy.output_dir", "models/toy/reward/ppo"], "--policy.output_dir"),
        (["--reward.output_dir", "models/toy/ppo/reward"], "--policy.output_dir"),
        (["--reward.output_dir", "mine/sft", "--policy.sft_model_path", "mine/sft"], "--policy.sft_model_path"),
        (["--reward.output_dir", "mine", "--policy.sft_model_path", "mine/sft"], "--policy.sft_model_path"),
        (["--policy.dataset", "nofile.jsonl"], "--policy.dataset nofile.jsonl"),
        (["--policy.eval_dataset", "toy:nowhere"], "nowhere"),
        (["--policy.num_mini_batches", "3"], "--num_mini_batches"),
        (["--algorithm", "rloo", "--policy.num_mini_batches", "3"], "num_mini_batches"),
        (["--reward.run_name", "x", "--policy.run_name", "x"], "--policy.run_name"),
        (["--policy.gamma", "2"], "--gamma"),
        (["--reward.batch_size", "0"], "--batch_size"),
        (["--policy.nonsense", "2"], "nonsense"),
        (["--algorithm", "dpo"], "algorithm"),
        (["--kl_coef", "1"], "kl"),
        (["stray"], "stray"),
    ],
)
def test_bad_arguments_end_before_anything_is_trained(in_tmp, capsys, words, message):
    with pytest.raises(SystemExit) as end:
        train_both.main(words)
    assert end.value.code == 2 and message in capsys.readouterr().err.replace("-", "_").replace("__", "--")
    assert not list(in_tmp.iterdir())
