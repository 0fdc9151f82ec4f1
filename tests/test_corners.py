"""Claims about corners: tokenizers whose unknown token is EOS or that put a space before a text, models that cannot be sampled
as the others are, machines without git, runs that begin at once, rows that say their prompt twice."""

import json
import time
from pathlib import Path

import pytest
import torch
from conftest import ppo_args, read_metrics, rloo_args, run_ppo, run_rloo
from test_stages import sft_args, write_rows
from tokenizers import ByteLevelBPETokenizer, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    GenerationConfig,
    GPT2Tokenizer,
    Mamba2Config,
    Mamba2ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXMLP

from rlhf_details import data, evaluate, hub, lora, reward_functions, runs, toy, train_ppo, train_rloo, train_sft, utils

VOCAB = len(toy.tokenizer())
SMALL = dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.3)
IDS = dict(bos_token_id=None, eos_token_id=toy.tokenizer().eos_token_id)
LENGTH = "def length(prompts, completions):\n    return [float(len(text)) for text in completions]\n"


@pytest.fixture
def gpt2_tokenizer(in_tmp):
    """GPT-2's own class, whose unknown token, BOS and EOS are all <|endoftext|>, over a small vocabulary."""
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(["the cat sat on the mat ."] * 20, 300, special_tokens=["<|endoftext|>"], show_progress=False)
    trained.save_model(".")
    tokenizer = GPT2Tokenizer(vocab="vocab.json", merges="merges.txt")
    assert tokenizer.unk_token_id == tokenizer.eos_token_id == 0
    return tokenizer


def metaspace_tokenizer():
    """As Llama 2's: a text begins with a space, so that "." alone is another token than "." after a word."""
    words = ["<unk>", "</s>", "▁", ".", "▁.", "▁cat", "▁the", *"cathe", "▁c", "▁ca", "at", "▁t", "▁th"]
    merges = [("▁", "."), ("▁", "c"), ("▁c", "a"), ("▁ca", "t"), ("▁", "t"), ("▁t", "h"), ("▁th", "e")]
    backend = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(dict.fromkeys(words))}, merges=merges, unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")


def saved(model, folder):
    """A model folder with the toy tokenizer; its name."""
    model.save_pretrained(folder), toy.tokenizer().save_pretrained(folder)
    return str(folder)


# ---- tokenizers ------------------------------------------------------------------------------------------------------
def test_an_unknown_token_that_is_eos_may_be_named_and_may_be_a_prompt(gpt2_tokenizer):
    assert utils.token_id(gpt2_tokenizer, "<|endoftext|>", "--stop_token") == 0
    assert data.encode_prompts(gpt2_tokenizer, [{"prompt": "<|endoftext|>"}], 10, "--dataset x") == ([0], [[0]])
    assert data.encode_prompts(gpt2_tokenizer, [{"prompt": [0, 0]}], 10, "--dataset x") == ([0], [[0, 0]])


def test_words_that_are_unknown_are_refused_still(capsys):
    tokenizer = metaspace_tokenizer()
    for text in ("dog", "%", ""):
        with pytest.raises(SystemExit):
            utils.token_id(tokenizer, text, "--stop_token")
    assert "--stop_token '%': not one token of the vocabulary" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        data.encode_prompts(toy.tokenizer(), [{"prompt": "zebra"}], 10, "--dataset x")
    assert "the tokenizer knows no word of the prompt of row 1, 'zebra'" in capsys.readouterr().err


def test_a_stop_token_is_the_token_that_a_response_holds(gpt2_tokenizer):
    tokenizer = metaspace_tokenizer()
    _, response = data.encode(tokenizer, "the cat", "the cat.")
    end = utils.token_id(tokenizer, ".", "--truncate_token")
    assert tokenizer.convert_ids_to_tokens(response) == ["▁the", "▁cat", ".", "</s>"] and end == response[2]
    responses = torch.tensor([response[:3]])
    assert train_ppo.truncate_response(responses, torch.ones_like(responses, dtype=torch.bool), end, 0)[1].tolist() == [True]
    assert utils.token_id(tokenizer, " cat", "--stop_token") == utils.token_id(tokenizer, "▁cat", "--stop_token") == response[1]
    for text in (".", " the", "\n"):  # what GPT-2's own ids are, wherever they stand
        assert [utils.token_id(gpt2_tokenizer, text, "--stop_token")] == gpt2_tokenizer(text).input_ids


