"""The schedule that Hugging Face's trainers and OpenRLHF take from transformers."""

import torch
from transformers import get_scheduler


def learning_rates(num_steps, learning_rate, schedule, warmup_steps):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=learning_rate)
    name = "constant_with_warmup" if schedule == "constant" else schedule
    scheduler, rates = get_scheduler(name, optimizer, warmup_steps, num_steps), []
    for _ in range(num_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return {"rates": rates}
