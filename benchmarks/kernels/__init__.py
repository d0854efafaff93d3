"""The GPU kernels: are they right, how fast are they, and who does the same work.

    run.py             the command
    workloads.py       a step with memory: its tensors, bytes and operations
    twin.py            the kernels in plain torch
    attention.py       each workload against the twin, and against the roofline
    replay.py          one CUDA graph over changing plans, tables and bundles
    rivals.py          the same work by concatenation and by copies
    timing.py          times under CUDA graphs, and what the device can do at best
    compiled.py        the kernels compiled for a GPU that is not there
    launching.py       what a launch takes of the host

Everything imports torch, triton and numpy alone, so that it runs on a machine without vLLM.

Launches come from the engine's own function: in decode the one that its CUDA graphs are captured with, beside
FlashAttention and with the default pool (every form, long memories split), in prefill that of the step.

A time is that of one call in a CUDA graph of many, each on the pages of another layer, so that no cache holds them. The
roofline of a call is the larger of its bytes by the copying speed and its operations by the speed of a large matrix
product, both measured on the same device. Bytes count each page, row and term once. The roofline of a small memory is
shorter than a launch, so results also have the share of the larger of both.
"""