def test_a_stop_token_is_no_byte_that_the_vocabulary_spells_as_a_character(in_tmp, capsys):
    """é is two bytes, and its character stands for the byte 0xE9 in the vocabulary of GPT-2."""
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(["le thé et le café"] * 20, 400, show_progress=False)
    trained.save_model(".")
    tokenizer = GPT2Tokenizer(vocab="vocab.json", merges="merges.txt", unk_token="<|endoftext|>")
    token = utils.token_id(tokenizer, "é", "--stop_token")
    assert token != tokenizer.get_vocab()["é"] and tokenizer.decode([token]) == "é"
    for text in ("»", "Ġ"):
        with pytest.raises(SystemExit):
            utils.token_id(tokenizer, text, "--stop_token")


def test_eos_is_put_behind_a_completion_once():
    tokenizer = metaspace_tokenizer()
    for text in ("the cat.", "the cat.</s>"):
        assert tokenizer.convert_ids_to_tokens(data.encode(tokenizer, "the", text)[1]) == ["▁the", "▁cat", ".", "</s>"]


# ---- models ----------------------------------------------------------------------------------------------------------
def test_a_model_without_the_usual_cache_is_refused(in_tmp, capsys):
    config = Mamba2Config(**SMALL, **IDS, state_size=8, num_heads=8, head_dim=8, n_groups=2)
    with pytest.raises(SystemExit):
        utils.load_policy(saved(Mamba2ForCausalLM(config), in_tmp / "mamba"), "--sft_model_path")
    assert "a mamba2 cannot be sampled: its forward takes no past_key_values" in capsys.readouterr().err


def test_a_model_that_draws_in_training_mode_is_refused(tiny, capsys, monkeypatch):
    def noisy(self, hidden, forward=GPTNeoXMLP.forward):
        return forward(self, hidden) + self.training * torch.rand_like(hidden)

    monkeypatch.setattr(GPTNeoXMLP, "forward", noisy)
    with pytest.raises(SystemExit):
        utils.load_policy(str(tiny / "policy"), "--sft_model_path")
    assert "a gpt_neox draws random numbers in training mode" in capsys.readouterr().err


def test_a_routers_jitter_is_refused_and_not_switched_off(in_tmp, capsys):
    """Phi-MoE's is the threshold of its mask as well, also where nothing is drawn: without it, it is another model."""
    experts = dict(num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, intermediate_size=64)
    torch.manual_seed(0)
    config = MixtralConfig(**SMALL, **IDS, **experts, router_jitter_noise=0.1)
    folder = saved(MixtralForCausalLM(config), in_tmp / "experts")
    with pytest.raises(SystemExit):
        utils.load_policy(folder, "--sft_model_path")
    assert "a mixtral draws random numbers in training mode" in capsys.readouterr().err
    config.router_jitter_noise = 0.0
    config.save_pretrained(folder)
    assert utils.load_policy(folder, "--sft_model_path").training


