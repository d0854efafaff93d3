"""A document as a memory: its keys and values in the frozen model, compacted to a few by attention matching."""
