# %% [markdown]
# # RLOO by hand
#
# This notebook makes one rollout of RLOO and one step of training, tensor by tensor. It calls the functions of
# `rlhf_details/train_rloo.py` and copies none, so what you see here is what the script does.
#
# Run it in a clone of the repository. In a hosted notebook, clone the repository, change into its folder, and take
# the `#` away in the next cell.

# %%
# %pip install -q -c constraints.txt -e ".[benchmark]"

# %% [markdown]
# A language model of 0.1 M parameters continues reviews, and a reward model scores what it writes. The quick start
# has trained both and left them in the clone's folder `models`. If you have never run it, the next cell trains them,
# which takes about a minute.

# %%
import os

import matplotlib.pyplot as plt
import torch

from rlhf_details import toy, train_rloo, utils
from rlhf_details.plumbing.machine import stages

if os.path.exists("rloo_by_hand.ipynb"):
    os.chdir("..")  # Jupyter starts in the notebook's folder, and the models lie in the folder above it.
args = train_rloo.Args(**train_rloo.presets["toy"])
stages.ensure(args)
tokenizer, policy, reference, reward_model = train_rloo.load_models(args, "cpu")
print(sum(p.numel() for p in policy.parameters()), "weights in the policy")

# %% [markdown]
# ## The prompts
#
# We take two prompts, and k = 4 responses to each. So a batch has B = 8 rows, and the four rows of a prompt stand
# side by side. Prompts have different lengths Q. They are filled up on the left, so that all of them end in the
# same column, where the response begins. The mask says which tokens are real.

# %%
k, R = 4, args.response_length
texts = [row["prompt"] for row in toy.rows("prompts", "test")[:2]]
queries, query_mask = utils.left_pad([tokenizer(text).input_ids for text in texts for _ in range(k)])
print("queries", tuple(queries.shape))
for text, mask in zip(texts, query_mask[::k], strict=True):
    print("".join(".x"[m] for m in mask.int()), text)

# %% [markdown]
# ## 1. Rollout
#
# The policy samples token by token until it says EOS. Each draw depends on coordinates alone: the seed, what it is
# for, the update, the row, the step and the token. So the same call gives the same responses, on any number of
# processes. Responses are filled up on the right. In the picture a row is a response, and dark tokens are real.

# %%
rows = torch.arange(len(queries))
key = (args.seed, utils.TRAINING, 1)
policy.eval()
stop_ids = torch.tensor([tokenizer.eos_token_id])
responses, response_mask, _ = utils.sample(policy, queries, query_mask, rows, 1, R, stop_ids, key, size=len(rows))
for response, mask in zip(responses, response_mask, strict=True):
    print(tokenizer.decode(response[mask]))

figure, axis = plt.subplots(figsize=(7, 2))
axis.imshow(response_mask.numpy(), cmap="Greys", aspect="auto")
axis.set(xlabel="token of the response", ylabel="row of the batch", title="response_mask [B, R]")
plt.show()

# %% [markdown]
# ## 2. Log-probs and scores
#
# A forward pass over prompt and response gives the log-prob of each token that was sampled: by the policy, and by
# the reference, which is the policy from before training. Both are the same model now, so the KL is 0 up to
# rounding.

# %%
batch = utils.Batch(queries, query_mask, responses, response_mask)
with torch.no_grad():
    old_logprobs, _ = train_rloo.response_logprobs(policy, batch, 1)
    ref_logprobs, _ = train_rloo.response_logprobs(reference, batch, 1)
    (scores,) = train_rloo.response_scores(reward_model, batch, 1)
kl = (old_logprobs - ref_logprobs).sum(1)
print("old_logprobs", tuple(old_logprobs.shape), " scores", tuple(scores.shape))
print("largest KL of a response:", kl.abs().max().item())

# %% [markdown]
# ## 3. Rewards
#
# A response that did not end pays a penalty, and each response pays for its KL. What is left is the reward.

# %%
ended = train_rloo.has_stopped(responses, response_mask, stop_ids)
scores = train_rloo.missing_eos_scores(scores, ended, args.missing_eos_penalty, args.missing_eos_mode)
rewards = scores - args.kl_coef * kl
print(rewards.reshape(-1, k))

# %% [markdown]
# ## 4. Advantages
#
# How much better is a response than the other three to the same prompt? The advantages of a prompt add up to 0. So
# it does not matter whether a prompt is easy or hard.

# %%
advantages = train_rloo.rloo_advantages(rewards, k, torch.ones_like(ended))
print(advantages.reshape(-1, k))
print("sum of each prompt:", advantages.reshape(-1, k).sum(1))

# %% [markdown]
# ## 5. One step
#
# The loss makes what had a positive advantage likelier, and the rest less likely. With one step for a rollout the
# ratio of new to old probability is 1, but its gradient is not 0.

# %%
optimizer = torch.optim.AdamW(policy.parameters(), lr=args.learning_rate)
logprobs, _ = train_rloo.response_logprobs(policy, batch, 1)
losses, logratio, _ = train_rloo.rloo_policy_loss(
    logprobs, logprobs.detach(), response_mask, advantages, args.cliprange
)
losses.mean().backward()
optimizer.step()
print("loss:", losses.mean().item(), " ratio:", logratio.exp().unique().tolist())

# %% [markdown]
# ## What has changed?
#
# The policy has seen eight responses. Each point of the plot is one of them. Those with a positive advantage should
# have become likelier. Run the cells from "Rollout" again with another number in `key`, and you are training by
# hand.

# %%
with torch.no_grad():
    new_logprobs, _ = train_rloo.response_logprobs(policy, batch, 1)
change = (new_logprobs - old_logprobs).sum(1)
figure, axis = plt.subplots(figsize=(5, 3))
axis.scatter(advantages, change)
axis.axhline(0, color="grey", linewidth=0.8)
axis.axvline(0, color="grey", linewidth=0.8)
axis.set(xlabel="advantage of the response", ylabel="change of its log-prob")
plt.show()
print("correlation:", torch.corrcoef(torch.stack([advantages, change]))[0, 1].item())
