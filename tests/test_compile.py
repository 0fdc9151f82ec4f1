"""--compile: the sampler's compiled steps draw the same tokens, from one graph a shape; where they cannot run it says why."""

import pytest
import torch
from conftest import ppo_args, read_metrics, rloo_args, save_pair
from test_rloo import SMALL, assert_same_curves
from torch._dynamo.utils import counters
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_details import toy, train_ppo, train_rloo, utils

SCRIPTS = pytest.mark.parametrize("script, arguments", [(train_rloo, rloo_args), (train_ppo, ppo_args)], ids=["rloo", "ppo"])


@pytest.mark.slow
@SCRIPTS
def test_compiled_steps_give_the_same_run_and_compile_once(tiny, in_tmp, monkeypatch, script, arguments):
    """Prompts of many lengths, responses that end early: three updates on one graph, since all slices have one shape."""
    torch.compiler.reset()
    counters.clear()
    graphs, real = [], script.sample

    def sample(*args):
        result = real(*args)
        graphs.append(counters["stats"]["unique_graphs"])
        return result

    options = dict(total_episodes=48, rollout_micro_batch_size=8, learning_rate=1e-3, stop_token="was")
    plain = read_metrics(script.main(arguments(tiny, **options))["run"])
    monkeypatch.setattr(script, "sample", sample)
    compiled = read_metrics(script.main(arguments(tiny, compile=True, **options))["run"])
    assert len(graphs) == 6 and graphs[0] == graphs[-1] == 1
    for rows in (plain, compiled):
        assert all(row.pop("val/logprob_gap") < 1e-4 for row in rows)
    assert_same_curves(plain, compiled)
    assert 0 < plain[-1]["val/num_stop_token_ids"] < 16


@SCRIPTS
def test_a_padded_static_cache_changes_no_token(tiny, monkeypatch, script, arguments):
    """The same without the compiler: padding to the longest prompt, the full mask and a cache that is used again."""
    monkeypatch.setattr(torch, "compile", lambda module, **options: module)
    script.compiled.cache_clear()
    policy = script.Policy(utils.load_policy(tiny / "policy", "").eval(), 1.0)
    n = (2,) if script is train_rloo else ()
    for prompts in ([[3, 4, 5], [7, 8, 9, 10], [6]], [[5, 6], [11], [12, 13, 14, 15]]):  # twice on one cache
        queries, mask = utils.left_pad(prompts, "cpu")
        rows = torch.arange(len(prompts) * (n or (1,))[0])
        expected = script.sample(policy, queries, mask, rows, *n, 9, 17, (1, 0, 1))
        result = script.sample(policy, queries, mask, rows, *n, 9, 17, (1, 0, 1), 11)
        assert torch.equal(result[0], expected[0]) and torch.equal(result[1], expected[1])
        assert (result[2] - expected[2]).abs().max() < 1e-5
    assert script.compiled.cache_info().misses == 1 and script.compiled.cache_info().hits == 1


@SCRIPTS
def test_models_that_cannot_take_the_mask_are_refused(tmp_path, in_tmp, capsys, script, arguments):
    folder = save_pair(tmp_path / "pair")
    config = AutoConfig.for_model("mistral", **(SMALL | dict(vocab_size=len(toy.tokenizer()), sliding_window=8)))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "policy")
    before = sorted(path.name for path in in_tmp.iterdir())
    with pytest.raises(SystemExit) as error:
        script.main(arguments(folder, compile=True))
    assert error.value.code == 2
    assert "--compile" in capsys.readouterr().err and before == sorted(path.name for path in in_tmp.iterdir())


@SCRIPTS
def test_it_is_refused_with_async_rollouts(tiny, in_tmp, capsys, script, arguments):
    with pytest.raises(SystemExit):
        script.main(arguments(tiny, compile=True, async_rollouts=True))
    assert "--compile: not with --async_rollouts" in capsys.readouterr().err
