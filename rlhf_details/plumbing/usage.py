"""
What --help prints. It is read from the source of the Args classes, because to import a script takes seconds.

In an Args class a comment on a line of its own begins a group of flags, and the string below a flag is its help. What
follows "Your data:" in a script's docstring is the example at the end.
"""

import ast
import dataclasses
import inspect
import os
import re
import shutil
import textwrap
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from rlhf_details.plumbing import flags

VALUES = {"str": "TEXT", "int": "INT", "float": "NUMBER"}  # what the value of a flag of this type is called
COLUMN = 30  # where the text of a flag begins
NOTES = (
    "The defaults suit a pretrained model of 1 B parameters and data of your own. For models of other sizes and for "
    "--dataset toy, which is taken where no data set is given, other values take their place. A flag without a value "
    "is off unless given, and --no_FLAG switches it off again. Names may have - in place of _."
)


class Flag(NamedTuple):
    """A flag as the source has it."""

    group: str  # the comment above it, or above those before it
    kind: str  # its type
    default: str
    text: str


def show(script, argv=(), args_class=None):
    """Prints the help of a script on the main process and ends the program.

    Args: script, its path; argv, the command line of train_both.py; args_class, its Args where it has been imported.
    """
    parts = [("", "", inherited(args_class) if args_class else classes_in(script))]
    if Path(script).stem == "train_both":
        policy = "train_rloo.py" if re.search(r"--algorithm[ =]rloo", " ".join(argv)) else "train_ppo.py"
        names = (("reward.", "train_reward.py"), ("policy.", policy))
        parts = [("", "", [(script, "Both")])]
        parts += [(prefix, f" ({name})", classes_in(Path(script).with_name(name))) for prefix, name in names]
    about = ast.get_docstring(ast.parse(Path(script).read_text(encoding="utf-8"))) or ""
    width = min(shutil.get_terminal_size().columns, 120)
    lines = [*textwrap.wrap(about.partition("\n\n")[0], width), "", f"usage: python {script} [--flag value ..]"]
    lines += textwrap.wrap(NOTES, width)
    for prefix, addition, classes in parts:
        groups = {}
        for name, flag in flags_of(classes).items():
            if prefix == "policy.":  # train_both.py trains the reward model, and knows what the policy starts from.
                flag = flag._replace(text=re.sub(r" \(required.*\)", "", flag.text))
            titles = groups.setdefault(re.split("[,:;]", flag.group)[0], [flag.group + addition])
            titles += described(prefix, name, flag, width)
        for group in sorted(groups, key=lambda group: group.startswith("memory")):  # which comes last
            lines += ["", *groups[group]]
    _, _, example = about.partition("\nYour data: ")
    # A copied page keeps its parent's docstring, so the example takes the name of the script that is run.
    lines += ["", "example:", " ".join(["  python", str(script), *example.split()[2:]])] if example else []
    if os.environ.get("RANK", "0") == "0":
        print("\n".join(lines))
    raise SystemExit(0)


def inherited(args_class):
    """[(file, name)] of a class and of the classes that it inherits flags from, which come first."""
    return [(inspect.getfile(c), c.__name__) for c in reversed(args_class.__mro__) if dataclasses.is_dataclass(c)]


def classes_in(script):
    """[(file, name)] of Args in a script that has not been imported, after the classes of flags.py that it names."""
    base = re.search(r"^class Args\(cli\.(\w+)\)", Path(script).read_text(encoding="utf-8"), re.M)
    return [*(inherited(getattr(flags, base[1])) if base else []), (script, "Args")]


def flags_of(classes):
    """{name: Flag} of the classes [(file, name)]. A class may give a flag of its base another default and text."""
    found = {}
    for file, name in classes:
        source = Path(file).read_text(encoding="utf-8")
        lines = source.splitlines()
        (node,) = (n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == name)
        for field, after in pairwise([*node.body, None]):
            if isinstance(field, ast.AnnAssign):
                above = [line.strip(" #") for line in lines[node.lineno : field.lineno] if line.startswith("    #")]
                group = found[field.target.id].group if field.target.id in found else "".join(above[-1:])
                default = (ast.get_source_segment(source, field.value) if field.value else "").strip('"')
                text = " ".join(ast.literal_eval(after.value).split()) if isinstance(after, ast.Expr) else ""
                found[field.target.id] = Flag(group, ast.unparse(field.annotation), default, text)
    return found


def described(prefix, name, flag, width):
    """The lines of a flag: its name and what it takes, its text and its default."""
    choices, kind = re.findall(r"'([^']*)'", flag.kind), flag.kind.removesuffix(" | None")
    many = re.fullmatch(r"tuple\[(\w+), \.\.\.\]", kind)
    value = "|".join(choices) or (f"{VALUES.get(many[1])} .." if many else VALUES.get(kind, kind.upper()))
    is_on = f", --{prefix}no_{name}" * (flag.default == "True")
    head = f"  --{prefix}{name}{is_on}" if kind == "bool" else f"  --{prefix}{name} {value}"
    says_all = flag.default in ("", "()", "False") or "(required" in flag.text
    text = flag.text + f" (default: {flag.default})" * (not says_all)
    text = textwrap.wrap(text, width - COLUMN, break_on_hyphens=False)
    first = [f"{head:{COLUMN}}{text.pop(0)}"] if text and len(head) < COLUMN else [head]
    return first + [" " * COLUMN + line for line in text]
