"""The labels of openai/lm-human-preferences (offline_5k.json): rows of token ids, their held-out tail, TensorFlow's Adam."""

import json
import math
import random
from pathlib import Path

import datasets
import pytest
import torch
import transformers
from conftest import launch, read_metrics
from test_bad_input import assert_one_line, contents
from test_rloo import assert_same_curves, without_times
from tokenizers import Tokenizer, models, pre_tokenizers

from rlhf_details import data, train_reward, train_rloo, utils

PAD, LIKED, WORDS, EOS = 50259, 7, 40, 0  # the labels' padding; the token the made-up human likes; tokens of the tiny model
Q, R, ROWS = 10, 6, 160  # token ids of a query (padded) and of a sample


def make_rows(number=ROWS, seed=0):
    """Rows of the shape of offline_5k.json: queries padded on the right, the best sample has most of one token."""
    rng = random.Random(seed)
    rows = []
    for _ in range(number):
        query = [rng.randrange(1, WORDS) for _ in range(rng.randint(3, Q))]
        liked = rng.sample(range(4), 4)  # how often each sample has the token
        others = [i for i in range(1, WORDS) if i != LIKED]
        samples = [rng.sample([LIKED] * n + rng.choices(others, k=R - n), R) for n in liked]
        row = {f"sample{k}": samples[k] for k in (2, 3, 0, 1)}  # the file's columns come in no order
        row["query"] = query + [PAD] * (Q - len(query))
        rows.append(row | {"best": liked.index(3)})
    rows[1]["sample2"][2:] = [PAD] * (R - 2)  # shorter ones are padded as well
    rows[1]["query"] = [PAD, 3, 4, 5, PAD, 6, 9, PAD, PAD, PAD]  # and padding may stand anywhere
    return rows


def real(ids):
    return [i for i in ids if i != PAD]


def sequences(rows):
    """The token ids that the model should read, [[ids of query and sample]] * 4 for each row."""
    return [[real(row["query"]) + real(row[f"sample{k}"]) for k in range(4)] for row in rows]


def write(path, rows, lines=False):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("".join(json.dumps(r) + "\n" for r in rows) if lines else json.dumps(rows, indent=1))
    return str(path)


def save_gpt2(folder, **special):
    """A random GPT-2 of 40 words, its EOS (id 0) one of them; no padding token unless one is given."""
    torch.manual_seed(0)
    sizes = dict(n_embd=32, n_layer=2, n_head=4, n_positions=32, vocab_size=WORDS, bos_token_id=EOS, eos_token_id=EOS)
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, initializer_range=0.2)).save_pretrained(folder)
    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w1"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="w0", **special).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory):
    return save_gpt2(tmp_path_factory.mktemp("gpt2") / "policy")


@pytest.fixture
def labels(in_tmp):
    """labels.json with 160 rows, in an empty folder; returns the rows."""
    rows = make_rows()
    write("labels.json", rows)
    return rows


def run(gpt2, **changes):
    """One run of train_reward on labels.json; returns its rows of metrics."""
    values = dict(
        dataset="labels.json", sft_model_path=gpt2, batch_size=32, micro_batch_size=16, learning_rate=1e-3, response_length=R,
        normalization="none", lr_schedule="linear", weight_decay=0.0, run_name="run", output_dir="reward", overwrite=True,
    )  # fmt: skip
    train_reward.main(train_reward.Args(**(values | changes)))
    return read_metrics("runs/run")


@pytest.fixture
def seen(monkeypatch):
    """Every (tokens, mask) that a reward model is given."""
    calls, forward = [], train_reward.Reward.forward

    def record(self, tokens, mask):
        calls.append((tokens, mask))
        return forward(self, tokens, mask)

    monkeypatch.setattr(train_reward.Reward, "forward", record)
    return calls


def rows_of(calls):
    return [t[m].tolist() for tokens, mask in calls for t, m in zip(tokens, mask, strict=True)]


# ---- what is learnt and what the model reads -------------------------------------------------------------------------
def test_it_learns_the_planted_preference_from_chance(labels, gpt2):
    metrics = run(gpt2, dataset="labels.json[:128]", eval_dataset="labels.json[128:]", num_train_epochs=10, learning_rate=3e-3)
    assert metrics[0]["train/rm/accuracy"] < 0.45 and metrics[-1]["train/rm/accuracy"] > 0.9
    assert metrics[-1]["eval/rm/accuracy"] > 0.6 and metrics[-1]["eval/rm/loss"] < 1.1 < metrics[0]["train/rm/loss"]