def test_a_linear_layer_takes_no_rows():
    """An expert that no token was sent to; oneDNN has no gradient of nothing."""
    layer = torch.nn.Linear(4, 3)
    layer.__class__ = utils.OneDNNLinear
    x = torch.zeros(0, 4, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.shape == (0, 4) and not layer.weight.grad.any()


def test_a_model_that_cannot_read_the_mask_of_packed_rows_gets_plain_ones(in_tmp, capsys):
    """Falcon with ALiBi takes positions and makes its biases of the mask, which must have two dimensions."""
    torch.manual_seed(0)
    folder = saved(FalconForCausalLM(FalconConfig(**SMALL, **IDS, alibi=True)), in_tmp / "falcon")
    Path("mine.py").write_text(LENGTH)
    rows = run_rloo(in_tmp, sft_model_path=folder, reward_model_path=None, reward_fn=("mine.py:length",), total_episodes=16)
    assert "packed rows cannot be computed (ValueError" in capsys.readouterr().out
    assert rows[-1]["val/logprob_gap"] < 1e-4


def test_an_adapter_that_is_a_pickle_is_not_read(tiny, in_tmp, capsys):
    pytest.importorskip("peft")
    model = lora.add_adapters(utils.load_policy(str(tiny / "policy"), "x"), 2)
    lora.save_adapter(model, in_tmp / "adapter", str(tiny / "policy"))
    (in_tmp / "adapter" / "adapter_model.safetensors").unlink()
    torch.save({}, in_tmp / "adapter" / "adapter_model.bin")
    with pytest.raises(SystemExit):
        utils.load_policy(str(in_tmp / "adapter"), "--sft_model_path")
    assert "has no adapter_model.safetensors" in capsys.readouterr().err


def test_the_cards_snippet_undoes_the_bases_generation_config(tiny, in_tmp):
    """Qwen's chat models bring top_p 0.8 and a repetition penalty; what was trained is sampled without."""
    model = utils.load_policy(str(tiny / "policy"), "x")
    model.generation_config = GenerationConfig(do_sample=True, top_p=1e-6, repetition_penalty=5.0, **{**IDS, "pad_token_id": 0})
    saved(model, in_tmp / "base")
    assert json.loads(Path("base/generation_config.json").read_text())["repetition_penalty"] == 5.0
    words = dict(name="base", inputs="tokenizer('we', return_tensors='pt')", temperature=1.0, length=8)
    outputs = []
    for folder in ("base", str(tiny / "policy")):
        torch.manual_seed(0)
        found = {}
        exec(hub.OF_A_POLICY.format(**words | {"name": folder}), found)
        outputs.append(found["tokens"].tolist())
    assert outputs[0] == outputs[1]


# ---- runs ------------------------------------------------------------------------------------------------------------
def test_a_machine_without_git_trains(tiny, in_tmp, monkeypatch):
    monkeypatch.setenv("PATH", str(in_tmp / "empty"))
    assert len(run_rloo(tiny, total_episodes=16)) == 1
    assert json.loads(Path("runs/run/config.json").read_text())["commit"] == ""


def test_two_runs_of_the_same_second_have_folders_of_their_own(tiny, in_tmp, monkeypatch):
    """The second chooses its name when the first has chosen, and has written nothing yet."""
    monkeypatch.setattr(time, "strftime", lambda *_: "20260101-000000")
    names, choose = [], runs.Run.choose_name

    def twice(self):
        names.extend([choose(self), choose(self)])
        return names[0]

    monkeypatch.setattr(runs.Run, "choose_name", twice)
    train_rloo.main(rloo_args(tiny, run_name=None, total_episodes=16))
    assert names[1] == names[0] + "_" and read_metrics(Path("runs") / names[0])


@pytest.mark.parametrize("fault", [SystemExit(2), KeyboardInterrupt(), RuntimeError("of a tracker")])
def test_a_run_that_does_not_start_leaves_no_folder(tiny, in_tmp, monkeypatch, fault):
    def opens(self):
        raise fault

    monkeypatch.setattr(runs.Run, "open", opens)
    with pytest.raises(type(fault)):
        train_rloo.main(rloo_args(tiny, run_name=None))
    assert not Path("runs").exists()


def test_resume_passes_over_a_run_that_never_started(tiny, in_tmp, capsys):
    (run,) = [train_rloo.main(rloo_args(tiny, run_name=None))["run"]]
    Path(f"{run}1").mkdir()  # a later one, killed before it wrote anything
    train_rloo.main(rloo_args(tiny, run_name=None, resume=True))
    assert f"goes on after update 3 of 3, from {run}/checkpoints" in capsys.readouterr().out


def test_resume_does_not_empty_the_log_of_another_run(tiny, in_tmp, capsys):
    before = run_rloo(tiny, checkpoint_every=0)
    for checkpoint in Path("runs/run/checkpoints").glob("*"):  # as after a kill: --checkpoint_every 0 writes one at the end
        for file in checkpoint.iterdir():
            file.unlink()
        checkpoint.rmdir()
    with pytest.raises(SystemExit):
        run_rloo(tiny, checkpoint_every=0, resume=True, overwrite=False, learning_rate=2e-3, output_dir="models/other")
    assert "has no checkpoint and other arguments: learning_rate 0.001 there, 0.002 here" in capsys.readouterr().err
    assert read_metrics("runs/run") == before
    again = run_rloo(tiny, checkpoint_every=0, resume=True, overwrite=False)  # the same arguments: the same run, from the start
    assert [row["objective/scores"] for row in again] == [row["objective/scores"] for row in before]


# ---- arguments -------------------------------------------------------------------------------------------------------
def test_a_horizon_that_could_make_the_kl_coefficient_negative_is_refused(tiny, in_tmp, capsys):
    with pytest.raises(SystemExit):
        train_ppo.check(ppo_args(tiny, adaptive_kl=True, kl_horizon=4, batch_size=20))
    assert "--kl_horizon 4: must be above a fifth of --batch_size" in capsys.readouterr().err
    train_ppo.check(ppo_args(tiny, adaptive_kl=True, kl_horizon=4))
    assert train_ppo.adapt_kl_coef(1.0, 0.0, 6.0, 4, 16) == pytest.approx(0.2)


def test_the_full_kl_is_of_the_policy_that_samples(tiny, in_tmp, capsys):
    with pytest.raises(SystemExit):
        run_ppo(tiny, kl_penalty="full", async_rollouts=True)
    assert "--kl_penalty full: not with --async_rollouts" in capsys.readouterr().err


def test_an_empty_cell_of_a_template_is_the_empty_string(in_tmp):
    Path("alpaca.csv").write_text("instruction,input,output\nname a colour,,red\nname a pet,small,mouse\n")
    rows = data.with_prompts(data.read_rows("alpaca.csv", {}), "{instruction} {input}", "x")
    assert [row["prompt"] for row in rows] == ["name a colour ", "name a pet small"]


# ---- rows ------------------------------------------------------------------------------------------------------------
def test_a_prompt_is_read_as_it_stands_beside_messages_and_sft_reads_these():
    """UltraChat's rows: `prompt` is the first message, and SFT trains on `messages`, unless there is a `completion`."""
    user, answer = {"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}
    row = {"prompt": "Hi?", "messages": [user, answer]}
    (of_rl,), (of_sft,) = data.with_prompts([row], None, "x"), data.with_completions(data.with_prompts([row], None, "x"), "x")
    assert of_rl["prompt"] == "Hi?" and of_sft["prompt"] == [user] and of_sft["completion"] == [answer]
    for other in ({"prompt": "Hi? "}, {"prompt": "Hello?"}, {"prompt": [answer]}, {"prompt": "Yes."}, {"completion": "No."}):
        (kept,) = data.with_prompts([row | other], None, "x")
        assert kept["prompt"] == (row | other)["prompt"]
    (of_sft,) = data.with_completions(data.with_prompts([row | {"completion": "No."}], None, "x"), "x")
    assert (of_sft["prompt"], of_sft["completion"]) == ("Hi?", "No.")


def test_rows_of_text_have_no_prompt_to_answer_though_the_tokenizer_has_a_bos(tiny, in_tmp):
    tokenizer = toy.tokenizer()
    bos = tokenizer.bos_token = tokenizer.eos_token
    habit = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, tokenizer.eos_token_id)])
    tokenizer.backend_tokenizer.post_processor = habit
    tokenizer.save_pretrained("base")
    assert data.encode(utils.load_tokenizer("base", "x"), "") == [tokenizer.eos_token_id]
    utils.load_policy(str(tiny / "policy"), "x").save_pretrained("base")
    write_rows("text.jsonl", [{"text": row["completion"]} for row in toy.rows("sft", "train")[:16]])
    metrics = train_sft.main(
        sft_args(base_model="base", dataset="text.jsonl", eval_dataset="text.jsonl", batch_size=8, response_length=1000)
    )
    assert "eval/sft/loss" in metrics and "eval/sft/rougeL" not in metrics


