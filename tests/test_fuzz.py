"""Whatever stands in flags, TOML files, rows and names: a script goes on, or refuses it with one line and exit code 2.

Hypothesis draws the cases, the same ones on every machine; `outcome` judges each. NUMBERS says how many each property takes; the
fast suite draws a quarter of them.
"""

import contextlib
import csv
import dataclasses
import io
import json
import re
import shutil
import sys
from itertools import chain
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf_details import data, evaluate, toy, train_both, train_ppo, train_reward, train_rloo, train_sft, utils

SCRIPTS = {module.__name__.rpartition(".")[2]: module for module in (train_sft, train_reward, train_ppo, train_rloo, evaluate)}
NUMBERS = {"flags": 500, "flags of both": 100, "TOML": 300, "files": 500, "rows": 700, "tables": 60, "names": 300, "models": 100}


# ---- the judge -------------------------------------------------------------------------------------------------------
def outcome(function, *args, usage=False):
    """(result, ""), or (None, line) of a refusal. usage=True: tyro may refuse as well, in several lines; "usage" stands for them.

    Anything but a result and SystemExit(2) passes through and fails the test, as do more lines than one and a file left behind.
    """
    before, result, line = sorted(Path().rglob("*")), None, ""
    stderr = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace", newline="")  # as Python opens it
    try:
        with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
            result = function(*args)
    except SystemExit as end:
        stderr.seek(0)
        line = stderr.read()
        assert end.code == 2, (end.code, line)
    assert sorted(Path().rglob("*")) == before
    if usage and "--help" in line and not line.startswith("error: "):
        return None, "usage"
    if line:
        assert line.startswith("error: ") and line.endswith("\n"), line
        line = line[:-1]
        assert len(line.splitlines()) == 1 and not re.search(r"[\x00-\x1f\x7f-\x9f]", line), f"control characters: {line!r}"
    return result, line


share = 1  # of NUMBERS, one in so many


@pytest.fixture(params=[4, pytest.param(1, marks=pytest.mark.slow)], ids=["a quarter", "all"], autouse=True)
def how_many(request, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "share", request.param)


