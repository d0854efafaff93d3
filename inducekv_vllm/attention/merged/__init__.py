"""Merged memory: one softmax over [memory ; self], as in the paper.

cpu_backend.py  vLLM's CPU backend, plus merged memory for the rows that have it
cpu.py          memory attention on the CPU, and the log-sum-exp of self-attention
step.py         the rows of a step and the memory they attend to, as the CPU takes them
merge.py        self-attention and memory attention become one softmax
flash.py        vLLM's FlashAttention backend, which also gives its log-sum-exp to the kernels
"""