def test_rows_without_a_target_teach_nothing(tiny, in_tmp):
    write_rows("empty.jsonl", [{"text": ""}] * 8)
    metrics = train_sft.main(
        sft_args(base_model=str(tiny / "policy"), dataset="empty.jsonl", eval_dataset="empty.jsonl", batch_size=8)
    )
    assert metrics["train/sft/loss"] == metrics["eval/sft/loss"] == 0


def test_reward_functions_are_given_text_whatever_the_other_rows_are():
    seen = []
    functions = reward_functions.RewardFunctions(rloo_args(Path(), reward_model_path=None), "cpu", toy.tokenizer())
    functions.functions = {"f": (lambda prompts, completions: seen.append((prompts, completions)) or [0.0] * len(prompts), set())}
    message, ids = [{"role": "user", "content": "we"}], toy.tokenizer()("we were").input_ids
    functions([{"prompt": "we"}, {"prompt": message}, {"prompt": ids}], ["a", "b", "c"], None)
    assert seen == [(["we", message, "we were"], ["a", [{"role": "assistant", "content": "b"}], "c"])]


def test_a_reward_function_cannot_ask_for_the_prompt_as_a_column(tiny, in_tmp, capsys):
    Path("asks.py").write_text("def f(prompts, completions, prompt):\n    return [0.0] * len(prompts)\n")
    with pytest.raises(SystemExit) as ended:
        run_rloo(tiny, reward_model_path=None, reward_fn=("asks.py:f",))
    assert ended.value.code == 2 and "needs a column 'prompt'" in capsys.readouterr().err