def fuzz(name, function, *strategies):
    """Calls function on NUMBERS[name] drawn cases, or a share of them, and shows the smallest one that fails."""
    ran = 0

    @settings(
        max_examples=NUMBERS[name] // share, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(st.tuples(*strategies))
    def case(drawn):
        nonlocal ran
        ran += 1
        function(*drawn)

    case()
    print(f"{name}: {ran} cases")
    assert ran >= NUMBERS[name] // share


def test_number_of_cases():
    assert sum(NUMBERS.values()) >= 2000  # `fuzz` sees to it that they are really run


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Each property runs in an empty folder, offline and with a cache of its own, elsewhere."""
    for constant in ("huggingface_hub.constants.HF_HUB_OFFLINE", "datasets.config.HF_HUB_OFFLINE"):
        monkeypatch.setattr(constant, True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "in" / "work").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "in" / "work")


# ---- flags -----------------------------------------------------------------------------------------------------------
AWKWARD = (
    ["", " ", "-", "--", "=", "-1", "0", "1", "2.5", "nan", "-inf", "1e999", "9" * 5000, "0x10", "1_0", "٣", "None", "[1]"]
    + ["\0", "a\nb", "a\rb", "\x1b[31m", "\u2028", "\x85", "\udcff", "é" * 200, "a" * 300 + ".json", "~", "..", "../a", "a/"]
    + ["toy", "toy:test", "toy:\n", "toy[:3]", "csv", "csv:", ":", "a:b", "[1:]", "a.jsonl", "a\0.csv", "a.json:b", "a.parquet[1:]"]
)  # fmt: skip
values = st.sampled_from(AWKWARD) | st.text(max_size=20) | st.integers().map(str) | st.floats().map(str)


def typed(field):
    """Values of a field's type, now and then an awkward one."""
    awkward = AWKWARD if field.type in (str, str | None) else [0, 1, 2**64] if field.type is int else [None]
    return st.from_type(field.type) | st.sampled_from(awkward) if awkward != [None] else st.from_type(field.type)


def arguments(args_class, prefix="--"):
    """Command lines: flags with values of their type, at times one that is misspelt, lacks its value, is glued by =, ..."""
    fields = dataclasses.fields(args_class)

    def words(field, value):
        if isinstance(value, bool):
            return [f"--{'' if value else 'no_'}{field.name}".replace("--", prefix)]
        return [prefix + field.name, *map(str, value if isinstance(value, tuple) else [value])]

    good = st.sampled_from(fields).flatmap(lambda field: typed(field).map(lambda value: words(field, value)))
    flags = st.sampled_from([prefix + field.name for field in fields])
    odd = flags | values | st.tuples(flags, values).map("=".join) | flags.map(lambda flag: flag[:-2]) | values.map("--".__add__)
    odd |= flags.map(lambda flag: flag.replace("--", "--no_")) | flags.map(lambda flag: "--" + flag[2:].replace("_", "-"))
    lines = st.tuples(st.lists(good, max_size=3), st.lists(odd.map(lambda word: [word]) | good, max_size=1))
    return lines.map(lambda parts: list(chain(*parts[0], *parts[1]))).filter(lambda line: not {"-h", "--help"} & set(line))


def check(module, args):
    """Checks arguments as the script's main does."""
    module.check(evaluate.as_trained(args)[0] if module is evaluate else args)


def parse_and_check(script, argv):
    module = SCRIPTS[script]
    args = utils.parse_args(module.Args, toy.defaults(script), argv)
    check(module, args)
    torch.Generator().manual_seed(args.seed)  # the first thing that main does with them
    return args


def test_flags():
    def case(drawn):
        script, argv = drawn
        _, line = outcome(parse_and_check, script, argv, usage=True)
        flag = re.match(r"error: --(\w+)", line)
        assert line in ("", "usage") or flag[1] in {f.name for f in dataclasses.fields(SCRIPTS[script].Args)}, line

    line = st.sampled_from(sorted(SCRIPTS)).flatmap(lambda s: st.tuples(st.just(s), arguments(SCRIPTS[s].Args)))
    fuzz("flags", case, line)


def test_flags_of_both():
    def case(reward, policy, rest):
        outcome(lambda: train_both.check(*train_both.parse([*reward, *policy, *rest])), usage=True)

    rest = st.lists(values | st.sampled_from(["--algorithm", "--algorithm=rloo", "rloo", "--reward.", "--policy"]), max_size=1)
    fuzz("flags of both", case, arguments(train_reward.Args, "--reward."), arguments(train_rloo.Args, "--policy."), rest)


# ---- TOML ------------------------------------------------------------------------------------------------------------
TOML = (
    ["true", "false", "nan", "+inf", "-0", "1e999", "9" * 5000, "0x" + "f" * 5000, "1979-05-27", "07:32:00", "1979-05-27T07:32:00Z"]
    + ["''", "'-h'", "'--help'", "'''a\nb'''", '"\\u0000"', "'toy'", "[]", "[1, 'a', 2.5]", "['a', 'b']", "[['a']]", "{a = 1}"]
    + ["[" * 2000 + "]" * 2000, "= 1", "'", "1 2"]
)  # fmt: skip


def in_toml(value):
    """A value as TOML writes it, or nearly."""
    return json.dumps(value, ensure_ascii=False).replace("NaN", "nan").replace("Infinity", "inf").replace("null", "'None'")


def toml_files(args_class):
    """Two good lines at most, at times one with another key or value; or anything."""
    fields = dataclasses.fields(args_class)
    good = st.sampled_from(fields).flatmap(lambda field: typed(field).map(lambda value: f"{field.name} = {in_toml(value)}"))
    keys = [field.name for field in fields] + ["dataset", "run_name"] * 9 + ["[a]", "[[a]]", '"a\\nb"', "a.b", ""]
    odd = st.tuples(st.sampled_from(keys), st.sampled_from(TOML) | values.map(in_toml) | values).map(" = ".join)
    lines = st.tuples(st.lists(good, max_size=2), st.lists(odd, max_size=1)).map(lambda parts: "\n".join(parts[0] + parts[1]))
    return lines | lines | st.binary(max_size=30) | st.text(max_size=30)


def test_toml_files():
    def case(drawn, argv):
        script, content = drawn
        Path("run.toml").write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
        args, line = outcome(parse_and_check, script, ["--config", "run.toml", *argv], usage=True)
        assert args or line.startswith(("usage", "error: --")), line

    files = st.sampled_from(sorted(SCRIPTS)).flatmap(lambda s: st.tuples(st.just(s), toml_files(SCRIPTS[s].Args)))
    fuzz("TOML", case, files, st.sampled_from([[], ["--dataset", "a.jsonl"], ["--seed", "2"]]))


# ---- rows ------------------------------------------------------------------------------------------------------------
def read_and_encode(kind, spec):
    """Reads rows as the scripts do and tokenises them as they do."""
    flag, tokenizer = "--dataset", toy.tokenizer()
    if kind in ("pairs", "candidates", "labels"):
        for prompt, candidates, _ in train_reward.read_comparisons(spec, flag) or []:
            assert all(data.encode(tokenizer, prompt, candidate)[1] for candidate in candidates)
    elif kind in ("sft", "text"):
        assert all(data.encode(tokenizer, row["prompt"], row["completion"])[1] for row in train_sft.read_rows(spec, flag))
    else:
        if kind == "evaluate":  # as its main does
            what = f"{flag} {spec}"
            rows = data.with_completions(data.with_prompts(data.read_rows(spec, {}), None, what), what)
        else:
            rows = {"ppo": train_ppo, "rloo": train_rloo}[kind].read_prompts(spec, flag)
        data.encode_prompts(tokenizer, rows, 8, f"{flag} {spec}")
    return True


ROWS = {
    "ppo": {"prompt": "we went"},
    "rloo": {"prompt": "we went"},
    "evaluate": {"prompt": "we went", "completion": "."},
    "sft": {"prompt": "we went", "completion": "."},
    "text": {"text": "we went ."},
    "pairs": {"prompt": "we went", "chosen": ".", "rejected": "soup"},
    "candidates": {"prompt": "we went", "candidates": [".", "soup"], "best": 1},
    "labels": {"query": [3], "sample0": [4, 50259], "sample1": [5], "best": 0},
}
texts = st.text(st.characters(), max_size=10)  # with halves of surrogate pairs, which JSON can write
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts | st.sampled_from(["", "\0", "\ud800", "soup " * 9])
scalars |= st.sampled_from([10**4000, "a\u2028b", 2**63, -1])
anything = st.recursive(scalars, lambda x: st.lists(x, max_size=3) | st.dictionaries(texts, x, max_size=3), max_leaves=6)
SPECS = ["", "", "", ":part", ":", "[3:]", "[:-1]", "[5:2]", "[:]", "[-9:9]", "[", "[]", "[1]", "[a:b]", "[:1][:1]", "[٣:]", "[-:]"]
SPECS += [f"[{'9' * 5000}:]", f"[:-{'9' * 50}]", "[1:2:3]", ":a[1:]", "\n", "\0"]  # fmt: skip


def test_files():
    """Files that may hold anything."""

    def case(kind, suffix, content, part):
        file = Path(f"rows{suffix}")
        file.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
        done, line = outcome(read_and_encode, kind, f"{file}{part}")
        assert done or line.startswith("error: --dataset rows"), line
        file.unlink()

    lines = st.lists(anything | st.sampled_from(list(ROWS.values())), max_size=4)
    text = lines.map(lambda rows: "\n".join(map(json.dumps, rows))) | lines.map(json.dumps) | st.text(st.characters(), max_size=30)
    deep = st.sampled_from([900, 100_000]).map(lambda n: '{"prompt": "we", "other": ' + "[" * n + "]" * n + "}")
    twice = texts.map(lambda text: '{"prompt": "we", "prompt": ' + json.dumps(text) + "}")
    odd = st.sampled_from(
        ["9" * 5000, "\ufeff{}", "{", "{}\n{", "[{}", "NaN", "1e999", '"', "\n\n", "[]", "{}", "[[]]", "null\n[]"]
    )
    content = st.one_of(text, text, odd, deep, twice, st.binary(max_size=30))
    part = st.sampled_from(SPECS) | st.integers().map("[{}:]".format)
    fuzz("files", case, st.sampled_from(sorted(ROWS)), st.sampled_from([".jsonl", ".json"]), content, part)


def test_rows():
    """Good rows of which one has one column spoilt: the refusal names both."""

    def case(kind, number, column, value):
        rows = [dict(ROWS[kind]) for _ in range(3)]
        column = sorted(rows[0])[column % len(rows[0])]
        rows[number - 1] |= {column: value}
        if value is None:  # as good as a null: the column is missing
            del rows[number - 1][column]
        Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        done, line = outcome(read_and_encode, kind, "rows.jsonl")
        found = re.fullmatch(r"error: --dataset rows.jsonl: (.*)", line)
        if number == 1 and kind in ("text", "candidates", "labels"):  # the first row says what the others must be
            assert done or re.match(r"row \d", found[1]), line
        else:
            assert done or (f"row {number}" in found[1] and (column in found[1] or "tokens" in found[1])), line

    value = texts | texts | st.lists(texts, min_size=2, max_size=2) | st.lists(st.integers(), max_size=3) | anything
    fuzz("rows", case, st.sampled_from(sorted(ROWS)), st.integers(1, 3), st.integers(0, 3), value)


def test_tables():
    """.csv and .parquet, which the `datasets` library reads: tables of any cells, and files that are none."""
    ran = 0

    def case(kind, suffix, column, cells, junk, part):
        nonlocal ran
        ran += 1
        file = Path(f"rows{ran}{suffix}")  # a name of its own: the library keeps what it has read
        column = ["more", *ROWS[kind]][column % (len(ROWS[kind]) + 1)]
        rows = [ROWS[kind] | {column: cell} for cell in cells]
        if junk is not None:
            file.write_bytes(junk)
        elif suffix == ".csv":
            with open(file, "w", newline="") as stream:
                table = csv.DictWriter(stream, [*ROWS[kind]] if column != "more" else ["more", *ROWS[kind]])
                table.writeheader(), table.writerows(rows)
        else:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
        done, line = outcome(read_and_encode, kind, f"{file}{part}")
        assert done or line.startswith("error: --dataset rows"), line
        file.unlink()

    cell = st.text(max_size=5) | st.sampled_from(["we", "", "a,b", '"', "\0", "\n", "soup " * 9])
    cells = [st.lists(x, max_size=3) for x in (cell, cell, st.integers(-9, 9) | st.none(), st.lists(cell, max_size=2))]
    junk = st.none() | st.none() | st.binary(max_size=20)
    kinds, part = st.sampled_from(sorted(ROWS)), st.sampled_from(SPECS[:8])
    fuzz("tables", case, kinds, st.sampled_from([".csv", ".parquet"]), st.integers(0, 4), st.one_of(cells), junk, part)


# ---- names -----------------------------------------------------------------------------------------------------------
names = st.sampled_from(AWKWARD) | st.text(max_size=12) | st.lists(st.sampled_from(AWKWARD), max_size=3).map("/".join)
names = names.filter(lambda name: not name.startswith("/") and name.count("..") < 2)  # stays in the test's own folders


def make_folders(args):
    """Makes, and removes, the folders that a run of these arguments would end with: too late to find out then."""
    out, run = Path(args.output_dir).resolve(), args.run_name or f"{args.dataset.split('/')[-1].split('[')[0]}__{args.exp_name}"
    for path in (out.with_name(f"{out.name}.partial"), out, Path("runs") / run):
        missing = [p for p in (path, *path.parents) if not p.exists()]
        try:
            path.mkdir(parents=True, exist_ok=True)
        finally:
            shutil.rmtree(missing[-1], ignore_errors=True) if missing else None


def test_names():
    def case(script, dataset, output_dir, run_name, model):
        module = SCRIPTS[script]
        changes = {"dataset": dataset, "output_dir": output_dir, "run_name": run_name}
        changes |= dict.fromkeys(("base_model", "sft_model_path", "policy_path"), model)
        fields = [field.name for field in dataclasses.fields(module.Args)]
        args = module.Args(**toy.DEFAULTS[script] | {name: value for name, value in changes.items() if name in fields})
        _, line = outcome(check, module, args)
        if line:
            assert line.startswith("error: --"), line
        elif script != "evaluate":
            outcome(make_folders, args)
        done, line = outcome(read_and_encode, "ppo", dataset)
        assert done or line.startswith(("error: --dataset ", "error: data set toy:")), line

    fuzz("names", case, st.sampled_from(sorted(SCRIPTS)), names, names, st.none() | names, names)


def test_model_names_and_tokens():
    def case(name):
        _, line = outcome(utils.load_tokenizer, name, "--sft_model_path")
        assert line.startswith("error: --sft_model_path "), line
        _, line = outcome(utils.token_id, toy.tokenizer(), name, "--stop_token")
        assert not line or line.startswith("error: --stop_token "), line

    fuzz("models", case, names)


# ---- what this file has found ----------------------------------------------------------------------------------------
GOOD, LONG, HUGE = '{"prompt": "we"}', "a" * 300, "9" * 5000
FOUND_IN_ROWS = {
    "deep": ("[" * 10**5, "", "line 1"), "huge": (HUGE, "", "line 1"), "surrogate": ('{"prompt": "\\ud83d"}', "", "row 1"),
    "no place": (GOOD, "[-:]", "[-:]"), "far place": (GOOD, f"[{HUGE}:]", "cannot"), "long name": (GOOD, f"{LONG}.json", "no such"),
}  # fmt: skip


@pytest.mark.parametrize("text, suffix, part", FOUND_IN_ROWS.values(), ids=FOUND_IN_ROWS)
def test_found_in_rows(text, suffix, part):
    Path("rows.jsonl").write_text(text)
    line = outcome(read_and_encode, "ppo", f"rows.jsonl{suffix}")[1]
    assert line.startswith("error: --dataset rows.jsonl") and part in line


FOUND = {  # what was a traceback once, and where: flags, of train_ppo where nothing else is said, and a TOML file
    "RecursionError in parse_args": ("", "run_name = " + "[" * 2000),
    "AttributeError in parse_args": ("", "dataset = 5"),
    "AttributeError in parse_args, list": ("", "dataset = ['a.jsonl']"),
    "ValueError in tokens": ("", "seed = 0x" + "f" * 5000),
    "ValueError in parse_and_check": (f"--seed {2**64}", ""),
    "control characters": ("evaluate", "judge_model = '''a\nb'''"),
    "ValueError in check_output_dir": ("", 'output_dir = "a\\u0000b"'),
    "OSError in check_output_dir": (f"--output_dir {LONG}", ""),
    "OSError in check_output_dir, run": (f"--run_name {LONG}", ""),
    "OSError in check_output_dir, model": (f"--sft_model_path {LONG}", ""),
    "ValueError in check_results": ("evaluate", 'output_dir = "a\\u0000b"'),
    "OSError in check_results": (f"evaluate --output_dir {LONG}", ""),
    "OSError in make_folders": (f"--output_dir {'a' * 250}", ""),
    "OSError in make_folders, run": (f"--exp_name {LONG}", ""),
    "ValueError in make_folders": ("", 'run_name = "a\\u0000b"'),
    "OSError in find_tokenizer": (f"load_tokenizer {LONG}", ""),
    "TypeError in token_id": ("token_id \udcff", ""),
}


@pytest.mark.parametrize("name", FOUND)
def test_found(name):
    words, text = FOUND[name]
    Path("run.toml").write_text(text)

    def case():
        script, *argv = words.split() if words and not words.startswith("-") else ["train_ppo", *words.split()]
        if script == "load_tokenizer":
            utils.load_tokenizer(*argv, "--sft_model_path")
        elif script == "token_id":
            utils.token_id(toy.tokenizer(), *argv, "--stop_token")
        else:
            make_folders(parse_and_check(script, ["--config", "run.toml", *argv]))
        return True

    done, line = outcome(case)
    assert done or line.startswith("error: --")