def test_labels_that_say_nothing_are_at_chance(labels, gpt2):
    """Each sample is the best one in turn: accuracy is 1/4 whatever the scores are, and the loss no lower than log 4."""
    write("labels.json", [row | {"best": best} for row in labels[:32] for best in range(4)])
    metrics = run(gpt2, batch_size=128, learning_rate=0.0)[0]
    assert metrics["train/rm/accuracy"] == 0.25 and math.log(4) < metrics["train/rm/loss"] < math.log(4) + 0.7
    assert train_reward.best_of_k_loss(torch.zeros(3, 4), torch.tensor([0, 3, 1])).item() == pytest.approx(3 * math.log(4))


def test_data_4_the_token_ids_reach_the_model_as_they_are(labels, gpt2, seen, monkeypatch):
    """No tokenizer, no EOS, no 50259: each row is its query and its sample without padding, the mask says so exactly."""
    looked_up, embed = [], torch.nn.Embedding.forward
    monkeypatch.setattr(torch.nn.Embedding, "forward", lambda self, ids: looked_up.append(int(ids.max())) or embed(self, ids))
    run(gpt2, normalization="mean_shift")
    order, wanted = utils.permutation(ROWS, 1, 0), sequences(labels)
    in_training = [wanted[i][k] for i in order for k in range(4)]
    assert rows_of(seen) == in_training + [s for four in wanted for s in four]  # mean_shift scores every candidate afterwards
    assert max(looked_up) < WORDS and len(looked_up) >= len(seen)
    for _, mask in seen:
        assert mask.dtype == torch.bool and (mask.int().diff(dim=1) >= 0).all() and mask[:, -1].all()  # left padding only
    assert [len(s) for s in wanted[1]] == [5 + R, 5 + R, 5 + 2, 5 + R]


def test_the_best_is_the_one_that_the_human_chose(labels, gpt2):
    """The logged loss and accuracy, against one sequence at a time through plain transformers."""
    metrics = run(gpt2, dataset="labels.json[:32]", eval_dataset="labels.json[:32]", learning_rate=0.0)[0]
    model = transformers.AutoModelForSequenceClassification.from_pretrained("reward")
    with torch.no_grad():
        scores = torch.stack([torch.cat([model(torch.tensor([s])).logits[0] for s in four]) for four in sequences(labels[:32])])
    best = torch.tensor([row["best"] for row in labels[:32]])
    loss = -scores.log_softmax(1).gather(1, best.unsqueeze(1)).mean().item()
    assert metrics["train/rm/loss"] == pytest.approx(loss, rel=1e-5) == metrics["eval/rm/loss"]
    assert metrics["train/rm/accuracy"] == (scores.argmax(1) == best).float().mean().item() == metrics["eval/rm/accuracy"]


def test_another_number_of_samples(in_tmp, gpt2):
    rows = [{"query": [5, PAD], **{f"sample{k}": [k + 2, 3] for k in range(11)}, "best": 10} for _ in range(8)]
    assert train_reward.read_comparisons(write("labels.json", rows), "") == [([5], [[k + 2, 3] for k in range(11)], 10)] * 8
    assert run(gpt2, batch_size=8, learning_rate=0.0)[0]["train/rm/loss"] == pytest.approx(math.log(11), abs=0.7)


def test_a_query_may_be_all_padding(labels, gpt2, seen):
    labels[0]["query"] = [PAD] * Q
    write("labels.json", labels)
    run(gpt2, dataset="labels.json[:32]")
    assert real(labels[0]["sample0"]) in rows_of(seen)


# ---- the same rows in other files ------------------------------------------------------------------------------------
def test_every_form_of_the_file_gives_the_same_run(labels, gpt2):
    for part, lines in (("sentiment/offline_5k.json", False), ("lines/offline_5k.json", True), ("other/rows.jsonl", True)):
        write(f"folder/{part}", labels, lines)
    specs = ["labels.json", "folder/lines/offline_5k.json", "folder/other/rows.jsonl"]
    specs += ["folder:sentiment/offline_5k.json", "folder:lines/offline_5k.json"]
    runs = [without_times(run(gpt2, dataset=f"{s}[:96]", eval_dataset=f"{s}[96:]")) for s in specs]
    assert all(r == runs[0] for r in runs) and len(runs[0]) == 3