def test_a_reference_without_tokens_can_be_evaluated(tiny, in_tmp):
    rows = [
        {"prompt": toy.tokenizer()("we were").input_ids, "completion": toy.tokenizer()(text).input_ids} for text in ("", "we .")
    ]
    write_rows("rows.jsonl", rows)
    args = evaluate.Args(
        dataset="rows.jsonl", policy_path=str(tiny / "policy"), opponent_path=None, ref_model_path=None,
        reward_model_path=str(tiny / "reward"), judge="reward_model", response_length=8, output_dir="out",
    )  # fmt: skip
    assert evaluate.main(args)["metrics"]["opponent"]["length"]["value"] == 1.0  # of 0 and 2 tokens


def test_an_untrained_head_is_a_function_of_the_seed(tiny, in_tmp):
    write_rows("rows.jsonl", [{"prompt": row["prompt"]} for row in toy.rows("prompts", "test")[:8]])
    policy = str(tiny / "policy")
    scores = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        metrics = evaluate.main(
            evaluate.Args(
                dataset="rows.jsonl", policy_path=policy, opponent_path=None, ref_model_path=None, reward_model_path=policy,
                allow_untrained_reward_model=True, judge="none", response_length=8, output_dir=f"out{noise}",
            )
        )  # fmt: skip
        scores.append(metrics["metrics"]["policy"]["score"]["value"])
    assert scores[0] == scores[1]


def test_a_file_of_the_same_name_in_another_folder_is_another_file(tmp_path, monkeypatch):
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        Path("same.py").write_text(f"def f(prompts, completions):\n    return {number}\n")
        assert data.load_function("same.py:f", "--reward_fn")([], []) == number
