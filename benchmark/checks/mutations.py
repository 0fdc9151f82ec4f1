"""
Proof that each detail's test tests it: every detail is broken in a copy of the code, and its test must then fail.

    python benchmark/checks/mutations.py               all mutants, on two workers; writes results/mutations.md
    python benchmark/checks/mutations.py --only RM-4   those of one tag, or of several
    python benchmark/checks/mutations.py --show RM-4   the mutated lines, without running anything

A mutant is (tag, file, old, new): in the statement that the tag's comment speaks of, `old` becomes `new`. Both are
written as `ast.unparse` writes the statement, so reformatting the code changes nothing here. A tag that stands in
several files has a mutant in each, unless its statement is a copy of one that has a mutant. The copies are compared by
benchmark/tests/test_mutations.py. The tests of a tag are those whose names begin with it, of [RM-4] `test_rm_4_...`,
and those whose docstring has it in its brackets.
"""

import argparse
import ast
import difflib
import functools
import io
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 600  # after which a mutant's tests count as failed: it hangs. A loaded machine needs 480 for two processes.
PPO, RLOO, GRPO, DISTILL = "train_ppo.py", "train_rloo.py", "train_grpo.py", "train_distill.py"
AHEAD = "plumbing/overlap.py"
RM, DPO, SFT, EVALUATE, UTILS = "train_reward.py", "train_dpo.py", "train_sft.py", "evaluate.py", "utils.py"
DATA, COMPARISONS = "plumbing/data.py", "plumbing/comparisons.py"
MODELS, ENGINES, LAYOUT = "plumbing/models.py", "plumbing/engines.py", "plumbing/layout.py"
JUDGE, REPORT = "plumbing/judge.py", "plumbing/evaluation.py"

