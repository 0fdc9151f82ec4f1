"""Holds a library against the vectors: `python check.py NAME` calls it by adapters/NAME.py. `table` prints all results.

`python check.py NAME=VECTOR` says how one of them comes out, and writes nothing.

A function of an adapter has the name of a vector's `function`, takes its inputs as tensors (float32, which libraries
run in; masks are bool, an abstention is NaN) and returns the outputs that the library has. A vector's gradient is
compared with autograd's of the returned loss. An output is equal if it is off by at most 1e-5 of its largest entry.
"""

import importlib
import importlib.metadata
import importlib.util
import json
import math
import sys
import tomllib
from collections import Counter
from pathlib import Path

import oracle
import torch

HERE = Path(__file__).parent
RESULTS = HERE / "results"
MASKS = "mask", "ended"


class AnyName(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return AnyName(name, (), {})

    def __call__(cls, *given, **named):
        return given[0] if len(given) == 1 and callable(given[0]) else cls


class Replaced:
    """While entered, packages that are not installed are empty: any name in them is a class without a method.

    A decorator of theirs passes its function on. Only imports need them: what is computed with one of them fails.
    """

    def __init__(self, *packages):
        self.packages = [name for name in packages if not importlib.util.find_spec(name)]

    def __enter__(self):
        sys.meta_path.append(self)
        return self.packages

    def __exit__(self, *error):
        sys.meta_path.remove(self)
        for name in [name for name in sys.modules if name.split(".")[0] in self.packages]:
            del sys.modules[name]

    def find_spec(self, name, path=None, target=None):
        return (
            importlib.util.spec_from_loader(name, self, is_package=True)
            if name.split(".")[0] in self.packages
            else None
        )

    def create_module(self, spec):
        module = type(importlib)(spec.name)
        module.__getattr__ = lambda name: getattr(AnyName("module", (), {}), name)
        return module

    def exec_module(self, module):
        pass


def tensor(name, x):
    if name in MASKS:
        return torch.tensor(x).bool()
    if not isinstance(x, list) or name == "micro_batches":
        return x
    try:
        found = torch.tensor([math.nan if item is None else item for item in x])
    except (TypeError, ValueError):  # rows of different length
        return x
    return found.long() if not x else found


def worst(found, expected):
    """How far the output is off, in units of its largest entry; inf where shapes differ or a number is missing."""
    found = torch.as_tensor(found, dtype=torch.float64).detach()
    expected = torch.tensor(expected, dtype=torch.float64)
    if found.shape != expected.shape or not found.isfinite().all():
        return math.inf
    largest = expected.abs().max().item() or 0.1  # zeros may be off by 1e-6
    return ((found - expected).abs().max() / largest).item()


def measure(adapter, vector):
    """("equal", how far off), ("differs", ..), or ("none" or "not callable", why)."""
    function = getattr(adapter, vector["function"], None)
    inputs = {name: tensor(name, x) for name, x in vector["inputs"].items()}
    if "gradient" in vector["outputs"]:
        inputs["logprobs"].requires_grad_()
    try:
        if function is None:
            raise NotImplementedError("")
        found = function(**inputs)
        if "gradient" in vector["outputs"]:
            found["gradient"] = torch.autograd.grad(found["loss"], inputs["logprobs"])[0]
    except NotImplementedError as error:
        return ("not callable" if str(error).startswith("inside") else "none"), str(error)
    except Exception as error:
        return "differs", f"{type(error).__name__}: {error}".split("\n")[0][:90]
    off = max(worst(found[name], expected) for name, expected in vector["outputs"].items() if name in found)
    return ("equal" if off <= 1e-5 else "differs"), f"{off:.1e}"


def named(vector):
    """The vector of a name."""
    return next(v for vectors in oracle.load().values() for v in vectors if v["name"] == vector)


def verdicts(name):
    """{vector: what people found where it differs}, from verdicts.toml."""
    entries = tomllib.loads((HERE / "verdicts.toml").read_text()).get(name, [])
    return {vector: entry for entry in entries for vector in entry["vectors"]}


def check(name):
    adapter, known, rows = importlib.import_module(f"adapters.{name}"), verdicts(name), {}
    for vector in (vector for vectors in oracle.load().values() for vector in vectors):
        outcome, off = measure(adapter, vector)
        if outcome == "differs":
            outcome = known.get(vector["name"], {}).get("outcome", "difference")
        elif vector["name"] in known:
            outcome = f"STALE VERDICT, {outcome}"
        rows[vector["name"]] = [outcome, off]
    versions = {x: importlib.metadata.version(x) for x in (adapter.PACKAGE, "torch", "transformers")}
    found = {"versions": versions, "replaced": adapter.REPLACED, "outcomes": rows}
    lines = json.dumps(found, indent=1).replace("[\n   ", "[").replace("\n  ]", "]").replace(",\n   ", ", ")
    (RESULTS / f"{name}.json").write_text(lines + "\n")
    print(name, versions, dict(Counter(outcome for outcome, _ in rows.values())))


def table():
    """The results as Markdown: a row for each vector, a column for each library."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    names = [f"{next(iter(x['versions']))} {next(iter(x['versions'].values()))}" for x in found.values()]
    lines = ["| vector | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for family, vectors in oracle.load().items():
        lines.append(f"| **{family}** |" + " |" * len(names))
        for vector in vectors:
            outcomes = [x["outcomes"][vector["name"]][0] for x in found.values()]
            lines.append(f"| {vector['name']} | " + " | ".join(o.replace("none", "") for o in outcomes) + " |")
    counts = [Counter(o for o, _ in x["outcomes"].values()) for x in found.values()]
    kinds = "equal", "documented difference", "difference", "fault", "not callable"
    lines += [f"| **{kind}** | " + " | ".join(str(c[kind]) for c in counts) + " |" for kind in kinds]
    return "\n".join(lines)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        name, _, only = name.partition("=")
        if only:
            print(only, *measure(importlib.import_module(f"adapters.{name}"), named(only)))
        elif name == "table":
            print(table())
        else:
            check(name)
