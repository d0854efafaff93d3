"""A document as a memory: the frozen model studies it, and entries are trained to answer without it."""