def test_a_file_of_a_hub_repository_is_asked_for_as_datasets_wants_it(labels, monkeypatch):
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: asked.append((a, k)) or labels)
    rows = train_reward.read_comparisons("vwxyzjn/lm-human-preferences:sentiment/offline_5k.json[:4992]", "--dataset")
    assert asked == [
        (("vwxyzjn/lm-human-preferences",), dict(data_files="sentiment/offline_5k.json", split="train[:4992]")),
    ]
    assert rows[0] == (real(labels[0]["query"]), [labels[0][f"sample{k}"] for k in range(4)], labels[0]["best"])


def test_the_tail_is_held_out(labels, gpt2, seen):
    run(gpt2, dataset="labels.json[:128]", eval_dataset="labels.json[128:]")
    wanted = [s for four in sequences(labels) for s in four]
    assert sorted(rows_of(seen)[: 4 * 128]) == sorted(wanted[: 4 * 128]) and rows_of(seen)[4 * 128 :] == wanted[4 * 128 :]


SLICES = {"": (0, 5), "[:2]": (0, 2), "[2:]": (2, 5), "[1:4]": (1, 4), "[-2:]": (3, 5), "[:-1]": (0, 4), "[:9]": (0, 5)}


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.csv", "folder:a.csv", "folder:train", "folder:", "folder"])
def test_rows_from_a_to_b(in_tmp, name):
    rows = [{"n": i} for i in range(5)]
    Path("folder").mkdir()
    for path in ("a.csv", "folder/a.csv"):
        Path(path).write_text("n\n" + "".join(f"{i}\n" for i in range(5)))
    write("a.json", rows), write("a.jsonl", rows, lines=True)
    for taken, (start, stop) in SLICES.items():
        assert data.read_rows(f"{name}{taken}", {"n": int}) == rows[start:stop], taken


def test_the_splits_own_slices_stay_those_of_datasets(in_tmp):
    Path("folder").mkdir()
    write("folder/train.json", [{"n": i} for i in range(4)]), write("folder/test.json", [{"n": i} for i in range(10, 14)])
    numbers = lambda spec: [row["n"] for row in data.read_rows(spec, {})]  # noqa: E731
    assert numbers("folder:train+test[:1]") == [0, 1, 2, 3, 10] and numbers("folder:train[:1]+test[2:]") == [0, 12, 13]
    assert numbers("folder:test[:50%]") == [10, 11]


@pytest.mark.parametrize(
    "spec", ["a.json[5:]", "a.json[3:2]", "a.json[x:2]", "a.json[:2]:part", "none.json[:2]", "folder:a.json[5:]"]
)
def test_a_slice_that_takes_nothing_is_one_line(in_tmp, capsys, spec):
    rows = [{"n": i} for i in range(5)]
    write("a.json", rows), write("folder/a.json", rows)
    with pytest.raises(SystemExit) as end:
        data.read_rows(spec, {})
    assert end.value.code == 2
    assert_one_line(capsys.readouterr().err, [f"--dataset {spec}"])


@pytest.mark.parametrize(
    "text, line",
    [('{"n": 1}\n{"n": 2\n{"n": 3}\n', 2), ('{"n": 1}\n\n{"n": 2} x\n', 3), ('[{"n": 1}]\nx\n', 2), ('{\n "n": 1,\n}', 3)],
)
def test_json_that_is_neither_one_value_nor_one_a_line(in_tmp, capsys, text, line):
    Path("a.json").write_text(text)
    with pytest.raises(SystemExit):
        data.read_rows("a.json", {})
    assert_one_line(capsys.readouterr().err, ["a.json", f"line {line} is not JSON"])


def test_token_ids_are_encoded_as_they_are(gpt2):
    tokenizer = utils.load_tokenizer(gpt2, "")
    assert data.encode(tokenizer, [5, 6]) == [5, 6] and data.encode(tokenizer, [5], [7, 8]) == ([5], [7, 8])
    assert data.encode(tokenizer, "w5", "w7 w8") == ([5], [7, 8, EOS])


