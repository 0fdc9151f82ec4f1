"""
Reads a script into blocks, in order and without a gap: at the rulers (# ---- title ---), functions, classes, methods.

A block is known by its key: "rloo_advantages", "Policy.forward", "4. Advantages" (a ruler's title up to its first colon
or semicolon), "module" (the docstring), "imports", or "for update" (the loop of main). No key has a line number.
"""

import ast
import html
import re
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path

import pygments
from latex2mathml.converter import convert
from markdown import markdown
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = {  # the annotated pages in order: what each is, and whose notes it takes where both have the same code
    "train_rloo": ("RLOO", None),
    "train_grpo": ("GRPO", "train_rloo"),
    "train_distill": ("On-policy distillation", "train_rloo"),
    "train_agent": ("RLOO over several turns", "train_rloo"),
    "train_ppo": ("PPO", "train_rloo"),
    "train_reward": ("Reward model", "train_rloo"),
    "train_dpo": ("DPO", "train_reward"),
    "train_sft": ("Supervised fine-tuning", None),
    "utils": ("What all scripts share", None),
    "noise": ("The bits of the noise", None),
}
MINIMAL = {  # the first pages of the site: each minimal page beside the page that it becomes, by the same titles
    (f"minimal/{name}", f"train_{name}"): f"{title} from minimal to page"
    for name, title in [
        ("rloo", "RLOO"),
        ("ppo", "PPO"),
        ("grpo", "GRPO"),
        ("distill", "Distillation"),
        ("agent", "Several turns"),
        ("reward", "Reward model"),
        ("dpo", "DPO"),
        ("sft", "SFT"),
    ]
}
DIFFS = {  # the pages that show two scripts side by side: the title of each; its file is the title in small letters
    ("train_ppo", "train_rloo"): "PPO to RLOO",
    ("train_rloo", "train_grpo"): "RLOO to GRPO",
    ("train_rloo", "train_distill"): "RLOO to distillation",
    ("train_rloo", "train_agent"): "RLOO to several turns",
    ("train_reward", "train_dpo"): "Reward model to DPO",
}
RULER = re.compile(r"^( *)# ---- (.*?)[ -]*$")
TAG = re.compile(r"\[([A-Z]+-\d+)\]")


class Mistake(Exception):
    """A mistake in the notes, which the build reports in one line."""


@dataclass
class Block:
    key: str
    level: int  # of its heading: 2 a section, 3 what stands in it
    title: str  # what the ruler says, or the key
    first: int  # its first line, from 1
    lines: list  # of source
    html: list  # the same lines, highlighted
    names: set  # that its code uses

    @property
    def slug(self):
        """The anchor of the block on its page."""
        return re.sub(r"[^a-z0-9_]+", "-", self.key.lower()).strip("-")

    @property
    def is_code(self):
        """Whether it is a function, a class or a method, and no part of one."""
        return self.lines[0].lstrip().startswith(("def ", "class ", "@"))

    @cached_property
    def code(self):
        """Its lines without comments, in no order: equal for two blocks where a line was only moved or explained."""
        return sorted(filter(None, (line.partition("#")[0].strip() for line in self.lines)))

    @cached_property
    def tags(self):
        """{tag: its line} of the tags in its comments, in order."""
        found = {}
        for number, line in enumerate(self.lines, self.first):
            found |= {tag: number for tag in TAG.findall(line.partition("#")[2]) if tag not in found}
        return found


