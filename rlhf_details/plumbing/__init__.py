"""
What a reader of the pages may skip. Where is it?

    cli               the command line, lines, exit codes      flags            the flags that scripts share
    data              rows, prompts, completions, shares       files            where rows and functions are read
    chat              chat templates, and text -> token ids    models           tokenizers, loading, heads, LoRA
    comparisons       the rows of a reward model               stages           the embedded task's missing models
    rewards           the scores of responses                  layout           how many responses share a row
    engines           DDP, FSDP2, DeepSpeed, CPUs              run              a run's folder, log, signals, end
    checkpoint        what is saved and continued from         trackers         terminal, files, TensorBoard, wandb
    health            bad signs, and what a run says last      hub              model card and upload
    evaluation        what evaluate.py reads and shows         judge            a language model as a judge
    vllm              a sampler in a process of its own        overlap          sampling one update ahead, in a thread
"""