# ---- normalisation ---------------------------------------------------------------------------------------------------
def test_rm_11_normalisation_samples_whole_responses_and_overwrites_gain_and_bias(labels, gpt2, monkeypatch):
    """E5, E6, E7: no sample ends at EOS; the saved model gives mean 0 and std 1 to these samples, and nearly so to fresh ones."""
    samples, stops, real_sample = [], [], train_rloo.sample

    def record(*args):
        stops.append(args[6])
        responses, mask, logprobs = real_sample(*args)
        samples.append((args[1], args[2], responses, mask))
        return responses, mask, logprobs

    gains, gain_and_bias = [], train_reward.gain_and_bias
    monkeypatch.setattr(train_reward, "gain_and_bias", lambda *a: gains.append(gain_and_bias(*a)) or gains[-1])
    monkeypatch.setattr(train_rloo, "sample", record)
    run(gpt2, normalization="gain_bias", normalize_samples=256, temperature=0.7, num_train_epochs=3)
    queries = [q[m].tolist() for query, mask, _, _ in samples for q, m in zip(query, mask, strict=True)]
    assert queries == [real(labels[i % ROWS]["query"]) for i in range(256)]
    responses = torch.cat([r for _, _, r, _ in samples])
    assert responses.shape == (256, R) and all(m.all() for _, _, _, m in samples) and set(stops) == {None}
    assert (responses[:, :-1] == EOS).any(), "no sample would have ended early: the test shows nothing"
    assert len(gains) == 2 and gains[0] != gains[1]

    reward = train_rloo.Reward(utils.load_reward_model("reward", "").eval())
    policy = train_rloo.Policy(utils.load_policy(gpt2, ""), 0.7).eval()
    with torch.no_grad():
        scores = torch.cat([train_rloo.response_scores(reward, batch, 1) for batch in samples])
        assert abs(scores.mean()) < 1e-4 and scores.std(correction=0).item() == pytest.approx(1, abs=1e-4)
        batch = utils.left_pad([real(row["query"]) for row in labels])
        drawn = real_sample(policy, *batch, torch.arange(ROWS * 16), 16, R, None, (99, 99, 99))
        repeated = [t.repeat_interleave(16, 0) for t in batch]
        fresh = train_rloo.response_scores(reward, (*repeated, *drawn[:2]), 1)
    assert abs(fresh.mean()) < 4 / 16 and fresh.std().item() == pytest.approx(1, abs=0.25)  # 256 samples: 1/16 is one s.e.


def test_samples_for_text_rows_still_end_at_eos(in_tmp, gpt2, monkeypatch):
    stops, sample = [], train_rloo.sample
    monkeypatch.setattr(train_rloo, "sample", lambda *a: stops.append(a[6]) or sample(*a))
    write("text.jsonl", [{"prompt": f"w{i}", "chosen": "w3 w4", "rejected": "w5"} for i in range(1, 33)], lines=True)
    run(gpt2, dataset="text.jsonl", normalization="gain_bias")
    assert stops and set(stops) == {EOS}


# ---- several processes -----------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_two_processes_change_nothing(labels, gpt2, in_tmp):
    flags = ["--dataset", "labels.json[:96]", "--eval_dataset", "labels.json[96:131]", "--sft_model_path", gpt2, "--batch_size", 32]
    flags += ["--normalization", "gain_bias", "--response_length", R, "--learning_rate", 1e-3, "--tf_adam", "--run_name", "two"]
    done = launch("train_reward.py", [*flags, "--weight_decay", 0, "--lr_schedule", "linear"], 2, cwd=in_tmp)
    assert done.returncode == 0 and "2 process(es)" in done.stdout, done.stderr
    data_sets = dict(dataset="labels.json[:96]", eval_dataset="labels.json[96:131]")
    one = run(gpt2, **data_sets, normalization="gain_bias", tf_adam=True)
    assert_same_curves(one, read_metrics("runs/two"))
    bias = [json.loads(Path(f, "config.json").read_text())["reward_bias"] for f in ("reward", "models/reward")]
    assert bias[0] == pytest.approx(bias[1], rel=1e-4, abs=1e-5) and bias[0] != 0


# ---- TensorFlow's Adam -----------------------------------------------------------------------------------------------
def tf_adam(gradients, lr, eps, beta1=0.9, beta2=0.999):
    """Steps of tf.train.AdamOptimizer, as its documentation writes them: lr_t m / (sqrt(v) + eps)."""
    m, v, steps = 0.0, 0.0, []
    for t, g in enumerate(gradients, 1):
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        steps.append(lr(t) * math.sqrt(1 - beta2**t) / (1 - beta1**t) * m / (math.sqrt(v) + eps))
    return steps


