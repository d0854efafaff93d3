"""Attention over [memory ; self] inside vLLM.

    backend.py    the vLLM backend: the platform's own, plus the memory part for the rows that have memory
    pages.py      a bundle's pages, resident once for all requests, and what one request makes of them
    step.py       which rows of a scheduler step attend to which pages: computed once, used by every layer
    cpu.py        the device's two functions: memory attention, and the log-sum-exp of the self-attention
    merge.py      the two parts become one softmax
    reference.py  the same in thirty plain lines, for the tests

Letters: n requests, R rows (query tokens) of a request, H query heads, J KV heads, G = H / J, D head size,
B entries of a memory, m payload tokens, S = B m memory tokens (or k m, of the k pages retrieved), L layers,
C tokens of a KV-cache block.

The base implementation writes the self-attention output of every row, untouched for rows without memory. For rows
with memory, memory attention gives an output and a log-sum-exp over the S memory tokens, and the two are merged:

    w = sigmoid(lse_memory + layer_bias - lse_self)        output = (1 - w) self + w gate memory
"""
