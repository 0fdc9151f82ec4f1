"""vLLM as the sampler, with a stand-in for its engine: what it is asked and given, and a push that did not arrive."""

import copy
from types import SimpleNamespace

import pytest
import torch
from helpers import tiny_model
from safetensors.torch import load_file
from transformers import AutoConfig

from rlhf_details import noise, train_rloo, utils
from rlhf_details.plumbing.machine import vllm

KEY, STOP, T = (1, utils.TRAINING, 2), 5, 0.8
PROMPTS = [[3, 4], [3, 4], [7, 8, 9, 10]]


class StandIn:
    """As vLLM's engine: it has a head of its own although the model's is tied, and takes the weights that it knows.

    change: what happens to the weights {name: tensor} on their way; is_raw: its log-probs are those at temperature 1.
    """

    name = "the stand-in"

    def __init__(self, model, change=lambda weights: weights, is_raw=False):
        config = copy.deepcopy(model.config)
        config.tie_word_embeddings = False
        self.model, self.change, self.asked, self.is_raw = type(model)(config).eval(), change, [], is_raw

    def push(self, model, dtype):
        assert dtype in vllm.DTYPES.values()
        weights = self.change({name: weight.clone() for name, weight in vllm.weights_of(model).items()})
        self.model.load_state_dict(weights, strict=False)

    @torch.no_grad()
    def generate(self, prompts, settings):
        self.asked += [(prompts, settings)]
        return [self.one(ids, SimpleNamespace(**given)) for ids, given in zip(prompts, settings, strict=True)]

    def one(self, prompt, settings):
        ids, values, generator = [], [], torch.Generator().manual_seed(settings.seed)
        while len(ids) < settings.max_tokens and not {*ids[-1:]} & {*settings.stop_token_ids}:
            logits = self.model(torch.tensor([prompt + ids])).logits[0, -1]
            for token, bias in getattr(settings, "logit_bias", {}).items():
                logits[token] += bias
            logits = logits / settings.temperature
            ids.append(torch.multinomial(logits.softmax(-1), 1, generator=generator).item())
            logits = logits * settings.temperature if self.is_raw else logits
            values.append(logits.log_softmax(-1)[ids[-1]].item())
        return ids, values


def stops(message):
    raise SystemExit(message)


def ask(engine, model, precision="fp32", temperature=T):
    """What vLLM's place in a rollout returns of PROMPTS."""
    policy, stop_ids = train_rloo.Policy(model, temperature).eval(), torch.tensor([STOP])
    batch = [*utils.left_pad(PROMPTS), torch.arange(3)]
    return vllm.sample(
        engine, precision, stops, policy, *batch, n=1, response_length=6, stop_ids=stop_ids, key=KEY, size=3
    )


def seeds_of(key, rows):
    """What each row's request is seeded with."""
    return [x % 2**32 for x in noise.keys_of_episodes(key, torch.tensor(rows)).tolist()]


def test_two_seeds_share_no_request_seed():
    """Neither do two updates. With the row hashed first, seeds 1 and 2 had the same 256 keys in another order."""
    found = {seed for key in ((1, 0, 1), (2, 0, 1), (1, 0, 2)) for seed in seeds_of(key, range(256))}
    assert len(found) == 3 * 256


@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "gpt2"])
def test_it_gives_what_the_own_sampler_gives(kind):
    """Responses up to the stop token, their mask, and the log-probs of the training forward; the heads are tied."""
    model = tiny_model(kind, tie_word_embeddings=True)
    engine = StandIn(model)
    responses, mask, logprobs = ask(engine, model)
    prompts, settings = engine.asked[0]
    assert prompts == PROMPTS and [x["seed"] for x in settings] == seeds_of(KEY, range(3))
    assert all(x["ignore_eos"] and x["temperature"] == T for x in settings)
    assert not {"top_k", "top_p", "repetition_penalty"} & settings[0].keys()
    queries, query_mask = utils.left_pad(PROMPTS)
    (own, _) = train_rloo.response_logprobs(
        train_rloo.Policy(model, T), utils.Batch(queries, query_mask, responses, mask), 1
    )
    torch.testing.assert_close(logprobs, own, atol=1e-5, rtol=0)
    assert responses.shape == mask.shape == (3, 6) and (responses[~mask] == 0).all()
    for row, m in zip(responses, mask, strict=True):
        ids = row[m].tolist()
        assert STOP not in ids[:-1] and (len(ids) == 6 or ids[-1] == STOP)


def test_it_samples_no_logit_that_stands_for_no_token():
    """Else its log-probs would not be those of the training forward, and the run would end."""
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight[23:] *= 5
    model.num_tokens = 23
    assert ask(StandIn(model), model)[0].max() < 23


def without_head(weights):
    return {name: weight for name, weight in weights.items() if name != "lm_head.weight"}


def swapped(weights):
    names = [name for name in weights if name.endswith("mlp.up_proj.weight")]
    return weights | {names[0]: weights[names[1]], names[1]: weights[names[0]]}


NOT_PUSHED = "the stand-in does not have the weights that were pushed: its log-probs are"
RAW = "a temperature of 1, {} was asked for: start it with --logprobs-mode processed_logprobs"


@pytest.mark.parametrize(
    "wrong, precision, temperature, words",
    [
        (dict(change=without_head), "fp32", 0.8, NOT_PUSHED),
        (dict(change=swapped), "fp32", 0.8, NOT_PUSHED),
        (dict(is_raw=True), "fp32", 0.8, RAW),
        # The bound of bf16 is too wide to see that they are off by some 0.03.
        (dict(is_raw=True), "bf16", 0.97, RAW),
    ],
)
def test_weights_that_did_not_arrive_and_log_probs_of_another_temperature_end_the_run(
    wrong, precision, temperature, words
):
    model = tiny_model("llama", tie_word_embeddings=True)
    with pytest.raises(SystemExit, match=words.format(temperature)):
        ask(StandIn(model, **wrong), model, precision=precision, temperature=temperature)


def test_what_vllm_loads_is_a_folder_with_configuration_and_weights(tmp_path):
    model = tiny_model("gpt2", tie_word_embeddings=True)
    expected = {name: weight.bfloat16() for name, weight in model.state_dict().items()}
    with vllm.written(model, torch.bfloat16, tmp_path / "is" / "made") as folder:
        assert AutoConfig.from_pretrained(folder).model_type == "gpt2" and "lm_head.weight" in expected
        torch.testing.assert_close(load_file(f"{folder}/model.safetensors"), expected, atol=0, rtol=0)
