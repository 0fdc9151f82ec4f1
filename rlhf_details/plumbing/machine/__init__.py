"""
What computes. Where is it?

    engines           DDP, FSDP2, DeepSpeed, CPUs              stages           the embedded task's missing models
    samplers          who samples, also an update ahead        vllm             a sampler in a process of its own
    packing           how many responses share a row           candidates       responses of the SFT policy
    rewards           the scores of responses                  judge            a language model as a judge
"""