END = "scores - penalty if mode == 'subtract' else torch.full_like(scores, -penalty)"
READ = "truncate_response(responses, response_mask, end_ids, args.truncate_after)"
OWN_SHARE = "(lambda xs: tuple((torch.cat([x] * world) for x in xs)))("
BOTH = "_, _, values = in_slices(response_logprobs, policy, batch, size); old_logprobs = sampled_logprobs"
NORMAL = "normalise(score_rows(reward, samples, size * K, accelerator))"
ROWS, COPIES = "for prompt in prompts.of_update(update, B // k, args.seed)", "for _ in range(k)"
MIXED = "torch.logaddexp(math.log(beta) + teacher_logp, math.log1p(-beta) + logp)"
UNBIASED = "masked_mean((x - mean) ** 2, mask) * mask.sum() / (mask.sum() - 1)"
MUTATIONS = [
    (
        "DATA-1",
        UTILS,
        "tokenizer(completion, add_special_tokens=False).input_ids",
        "tokenizer(prompt + completion, add_special_tokens=False).input_ids[len(ids):]",
    ),
    ("DATA-2", UTILS, "[*answer, tokenizer.eos_token_id]", "answer"),
    ("DATA-3", UTILS, "add_special_tokens=False", "add_special_tokens=True"),
    ("DATA-4", COMPARISONS, " if i != LABEL_PAD", ""),
    ("DATA-5", UTILS, "[0] * (width - len(row)) + list(row)", "list(row) + [0] * (width - len(row))"),
    ("DATA-6", UTILS, "mask.cumsum(-1)", "mask.new_ones(mask.shape).cumsum(-1)"),
    ("DATA-7", DATA, "seed, epoch", "seed"),
    ("MODEL-1", UTILS, "module.p = 0.0", "module.p = module.p"),
    ("MODEL-2", UTILS, "setattr(module, name, 0.0)", "value"),
    ("MODEL-3", MODELS, "torch.float32", "torch.bfloat16"),
    ("MODEL-4", PPO, "models.frozen_copy(policy)", "Policy(policy.model, args.temperature)"),
    ("MODEL-4", RLOO, "models.frozen_copy(policy)", "Policy(policy.model, args.temperature)"),
    ("MODEL-5", MODELS, "if missing", "if not missing"),
    ("SFT-1", SFT, "if completion_only", "if True"),
    ("SFT-2", SFT, "is_target[:, 1:]", "is_target[:, :-1]"),
    ("SFT-3", SFT, "losses.sum() / num_targets", "losses.mean() / len(micro_batches)"),
    ("RM-1", RM, "1 / math.sqrt(model.score.in_features + 1)", "0.02"),
    ("RM-2", RM, "engines.start(args)", "engines.start(args); torch.seed()"),
    ("RM-3", RM, "tokenizer.add_special_tokens({'pad_token': '[PAD]'})", "tokenizer.pad_token = tokenizer.eos_token"),
    ("RM-4", RM, "(mask * torch.arange(mask.size(1), device=mask.device)).argmax(1)", "mask.sum(1) - 1"),
    ("RM-5", RM, "torch.ones(1)", "torch.ones(1), requires_grad=False"),
    ("RM-6", RM, "enabled=False", "enabled=True"),
    ("RM-6", PPO, "enabled=False", "enabled=True"),
    ("RM-6", RLOO, "enabled=False", "enabled=True"),
    ("RM-7", RM, "cross_entropy(scores,", "cross_entropy(scores.sigmoid(),"),
    ("RM-8", RM, "> others", ">= others"),
    ("RM-9", RM, f"{NORMAL}[0]", "1.0"),
    ("RM-10", RM, NORMAL, "(1.0, 0.0)"),
    ("RM-11", RM, "'none' if", "'eos' if"),
    ("RM-12", RM, "-score_rows(reward, references, size * K, accelerator).mean().item()", "0.0"),
    ("RM-13", RM, " * weights['gain']", ""),
    ("RM-14", RM, "minibatch[rank::world]", "minibatch[:len(minibatch) // world]"),
    ("GEN-1", UTILS, "logits + gumbel_noise(fold(keys, t), logits.size(-1))", "logits"),
    ("GEN-2", PPO, " / self.temperature", ""),
    ("GEN-2", RLOO, " / self.temperature", ""),
    ("GEN-3", PPO, " / self.temperature", ""),
    ("GEN-3", RLOO, " / self.temperature", ""),
    ("GEN-4", UTILS, "fold(keys, coordinate)", "keys + coordinate"),
    ("GEN-5", UTILS, "~torch.isin(token, stop_ids)", "(token == token)"),
    ("GEN-6", UTILS, "position + t", "Q + t + 0 * position"),
    ("GEN-7", PPO, "queries.size(1) - 1", "queries.size(1)"),
    ("GEN-7", RLOO, "torch.where(step == 0, Q - 1, column[Q:] - 1)", "column[Q:] - 1"),
    ("GEN-8", UTILS, "max(1, size)", "10 ** 9"),
    ("GEN-9", PPO, "old_logprobs, _, values = in_slices(response_logprobs, policy, batch, size)", BOTH),
    ("GEN-9", RLOO, "in_slices(response_logprobs, policy, batch, size, n)", "(sampled_logprobs, 0)"),
    ("GEN-10", AHEAD, "engines.whole_copy(self.accelerator, policy)", "policy"),
    ("GEN-11", PPO, "old_logprobs = sampled_logprobs", "old_logprobs = old_logprobs"),
    ("GEN-12", PPO, "ends[:, :after] = False", "after"),
    ("GEN-13", PPO, "mask & torch.isin(responses, end_ids)", "torch.isin(responses, end_ids)"),
    ("GEN-13", RLOO, "mask & torch.isin(responses, stop_ids)", "torch.isin(responses, stop_ids)"),
    ("GEN-16", UTILS, "stop_ids", "stop_ids[:1]"),
    ("GEN-15", RLOO, "old_logprobs - sampled_logprobs", "sampled_logprobs - old_logprobs"),
    ("GEN-15", UTILS, "ratio.clamp(max=cap)", "ratio"),
    ("GEN-14", PPO, READ, f"(response_mask, {READ}[1])"),
    ("REW-1", PPO, "getattr(model.config, 'reward_bias', 0.0)", "0.0"),
    ("REW-1", RLOO, "getattr(model.config, 'reward_bias', 0.0)", "0.0"),
    ("REW-2", PPO, "batch.response_mask.sum(1", "torch.ones_like(batch.response_mask).sum(1"),
    ("REW-2", RLOO, "batch.response_mask.sum(1)", "torch.ones_like(batch.response_mask).sum(1)"),
    ("REW-3", PPO, END, "scores"),
    ("REW-3", RLOO, END, "scores"),
    ("REW-4", PPO, "nansum", "sum"),
    ("REW-4", RLOO, "nansum", "sum"),
    ("REW-5", PPO, "logprobs - ref_logprobs", "(logprobs - ref_logprobs) ** 2 / 2"),
    ("REW-5", RLOO, "old_logprobs - ref_logprobs", "(old_logprobs - ref_logprobs) ** 2 / 2"),
    ("REW-6", PPO, "logprobs * batch.response_mask", "logprobs"),
    ("REW-6", RLOO, " * batch.response_mask", ""),
    ("REW-7", PPO, "accelerator.gather(", OWN_SHARE),
    ("REW-7", RLOO, "accelerator.gather(", OWN_SHARE),
    ("PPO-1", PPO, "copy.deepcopy(reward_model)", "reward_model"),
    ("PPO-2", PPO, "nn.init.zeros_(critic.weight)", "critic.weight"),
    ("PPO-3", PPO, "hidden.float()", "hidden.detach().float()"),
    ("PPO-4", PPO, "policy.parameters()", "policy.model.parameters()"),
    ("PPO-5", PPO, " | nn.functional.pad(response_mask, (1, 0), value=True)[:, :-1]", ""),
    (
        "PPO-6",
        PPO,
        "value_mask(response_mask).sum(1, keepdim=True) - 1",
        "response_mask.new_ones(response_mask.shape).sum(1, keepdim=True) - 1",
    ),
    ("PPO-7", PPO, "torch.expm1(-d) + d", "torch.expm1(d) - d"),
    ("PPO-8", PPO, "shift_mean=False", "shift_mean=True"),
    ("PPO-9", PPO, "gamma * lam * advantage", "gamma * advantage"),
    ("PPO-10", PPO, "response_mask)", "torch.ones_like(response_mask))"),
    ("PPO-11", UTILS, "masked_mean((x - mean) ** 2, mask)", UNBIASED),
    ("PPO-12", PPO, "torch.max(losses1, losses2)", "losses2"),
    ("PPO-13", PPO, "torch.max(errors, clipped_errors)", "errors"),
    ("PPO-14", PPO, "args.vf_coef * ", ""),
    ("PPO-15", PPO, "min(max(kl / target - 1, -0.2), 0.2)", "kl / target - 1"),
    ("PPO-16", PPO, "logged_kl.mean().item()", "logged_kl[0].item()"),
    ("PPO-17", PPO, "> args.ratio_threshold", "> math.inf"),
    ("PPO-18", PPO, "> 1.5 * args.target_kl", "> math.inf"),
    ("PPO-19", PPO, " + delta ** 2 * count * len(x) / total", ""),
    ("RLOO-1", RLOO, f"{ROWS} {COPIES}", f"{COPIES} {ROWS}"),
    ("RLOO-2", RLOO, "kl.sum(1)", "utils.masked_mean(kl, response_mask)"),
    ("RLOO-3", RLOO, "(rewards.sum(1, keepdim=True) - rewards) / (k - 1)", "rewards.mean(1, keepdim=True)"),
    ("RLOO-4", RLOO, "kl.flip(1).cumsum(1).flip(1)", "kl.sum(1, keepdim=True).expand(kl.shape)"),
    ("RLOO-5", RLOO, "logratio.sum(1)", "logratio.sum(1) / mask.sum(1).clamp(min=1)"),
    ("RLOO-6", RLOO, "torch.max(losses1, losses2)", "losses2"),
    ("RLOO-7", RLOO, "logprobs.detach() if one_step else old_logprobs[m]", "old_logprobs[m]"),
    ("RLOO-8", RLOO, ".reshape(-1)", ".T.reshape(-1)"),
    ("RLOO-9", RLOO, "(owner == 0) | (owner.unsqueeze(1) == owner)", "owner >= 0"),
    ("RLOO-10", RLOO, "keepdim=True) + step", "keepdim=True) + torch.arange(n * R, device=device)"),
    ("RLOO-11", RLOO, " | torch.eye(len(column), dtype=torch.bool, device=device)", ""),
    ("RLOO-12", LAYOUT, "if gap < 0.001", "if True"),
    ("RLOO-13", RLOO, "if clip_range is None", "if clip_range is None or not normalize"),
    ("RLOO-14", RLOO, "is_action)", "torch.ones_like(is_action))"),
    ("SFT-2", DPO, "L - width - 1, L - 1", "L - width, L"),
    ("DPO-1", DPO, ".sum(1)", ".mean(1)"),
    ("DPO-2", DPO, "scores.log_softmax(1)", "scores.sigmoid().log()"),
    ("DPO-3", DPO, " - 1 / (2 * beta)", " - beta"),
    (
        "DPO-4",
        DPO,
        "candidate_logprobs(policy, train, size, accelerator)",
        "0 * candidate_logprobs(policy, train, size, accelerator)",
    ),
    ("RM-14", DPO, "[rank::world]", "[:B // world]"),
    ("OPT-4", DPO, "eps=args.adam_eps, ", ""),
    ("OPT-5", DPO, "losses.sum() / B", "losses.mean() / len(micro_batches) / world"),
    ("OPT-6", DPO, " * world", ""),
    ("EVAL-5", EVALUATE, "math.comb(n - right, k) / math.comb(n, k)", "(1 - right / n) ** k"),
    ("GRPO-1", GRPO, "scale == 'group'", "scale != 'group'"),
    ("GRPO-2", GRPO, "difference.expm1() - difference", "-difference"),
    ("GRPO-3", GRPO, "1 + cliprange_high", "1 + cliprange"),
    ("GRPO-4", GRPO, "mask.sum(1, keepdim=True)", "mask.sum(1, keepdim=True).float().mean()"),
    ("GRPO-5", GRPO, " / mask.sum(1, keepdim=True).clamp(min=1)", ""),
    ("GRPO-6", GRPO, ".detach()", ""),
    ("GRPO-7", GRPO, "ended if ", "~ended if "),
    ("GRPO-8", GRPO, "~in_equal_group", "in_equal_group"),
    ("GRPO-9", GRPO, "mask.size(1) - buffer", "mask.size(1)"),
    ("DISTILL-1", DISTILL, "teacher_logprobs - old_logprobs", "old_logprobs - teacher_logprobs"),
    ("DISTILL-2", DISTILL, "gamma * later", "later"),
    ("DISTILL-3", DISTILL, MIXED, "torch.logaddexp(math.log(beta) + logp, math.log1p(-beta) + teacher_logp)"),
    ("DISTILL-4", DISTILL, "kl_divergence(teacher_logp, logp)", "kl_divergence(logp, teacher_logp)"),
    ("DISTILL-5", DISTILL, "models.check_same_tokens(", "(lambda *_: None)("),
    ("DISTILL-6", DISTILL, "args.temperature", "1.0"),
    ("DISTILL-7", DISTILL, " > ", " >= "),
    ("GEN-9", DISTILL, "in_slices(response_logprobs, policy, batch, size)", "(sampled_logprobs, 0)"),
    ("REW-6", DISTILL, " * batch.response_mask", ""),
    ("REW-7", DISTILL, "accelerator.gather(", OWN_SHARE),
    ("OPT-1", UTILS, "step - 1 - warmup", "step - warmup"),
    ("OPT-2", PPO, "utils.learning_rate_at(update, num_updates, args)", "args.learning_rate"),
    ("OPT-2", RLOO, "utils.learning_rate_at(update, num_updates, args)", "args.learning_rate"),
    ("OPT-3", UTILS, " / math.sqrt(1 - beta2 ** step)", ""),
    ("OPT-4", PPO, "eps=args.adam_eps, ", ""),
    ("OPT-4", RLOO, "eps=args.adam_eps, ", ""),
    ("OPT-4", SFT, "eps=args.adam_eps, ", ""),
    ("OPT-4", RM, "eps=args.adam_eps, ", ""),
    ("OPT-5", PPO, "losses.sum() / num_actions", "losses.sum() / response_mask[m].sum() / len(micro_batches)"),
    ("OPT-5", RLOO, "losses.sum() / num_actions", "losses.sum() / is_action[m].sum() / len(micro_batches)"),
    ("OPT-5", GRPO, "len(minibatch)", "len(m) * len(micro_batches) ** 2"),
    ("OPT-5", RM, "losses.sum() / B", "losses.mean() / len(micro_batches) / world"),
    ("OPT-6", PPO, " * world", ""),
    ("OPT-6", RLOO, " * world", ""),
    ("OPT-6", SFT, " * world", ""),
    ("OPT-6", RM, " * world", ""),
    ("OPT-7", ENGINES, "if is_last", "if True"),
    ("OPT-8", ENGINES, "max_grad_norm or math.inf", "math.inf"),
    ("OPT-9", PPO, "update, epoch", "update"),
    ("OPT-9", RLOO, "update, epoch", "update"),
    ("OPT-10", PPO, "math.ceil(args.total_episodes / B)", "args.total_episodes // B"),
    ("OPT-10", RLOO, "math.ceil(args.total_episodes / B)", "args.total_episodes // B"),
    ("LOG-1", PPO, "-(old_logprobs * response_mask).sum(1)", "-(old_logprobs - 1.0 * ~response_mask).sum(1)"),
    ("LOG-1", RLOO, "-(logged * response_mask).sum(1)", "-(logged - 1.0 * ~response_mask).sum(1)"),
    ("LOG-1", GRPO, "-(logged * response_mask).sum(1)", "-(logged - 1.0 * ~response_mask).sum(1)"),
    ("LOG-2", UTILS, "accelerator.reduce(sums, 'sum')", "sums"),
    ("LOG-3", PPO, "0.5 * logratio ** 2", "logratio ** 2"),
    ("LOG-3", RLOO, "0.5 * logratio ** 2", "logratio ** 2"),
    ("LOG-3", GRPO, "0.5 * logratio ** 2", "logratio ** 2"),
    ("LOG-4", UTILS, "square - mean ** 2", "square"),
    ("LOG-5", PPO, "-state['kl_coef']", "state['kl_coef']"),
    ("LOG-5", RLOO, "'objective/non_score_reward': -args.kl_coef", "'objective/non_score_reward': args.kl_coef"),
    ("LOG-6", PPO, "if epoch == number == 0", "if True"),
    ("LOG-6", RLOO, "if epoch == number == 0", "if True"),
    ("EVAL-1", JUDGE, "utils.permutation(2, seed, PAIR_ORDER, number)[0] == 0", "True"),
    ("EVAL-2", EVALUATE, ".get(v, 0.0)", ".get(v, 0.5)"),
    ("EVAL-3", EVALUATE, "sample_responses(policy", "sample_responses(Policy(policy.model, own.temperature)"),
    ("EVAL-4", REPORT, "for side in sides", "for side in [sides[0], sides[0]]"),
]


