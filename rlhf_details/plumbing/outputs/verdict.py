"""
What a run says at its end: its held-out figures, whether it has learnt, which bad signs showed, where the model is, and
how to evaluate it. It reads what a checkpoint keeps, so a resumed run is judged as a whole.
"""

import math
import shlex

from rlhf_details import toy
from rlhf_details.plumbing import console
from rlhf_details.plumbing.inputs import flags, token_ids
from rlhf_details.plumbing.outputs import hub
from rlhf_details.plumbing.outputs.statistics import average, wilson_interval

ACCURACIES = {"eval/rm/accuracy", "eval/rewards/accuracies"}  # on held-out comparisons


def last_lines(run, before, after, seconds):
    """All that a Run says at its end.

    Args: before, after, the eval/* of its first and its last evaluation; seconds, how long it took.
    """
    held_out = run.inputs[0]
    signs = ", ".join(f"health/{name}" for name in run.kept["said"]) or "none"
    return [
        *held_out_lines(before, after, len(held_out)),
        *learnt_lines(after, held_out, run.kept["by_prompt"]),
        *([f"bad signs: {signs}"] if run.kept["first"] else []),  # Runs of SFT and of a reward model look for none.
        f"model: {run.args.output_dir}   run: {run.folder}   {seconds:.0f} s",
        *evaluate_lines(run.args),
    ]


def as_text(name, metrics, count):
    """A held-out mean over `count` rows, with +- half its 95 % interval where its standard deviation is known."""
    p = metrics[name]
    std = math.sqrt(p * (1 - p)) if name in ACCURACIES else metrics.get(f"{name}_std")
    if std is None or count < 2:
        return f"{p:z.3f}"
    return f"{p:z.3f} +- {1.96 * std / math.sqrt(count - 1):.3f}"  # The deviations are the biased ones.


def held_out_lines(before, after, count):
    """Each held-out figure, before and after where there are two evaluations."""
    if not after:
        return ["no --eval_dataset: without held-out rows nothing says here whether the run has learnt"]
    evaluations = [before, after] if before != after else [after]
    lines = [f"{count} held-out rows, before -> after (+-: 95 % interval)"]
    for name in after:
        if not name.endswith("_std"):
            texts = [as_text(name, metrics, count) for metrics in evaluations if name in metrics]
            short = name.rpartition("/")[2]
            twice = [other for other in after if other.endswith(f"/{short}")][1:]  # rewards/chosen and logps/chosen
            lines.append(f"  {name.removeprefix('eval/') if twice else short:20} {' -> '.join(texts)}")
    return lines


def learnt_lines(after, held_out, by_prompt):
    """Whether score and gold have risen by more than chance, or the accuracy on comparisons is above it.

    Args: by_prompt, `of_each_prompt` of the first and the last evaluation. Both have the same prompts, so it looks at
    the difference of each prompt. A single prompt has no interval, and that of a handful is too narrow.
    """
    count = len(held_out)
    for accuracy in ACCURACIES & after.keys():
        chance = 1 / len(held_out[0].candidates)
        said, _ = verdict_of(*(x - chance for x in wilson_interval(after[accuracy] * count, count)))
        words = f"{as_text(accuracy, after, count)}, where guessing has {chance:.3f}"
        return [f"{said}: the accuracy on held-out comparisons is {words}"]
    found = []
    for name in by_prompt[0] if len(by_prompt) == 2 else ():
        pairs = zip(*(values[name] for values in by_prompt), strict=True)
        changes = [y - x for x, y in pairs if not math.isnan(y - x)]  # where no reward abstained
        if len(changes) < 2:
            continue
        change = average(changes)
        said, how = verdict_of(change["low"], change["high"])
        words = f"{how}, {change['value']:+z.3f} +- {change['high'] - change['value']:.3f} a prompt"
        if name == "gold":
            hint = "; the policy over-learns the reward: raise --kl_coef, or stop earlier"
            found.append(f"gold, the true reward, {words}{hint if how == 'fell' else ''}")
        else:
            # A teacher's page has no other score.
            what = "scores" if "eval/objective/scores" in after else "the negative of the KL from the teacher"
            found.append(f"{said}: {what} {words}, at a KL of {after['eval/objective/kl']:z.3f} nats per response")
    return found


def verdict_of(low, high):
    """(what is said of the run, what the number did), for a number whose change has the interval low .. high."""
    if low > 0:
        return "learnt", "rose"
    return ("not learnt", "fell") if high < 0 else ("not shown", "did not change beyond chance")


def of_each_prompt(tokenizer, prompts, responses, mask, ended, scores, *_):
    """{"scores": [N], and "gold": [N] on the embedded task} of a held-out evaluation. Args: Run.log's `samples`."""
    pairs = zip(prompts, token_ids.decode(tokenizer, responses, mask), strict=True)
    gold = [toy.gold(prompt.text, text) for prompt, text in pairs if prompt.task == "toy"]
    return {"scores": scores.tolist()} | ({"gold": gold} if gold else {})


def evaluate_lines(args):
    """The command that compares a trained policy with the one that it started from. Other models have none."""
    if hub.script_of(args) in ("train_sft.py", "train_reward.py"):
        return []
    start = args.sft_model_path
    dataset = args.eval_dataset or args.dataset
    given = {
        "policy_path": args.output_dir,
        "dataset": dataset,
        "opponent_path": start,
        "ref_model_path": getattr(args, "teacher_model_path", start),  # what training's KL is from
    }
    names = "prompt_template", "reward_model_path", "reward_fn", "reward_fn_weights"
    given |= {name: getattr(args, name) for name in names if getattr(args, name, None)}
    if getattr(args, "teacher_prompt_template", None):  # evaluate.py would let the teacher read the student's prompt.
        given["ref_model_path"] = None
    if dataset.startswith("toy:") and getattr(args, "reward_model_path", start) is None:
        given["reward_model_path"] = None  # not the one of evaluate.py's starting values
    if given.get("reward_fn") and args.reward_fn_format != "text":
        given["reward_fn_format"] = args.reward_fn_format
    return [f"evaluate: {shlex.join(['python', console.path_of('evaluate.py'), *flags.as_words(given)])}"]