@pytest.mark.parametrize("flag", [True, False])
def test_opt_3_tf_adam_takes_the_steps_of_tensorflow(labels, gpt2, monkeypatch, flag):
    assert tf_adam([1e-3], lambda t: 1e-5, 1e-5) == pytest.approx([7.597e-6], rel=1e-4)
    record, step = [], torch.optim.AdamW.step

    def recording_step(self, *args, **kwargs):
        parameter = self.param_groups[-1]["params"][0]  # the gain
        before, gradient = parameter.item(), parameter.grad.item()
        step(self, *args, **kwargs)
        record.append((gradient, before - parameter.item(), [group["eps"] for group in self.param_groups]))

    monkeypatch.setattr(torch.optim.AdamW, "step", recording_step)
    run(gpt2, tf_adam=flag, adam_eps=1e-2, learning_rate=1e-2, lr_schedule="constant")
    gradients, steps, eps = zip(*record, strict=True)
    assert len(record) == 5
    tensorflow = tf_adam(gradients, lambda t: 1e-2, 1e-2)
    if flag:
        assert steps == pytest.approx(tensorflow, rel=1e-3, abs=2e-7)
        assert eps == tuple(pytest.approx([1e-2 / math.sqrt(1 - 0.999**t)] * 2) for t in range(1, 6))
    else:
        assert steps[0] > 1.3 * tensorflow[0] > 0 or steps[0] < 1.3 * tensorflow[0] < 0
        assert eps == ([1e-2, 1e-2],) * 5


@pytest.mark.parametrize("flag, wanted", [(True, 7.597e-6), (False, 9.901e-6)])
def test_the_first_step_of_tf_adam_and_of_torch(labels, gpt2, monkeypatch, flag, wanted):
    """lr 1e-5, eps 1e-5, gradient 1e-3: the numbers of both libraries. The gradient is put in place of the run's."""
    moved, step = [], torch.optim.AdamW.step

    def step_on_a_thousandth(self, *args, **kwargs):
        parameter = self.param_groups[0]["params"][0]
        parameter.data.zero_(), parameter.grad.fill_(1e-3)
        step(self, *args, **kwargs)
        moved.append(-parameter.mean().item())

    monkeypatch.setattr(torch.optim.AdamW, "step", step_on_a_thousandth)
    run(gpt2, dataset="labels.json[:32]", tf_adam=flag, learning_rate=1e-5, adam_eps=1e-5)
    assert moved == [pytest.approx(wanted, rel=1e-4)]


# ---- the saved folder ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("special", [{}, {"pad_token": "w0"}], ids=["no pad token", "pad is eos"])
@pytest.mark.parametrize("normalization", ["mean_shift", "gain_bias"])
def test_rm_13_plain_transformers_gives_the_same_scores_up_to_the_bias(labels, in_tmp, special, normalization):
    """Also for samples that end in EOS: the folder's padding token is another one, and the library skips only that."""
    for row in labels[:40]:
        row["sample3"][-1] = EOS
    write("labels.json", labels)
    source = save_gpt2("policy", **special)
    run(source, normalization=normalization)
    model = transformers.AutoModelForSequenceClassification.from_pretrained("reward")
    tokenizer = transformers.AutoTokenizer.from_pretrained("reward")
    pad = model.config.pad_token_id
    assert pad == tokenizer.pad_token_id == WORDS != EOS and model.config.vocab_size == WORDS + 1
    rows = [s for four in sequences(labels) for s in four]
    width = max(map(len, rows))
    ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    with torch.no_grad():
        library = model(input_ids=ids, attention_mask=mask).logits[:, 0]
        tokens, left_mask = utils.left_pad(rows)
        reward = train_rloo.Reward(utils.load_reward_model("reward", "").eval())
        ours = reward(tokens, left_mask, utils.positions_from_mask(left_mask), torch.full((len(rows), 1), width - 1))[:, 0]
    assert (library + model.config.reward_bias - ours).abs().max() < 1e-5
    assert ours.std() > 0.05 and abs(model.config.reward_bias) > 1e-3
    if normalization == "mean_shift":
        assert abs(ours.mean()) < 1e-5


# ---- bad rows --------------------------------------------------------------------------------------------------------
def spoilt(**change):
    return lambda row: row.update(change)