@cache
def blocks(script):
    """The blocks of a script of rlhf_details, e.g. "train_rloo"."""
    source = (ROOT / "rlhf_details" / f"{script}.py").read_text(encoding="utf-8")
    lines = source.splitlines()
    code = pygments.highlight(source, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True)).splitlines()
    starts = {}  # {line: (key, level, title)}
    tree = ast.parse(source)
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            starts.setdefault("imports", node.lineno)
        elif isinstance(node, ast.If):
            starts[node.lineno] = "command line", 3, "command line"
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            starts[first_line(node)] = node.name, 3, node.name
            for inner in node.body:
                if isinstance(node, ast.ClassDef) and isinstance(inner, ast.FunctionDef) and inner.name != "__init__":
                    starts[first_line(inner)] = f"{node.name}.{inner.name}", 3, f"{node.name}.{inner.name}"
                if isinstance(inner, ast.For) and node.name == "main":
                    starts[inner.lineno] = f"for {ast.unparse(inner.target)}", 3, f"for {ast.unparse(inner.target)}"
    starts[1] = "module", 2, "What it does"
    starts[starts.pop("imports")] = "imports", 3, "Imports"
    for number, line in enumerate(lines, 1):
        if match := RULER.match(line):
            key = re.split("[:;]", match[2])[0].strip()
            if key in {other for other, _, _ in starts.values()}:  # a function of that name
                key += " (in main)"
            starts[number] = key, 3 if match[1] else 2, match[2]
    names = [(node.lineno, ast.unparse(node).removeprefix("utils.")) for node in ast.walk(tree) if is_name(node)]
    found = []
    for first, end in pairwise([*sorted(starts), len(lines) + 1]):
        used = {name for number, name in names if first <= number < end}
        found.append(Block(*starts[first], first, lines[first - 1 : end - 1], code[first - 1 : end - 1], used))
    return found


def is_name(node):
    """Whether it is a name, of the script itself or of utils.py."""
    return isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and ast.unparse(node.value) == "utils")


def first_line(node):
    """The line where a function or class begins, with its decorators."""
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def code_html(block, names=(), tags=()):
    """The block's code: numbered lines, functions of the page linked to their blocks, and tags to their cards.

    Where the tag REW-3 stands is the anchor "at-REW-3", which its card points to.
    """
    links = {tag: f'<a class="tag" href="#{tag}">[{tag}]</a>' for tag in tags}
    shown = len("\n".join(block.lines).rstrip().splitlines())  # Empty lines at the end are not drawn.
    lines = []
    for number, line in enumerate(block.html[:shown], block.first):
        line = re.sub(
            r'<span class="n">(\w+)</span>',
            lambda m: f'<a class="n" href="#{m[1].lower()}">{m[1]}</a>' if m[1] in names else m[0],
            line,
        )
        line = TAG.sub(lambda m: links.get(m[1], m[0]), line)
        for tag in (tag for tag in links if block.tags.get(tag) == number):
            line = line.replace(links[tag], links[tag].replace("<a ", f'<a id="at-{tag}" '), 1)
        lines.append(f'<span class="line" data-line="{number}">{line}</span>')
    return '<pre tabindex="0"><code>' + "\n".join(lines) + "</code></pre>"


def prose(text, names=()):
    """HTML of Markdown with equations, $..$ and $$..$$, as MathML; `names` in backticks are linked to their blocks."""
    equations = []

    def keep(match):
        kind = "block" if match[1] is not None else "inline"
        tex = (match[1] or match[2]).strip().replace(r"\log", r"\log\,")  # MathML has no space after a function.
        mathml = convert(tex, display=kind)
        if unknown := re.search(r"\\\w+", mathml):
            raise Mistake(f"latex2mathml does not know {unknown[0]}, in the equation {tex}")
        equations.append(f'<span class="equation {kind}-math">{mathml}</span>')
        return f"EQUATION{len(equations) - 1}."

    text = re.sub(r"\$\$(.+?)\$\$|\$(.+?)\$", keep, text, flags=re.S)
    text = markdown(text.strip(), extensions=["tables"])
    text = re.sub(r"EQUATION(\d+)\.", lambda m: equations[int(m[1])], text)
    return re.sub(
        r"<code>([\w.]+)</code>",
        lambda m: f'<a href="#{m[1].lower().replace(".", "-")}">{m[0]}</a>' if m[1] in names else m[0],
        text,
    )


def escape(text):
    """Text as HTML; `code` in backticks becomes code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))
