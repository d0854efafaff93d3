"""Memory attention inside vLLM.

    memory_attention.py  what a worker asks of its platform's memory attention
    attach.py         lets memory act on the output of any backend
    cpu_memory.py     on the CPU: merged memory in vLLM's backend, decoupled memory around it
    decoupled.py      decoupled memory around any backend
    latent.py         decoupled memory of latents (MLA)
    query_order.py    a bundle's keys in the order of the served queries
    cpu_ops.py        what both share on the CPU
    kernel_memory.py  on a GPU: a launch of the kernels after each layer's self-attention
    kernel_step.py    the rows of a step as a launch, and the buffers in which CUDA graphs find them
    pool.py           the resident pool of all bundles' keys, values and maps
    ranges.py         contiguous ranges of the pool, by first fit
    host_bundle.py    a bundle that was read, in host memory
    resident_bundle.py  a bundle in the pool, shared by all requests
    kernel_tables.py  what every slot reads, as tensors that the GPU kernels know
    resident_gate.py  a gate as it is applied to tokens, on the device
    slots.py          what one memory is read from, by all requests that have it
    merged/           merged memory: backends, CPU attention, one softmax of two parts
    kernels/          memory attention on GPUs, in Triton

Shapes: n requests, R rows (query tokens) of a request, H query heads, J KV heads, G = H / J, D head size,
B entries of a memory, m payload tokens, S = B m memory tokens (or k m for k retrieved entries), P tokens of the pool,
L layers, C tokens of a KV-cache block.

The base implementation computes the self-attention output of every row. For rows with merged memory, memory attention
computes an output and a log-sum-exp over the S memory tokens, and `merge_memory` combines the two into one softmax. For
rows with decoupled memory, `add_memory` adds attention over the S tokens, and the maps:

    merged      w = sigmoid(lse_memory + layer_bias - lse_self)    output = (1 - w) self + w value_gate memory
    decoupled   output = self + value_gate (softmax([logits ; 0]) [values ; 0] + maps(self))
"""