BAD = {
    "best too large": (spoilt(best=4), ["row 2", "'best'", "4"]),
    "best negative": (spoilt(best=-1), ["row 2", "'best'", "-1"]),
    "best bool": (spoilt(best=True), ["row 2", "'best'"]),
    "best string": (spoilt(best="1"), ["row 2", "'best'"]),
    "best null": (spoilt(best=None), ["row 2", "'best'"]),
    "no best": (lambda row: row.pop("best"), ["row 2", "'best'"]),
    "no query": (lambda row: row.pop("query"), ["row 2", "'query'"]),
    "one sample": (lambda row: [row.pop(f"sample{k}") for k in (1, 2, 3)], ["row 2", "'sample1'"]),
    "no sample": (lambda row: row.pop("sample3"), ["row 2", "'sample3'"]),
    "no sample in the middle": (lambda row: row.pop("sample1"), ["row 2", "'sample1'"]),
    "text query": (spoilt(query="w3 w4"), ["row 2", "'query'"]),
    "text sample": (spoilt(sample0="w3 w4"), ["row 2", "'sample0'"]),
    "string id": (lambda row: row["sample2"].__setitem__(1, "w3"), ["row 2", "'sample2'"]),
    "fraction id": (lambda row: row["sample2"].__setitem__(1, 3.0), ["row 2", "'sample2'"]),
    "bool id": (lambda row: row["sample2"].__setitem__(1, True), ["row 2", "'sample2'"]),
    "null id": (lambda row: row["query"].__setitem__(0, None), ["row 2", "'query'"]),
    "id outside": (lambda row: row["sample1"].__setitem__(1, WORDS), ["row 2", "'sample1'", "40"]),
    "id outside the query": (lambda row: row["query"].__setitem__(1, 50257), ["row 2", "'query'", "50257"]),
    "negative id": (lambda row: row["sample3"].__setitem__(0, -1), ["row 2", "'sample3'", "-1"]),
    "empty sample": (spoilt(sample1=[]), ["row 2", "'sample1'"]),
    "sample of padding": (spoilt(sample1=[PAD] * R), ["row 2", "'sample1'", "padding"]),
    "too long": (spoilt(sample1=[3] * 40), ["row 2", "45 tokens", "32"]),
    "query of padding": (spoilt(query=[PAD] * Q), ["prompt of row 2 is empty"]),  # nothing to sample from
    "query too long": (spoilt(query=[3] * 26), ["row 2", "26 tokens", "25"]),  # 26 + 6 fit the context of 32, 26 + 7 do not
}


@pytest.fixture
def refused(labels, gpt2, in_tmp, capsys):
    """A function: the run must end with one line, exit code 2 and nothing written."""

    def refuse(parts, **changes):
        before = contents(in_tmp)
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            run(gpt2, **dict(normalization="gain_bias", response_length=R + 1) | changes)
        assert end.value.code == 2 and contents(in_tmp) == before
        assert_one_line(capsys.readouterr().err, parts)

    return refuse


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_are_one_line(labels, refused, name):
    spoil, parts = BAD[name]
    spoil(labels[1])
    write("bad.json", labels)
    refused(["--dataset bad.json: ", *parts], dataset="bad.json")
    if name not in ("query of padding", "query too long"):
        refused(["--eval_dataset bad.json[1:]: ", "row 1", *parts[1:]], eval_dataset="bad.json[1:]")


def test_the_models_own_padding_is_no_token_of_a_row(labels, refused, in_tmp):
    """A file whose 50259 somebody replaced by the padding token of his tokenizer: the library would read no score there."""
    source = save_gpt2("policy", pad_token="w39")
    labels[1]["sample1"], labels[0] = [3, 39], {k: [5, 6] for k in labels[0]} | {"best": 0}
    write("bad.json", labels[:2])
    refused(["row 2", "'sample1'", "id 39 "], dataset="bad.json", sft_model_path=source)
    labels[1]["sample1"] = [3, WORDS]  # the first id that is no token at all
    write("bad.json", labels[:2])
    refused(["row 2", "'sample1'", "id 40 "], dataset="bad.json", sft_model_path=source)


def test_held_out_labels_have_as_many_samples(labels, refused):
    write("three.json", [{k: v for k, v in row.items() if k != "sample3"} | {"best": 0} for row in labels])
    refused(["--eval_dataset three.json", "3", "4"], eval_dataset="three.json")
