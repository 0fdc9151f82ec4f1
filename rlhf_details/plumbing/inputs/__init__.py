"""
What a run is given. Where is it?

    flags             the flags that scripts share             cli              the command line, presets, checks
    data_files        rows of files, folders and the Hub       user_code        the user's own functions, fenced
    data              rows -> prompts, completions, shares     comparisons      rows -> candidates, the best of them
    chat              messages and chat templates              stop_tokens      which tokens end a turn, a response
    token_ids         text and messages <-> token ids          models           loading, tokenizers, heads, LoRA
"""
