"""README, flags and metrics agree with the code; a newcomer's commands parse; nothing is declared that nothing reads."""

import ast
import dataclasses
import json
import re
import runpy
import shlex
from pathlib import Path

import pytest
from conftest import ROOT, ppo_args, rloo_args
from test_stages import reward_args, sft_args, write_rows

from rlhf_details import evaluate, toy, train_both, train_ppo, train_reward, train_rloo, train_sft, utils

README = (ROOT / "README.md").read_text()
SCRIPTS = {
    "train_sft": train_sft,
    "train_reward": train_reward,
    "train_ppo": train_ppo,
    "train_rloo": train_rloo,
    "evaluate": evaluate,
}


def section(title):
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", README, re.M | re.S)[1]


def test_quick_start_has_exactly_two_bash_blocks_and_no_other_section_has_one():
    blocks = re.findall(r"```bash\n(.*?)```", section("Quick start"), re.S)
    assert len(blocks) == 2 == README.count("```bash")
    assert "accelerate launch rlhf_details/train_rloo.py\n" in blocks[0] and "pytest" in blocks[1]
    assert all("-c constraints.txt" in block and "venv" in block for block in blocks)


def test_the_metric_tables_list_exactly_what_is_logged(tiny, in_tmp):
    documented = set(re.findall(r"`([a-z_]+(?:/[a-zA-Z_]+)*)`", section("Metrics").split("Where they differ")[0]))
    documented -= {"metrics.jsonl"}
    logged = set()
    Path("mine.py").write_text("def f(prompts, completions): return [True for _ in completions]")
    for script, args in ((train_rloo, rloo_args), (train_ppo, ppo_args)):
        script.main(args(tiny, total_episodes=16, eval_dataset="toy:test", reward_fn=("mine.py:f",)))
        logged |= {name for line in Path("runs/run/metrics.jsonl").read_text().splitlines() for name in json.loads(line)}
    write_rows("rows.jsonl", toy.rows("sft", "train")[:8])
    logged |= set(train_sft.main(sft_args(num_train_epochs=1)))
    pairs = [{"prompt": r["prompt"], "chosen": r["completion"], "rejected": "we ."} for r in toy.rows("sft", "train")[:8]]
    write_rows("rows.jsonl", pairs)
    logged |= set(train_reward.main(reward_args(tiny)))
    assert documented == {name for name in logged if "/rewards/" not in name}
    assert "`objective/rewards/<name>`" in README and "eval/objective/rewards/f" in logged


def commands():
    """Every command of the README that starts one of the scripts, with its backslash-free line."""
    for line in README.splitlines():
        match = re.search(r"(?:^|`)(?:\w+=\w+ )?((?:accelerate launch|python|torchrun)[^`|]*rlhf_details/(\w+)\.py[^`|]*)", line)
        if match:
            yield match[2], match[1]


def test_every_command_of_the_readme_parses_against_the_flags():
    found = list(commands())
    assert len(found) >= 6
    for script, command in found:
        words = [w for w in shlex.split(command) if w != "..."]
        flags = words[words.index(f"rlhf_details/{script}.py") + 1 :]
        if script == "train_both":
            train_both.parse(flags)
        else:
            utils.parse_args(SCRIPTS[script].Args, toy.defaults(script), flags)


def test_every_flag_that_the_readme_names_exists():
    fields = {f.name for module in SCRIPTS.values() for f in dataclasses.fields(module.Args)}
    fields |= {"algorithm", "reward", "policy"}  # of train_both.py
    elsewhere = {"num_processes", "mixed_precision", "config_file", "nproc_per_node", "help", "no"}  # "no": git diff --no-index
    for flag in re.findall(r"--([a-z_]+)", README):
        assert flag in fields | elsewhere, flag


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_flag_is_read_and_documented(script):
    source = (ROOT / f"rlhf_details/{script}.py").read_text()
    tree = ast.parse(source)
    shared = "".join(
        (ROOT / f"rlhf_details/{name}.py").read_text() for name in ("utils", "runs", "engines", "hub", "lora", "reward_functions")
    )
    read = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and getattr(n.value, "id", "") == "args"}
    read |= set(re.findall(r"\bargs\.(\w+)", shared)) | set(re.findall(r'given\.get\("(\w+)"\)', shared))
    body = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Args").body
    for field, doc in zip(body[::2], body[1::2], strict=True):
        assert field.target.id in read, f"{field.target.id} is read by nothing"
        assert len(doc.value.value) > 8, f"{field.target.id} is not documented"


def test_the_table_of_validated_combinations_is_that_of_the_last_run_of_the_engine_tests():
    benchmark = runpy.run_path(str(ROOT / "benchmark" / "validated.py"))
    found = json.loads((ROOT / "rlhf_details" / "validated.json").read_text())
    assert benchmark["table"](found) in README and len(found) > 30


def test_flags_mean_the_same_in_every_script():
    types = {}
    for module in SCRIPTS.values():
        for field in dataclasses.fields(module.Args):
            assert types.setdefault(field.name, field.type) == field.type, field.name


def test_the_toys_defaults_are_flags_of_their_scripts():
    for script, values in toy.DEFAULTS.items():
        assert values.keys() <= {f.name for f in dataclasses.fields(SCRIPTS[script].Args)}


@pytest.mark.parametrize("path", sorted((ROOT / "rlhf_details").glob("*.py")), ids=lambda p: p.name)
def test_no_memory_rituals_and_no_leftovers(path):
    for number, line in enumerate(path.read_text().splitlines(), 1):
        assert not re.search(r"^\s*del |empty_cache|gc\.collect|time\.sleep|TODO|FIXME|except:|INVALID_LOGPROB", line), number


@pytest.mark.parametrize("script, args", [(train_rloo, rloo_args), (train_ppo, ppo_args)], ids=["rloo", "ppo"])
def test_gold_is_reported_of_the_embedded_tasks_prompts_only(script, args, tiny, in_tmp):
    write_rows("rows.jsonl", toy.rows("sft", "train")[:16])
    for dataset, eval_dataset, training, held_out in (("toy", "rows.jsonl", True, False), ("rows.jsonl", "toy:test", False, True)):
        script.main(args(tiny, total_episodes=16, dataset=dataset, eval_dataset=eval_dataset, output_dir=dataset[:3]))
        row = json.loads(Path("runs/run/metrics.jsonl").read_text().splitlines()[-1])
        assert ("objective/gold" in row, "eval/objective/gold" in row) == (training, held_out)
