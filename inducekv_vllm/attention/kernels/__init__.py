"""Memory attention on GPUs: Triton kernels over a resident pool. Imports torch, triton and numpy alone.

    layout.py   the pool, the slot tables and a step's plan as tensors
    tiles.py    which rows share a tile, and which part of a memory a program reads; plain numpy
    geometry.py the launch of a step, and that of a CUDA graph
    device.py   the kernel
    launch.py   `add_memory`: checks and launches; `benchmarks/kernels/twin.py` has it in plain torch

Shapes: R rows (query tokens) of a step, H query heads, J KV heads, G = H / J, D head size, V size of a head's values, P
tokens of the pool, Q map rows of the pool, N memory slots, K entries of the largest memory, M of them with maps, L
layers.

V is D but for latents (MLA), where D is 576 and V 512: no power of 2, so the kernel multiplies the first V numbers of
queries and keys, and the others, by themselves. Their one head for all query heads is read as if it were several, each
of up to 16 query heads: what a program reads for them has to fit into its registers.

A slot holds what one memory with one set of weights needs; requests with the same memory and weights share it. Slot 0
means "no memory", so tables have N + 1 rows. Tables have terms for each entry, which are those of all its tokens. A
slot whose tokens are adjacent in the pool and have neutral terms, as in a trained memory, is read without them. For a
row of slot c, a token t of its memory enters layer l with

    logit_t = key_scale_t * (q . k_t) * softmax_scale + log_weight_t + bias_l,c
    value_t = value_scale_t * value_gate_l,c * v_t

and the output o of its self-attention, with log-sum-exp lse, becomes

    merged      softmax([logits ; log_remainder + bias ; lse]) [values ; 0 ; o]
    decoupled   o + softmax([logits ; 0]) [values ; 0] + value_gate_l,c sum_k map_weight_k map_out_k <map_in_k, o>

where a map row acts on the G heads of its KV head as one vector [G V]. All sums are float32.

`add_memory` launches one kernel. A tile is up to 128 / G rows of one slot. One program reads all of its memory if that
is small (up to 512 tokens) or the step has tiles enough for all processors. Otherwise each memory is split over several
programs, and the last of a tile's to finish merges what they have read. A CUDA graph of few rows can split if the pool
has room for a memory that is not small, because the memories of its steps are not known at capture; the plan of each
step says how each memory is split, so that a small one is read by one program.
"""