@functools.cache
def tags_in(source):
    """{tag: the line (from 1) of the statement that it speaks of} of the tags in the comments of a Python source.

    A comment beside code speaks of that line, and a comment of its own speaks of the next line of code.
    """
    found, code = {}, set()
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    blank = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokens:
        if token.type not in blank:
            code |= set(range(token.start[0], token.end[0] + 1))
    for token in tokens:
        if token.type == tokenize.COMMENT:
            for tag in re.findall(r"\[([A-Z]+-\d+)\]", token.string):
                if tag in found:
                    raise ValueError(f"[{tag}] stands twice")
                found[tag] = next(n for n in sorted(code) if n >= token.start[0])
    return found


@functools.cache
def statements(source):
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]


def statement_of(source, tag):
    """The smallest statement that a tag speaks of, a node of the syntax tree."""
    line = tags_in(source)[tag]
    holders = [node for node in statements(source) if node.lineno <= line <= node.end_lineno]
    return min(holders, key=lambda n: n.end_lineno - n.lineno)


def mutate(source, tag, old, new):
    """The source with `old` turned into `new` in the statement of a tag; ValueError unless it is there once."""
    statement = statement_of(source, tag)
    text = ast.unparse(statement)
    if text.count(old) != 1:
        raise ValueError(f"[{tag}]: {old!r} is there {text.count(old)} times in\n{text}")
    lines = source.splitlines()
    indent = " " * statement.col_offset
    changed = [indent + x for x in text.replace(old, new).splitlines()]
    mutant = "\n".join([*lines[: statement.lineno - 1], *changed, *lines[statement.end_lineno :]]) + "\n"
    ast.parse(mutant)
    return mutant


