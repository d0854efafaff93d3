"""Mutated bundles and task files: each is refused with an error of ours, or read as what it is."""
