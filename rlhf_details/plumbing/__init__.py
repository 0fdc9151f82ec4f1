"""
What a reader of the pages may skip, in four rooms. Each imports those above it, and none below.

    console           lines, errors, the end of a script: nothing heavy
    inputs            flags and the command line; rows, chat templates, user code; models and tokenizers
    machine           engines, samplers, packed rows, rewards, a judge
    outputs           the run's folder, checkpoints, trackers, signs of health, the saved model, cards and the Hub
"""