def sources(root=ROOT):
    """{file below rlhf_details: its source}, the pages and modules that may have tags."""
    folder = root / "rlhf_details"
    return {str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))}


def without_mutant(root=ROOT):
    """[(tag, file), ...] of the tags that have no mutant there, and whose statement is no copy of one that has."""
    code, having = sources(root), {(tag, file) for tag, file, _, _ in MUTATIONS}
    texts = {(tag, file): ast.unparse(statement_of(s, tag)) for file, s in code.items() for tag in tags_in(s)}
    return [
        (tag, file)
        for (tag, file), text in texts.items()
        if (tag, file) not in having and not any(other[0] == tag and texts.get(other) == text for other in having)
    ]


@functools.cache
def all_tests(root):
    """{"tests/FOLDER/test_x.py::test_name": the tags in its docstring} of the tests in a copy of the repository."""
    found = {}
    for path in sorted((root / "tests").rglob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                tags = re.findall(r"\[([A-Z]+-\d+)\]", ast.get_docstring(node) or "")
                found[f"{path.relative_to(root)}::{node.name}"] = tags
    return found


def tests_of(tag, root=ROOT):
    """The tests named after a tag, and those whose docstring has it."""
    prefix = f"test_{tag.lower().replace('-', '_')}_"
    return [test for test, tags in all_tests(root).items() if tag in tags or test.split("::")[1].startswith(prefix)]


def copy_of(root, folder):
    """Copies what git tracks, or would, into a folder; returns the folder."""
    command = ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
        if (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, folder / name)
    return folder


def run_tests(folder, tests, output):
    """Runs in a forked child: pytest on the copy in `folder`; ends the child with pytest's exit code."""
    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(folder)
    sys.path[:0] = [str(folder)]
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
    import pytest

    options = ["-x", "-q", "--tb=line", "-p", "no:cacheprovider", "-m", "slow or not slow"]
    os._exit(pytest.main([*options, "--basetemp", f"{folder}.tmp", *tests]))


def judge(folder, tests):
    """(pytest's exit code, or None after SECONDS; the line that failed; seconds) of tests on the copy in `folder`."""
    start, output = time.time(), f"{folder}.out"
    child = multiprocessing.get_context("fork").Process(target=run_tests, args=(folder, tests, output))
    child.start()
    child.join(SECONDS)
    if child.is_alive():
        child.kill(), child.join()
        return None, f"no end after {SECONDS} s", time.time() - start
    text = Path(output).read_text()
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)(?: - (.*))?", text, re.M)
    return child.exitcode, " ".join(failed[0]).strip() if failed else text[-300:], time.time() - start


