"""
What a run is given. Where is it?

    flags             the flags that scripts share             cli              the command line, presets, checks
    files             rows of files, folders and the Hub       user_code        the user's own functions
    data              rows -> prompts, completions, shares     comparisons      rows -> candidates, the best of them
    chat              chat templates; text <-> token ids       models           loading, tokenizers, heads, LoRA
"""
