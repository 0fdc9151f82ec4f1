"""RLHF in single-file scripts; each script holds its whole algorithm and is meant to be read from top to bottom."""