def worker(mutants, results):
    """Takes mutants from a queue, breaks a copy of its own with each, and puts the tests' verdict into `results`."""
    scratch = Path(tempfile.mkdtemp(prefix="mutations-"))
    folder = copy_of(ROOT, scratch / "copy")
    while (mutant := mutants.get()) is not None:
        tag, file, old, new = mutant
        path = folder / "rlhf_details" / file
        source, tests = path.read_text(), tests_of(tag, folder)
        try:
            path.write_text(mutate(source, tag, old, new))
            results.put((mutant, *judge(folder, tests)) if tests else (mutant, 0, "no test has its name", 0.0))
        finally:
            path.write_text(source)
    shutil.rmtree(scratch)


def is_killed(code):
    """Whether pytest's exit code says that a test failed (1) or hung (None). With others no test has run."""
    return code in (1, None)


def table(rows):
    """The report: one line a mutant."""
    killed = sum(is_killed(code) for _, code, _, _ in rows)
    seconds = sum(row[3] for row in rows)
    lines = [f"{killed} of {len(rows)} mutants killed by the tests of their own tag; {seconds:.0f} s of tests.", ""]
    lines += ["| tag | file | `old` -> `new` | killed by | s |", "|---|---|---|---|---:|"]
    for (tag, file, old, new), code, said, spent in rows:
        change = f"`{old}` -> {f'`{new}`' if new else 'nothing'}".replace("|", "\\|")
        verdict = (
            f"`{said.split('::')[-1].split(' ')[0]}`"
            if is_killed(code)
            else f"**survived** (pytest's exit code {code})"
        )
        lines.append(f"| {tag} | `{file}` | {change} | {said if code is None else verdict} | {spent:.0f} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="tags")
    parser.add_argument("--show", nargs="+", help="tags whose mutants are printed, and not run")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    chosen = [m for m in MUTATIONS if m[0] in (args.only or args.show or [x[0] for x in MUTATIONS])]
    if args.show:
        for tag, file, old, new in chosen:
            source = (ROOT / "rlhf_details" / file).read_text()
            pair = (x.splitlines(True) for x in (source, mutate(source, tag, old, new)))
            sys.stdout.writelines(difflib.unified_diff(*pair, file, file))
        return 0
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in "torch transformers accelerate datasets tyro wandb pytest".split():  # once, for all children
        __import__(name)
    start, context = time.time(), multiprocessing.get_context("fork")
    mutants, results = context.Queue(), context.Queue()
    for mutant in [*chosen, *[None] * args.workers]:
        mutants.put(mutant)
    workers = [context.Process(target=worker, args=(mutants, results)) for _ in range(args.workers)]
    for process in workers:
        process.start()
    rows = []
    for _ in chosen:
        rows.append(results.get())
        (tag, file, *_), code, said, seconds = rows[-1]
        verdict = "killed" if is_killed(code) else "SURVIVED"
        print(f"{len(rows):3} {tag:8} {file:16} {verdict} {seconds:5.1f} s  {said[:150]!r}", flush=True)
    rows.sort(key=lambda row: chosen.index(row[0]))
    report = table(rows)
    print(report.splitlines()[0], f"{time.time() - start:.0f} s on {args.workers} workers.")
    if not args.only:
        (ROOT / "benchmark" / "results" / "mutations.md").write_text(report)
    return int(not all(is_killed(code) for _, code, _, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
