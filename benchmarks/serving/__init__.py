"""What a memory costs while serving: three servers side by side, one asked at a time, the methods by turns.

- `none`              vLLM without any plugin
- `idle`              the base model's name on the server with the plugin, where all bundles are loaded
- `memory_B{64,256}`  a bundle of B entries, all of them in attention
- `..._top8`          the same bundle, the 8 nearest entries only
- `decoupled_B64_*`   64 entries as decoupled memory, acting on the `prompt`, the `text` after the picture, or the
                      `generation`
- `gated_*`           one task in the sizes of the default recipe behind a gate, acting on the `generation` (in the
                      layers from the gate's last one on: `same_pass`), the `text` or the `prompt`; `gated_closed`: the
                      gate opens for no request
- `longer_prompt`     no plugin, the prompt longer by 2048 tokens: what 256 entries of 8 tokens would cost as text
- `prompt_replay`     no plugin, the same exemplars as chat turns with their pictures, as many as the context takes
- `turn2_*`           the second turn of a conversation whose first the server has answered
- `lora`              vLLM's LoRA on a server of its own, every linear layer; `lora_none`: no adapter on that server

The three servers run at the same time, on one GPU or on the same cores, so that every ratio is of one run: `x` to
`none`, `x_own` to the same server without memory or adapter. Passes over all cells go on until the budget is spent: a
longer one gives narrower quartiles. A cell is a number of requests at a time and a length of prompts. Lengths vary by 8
tokens, and none ends a block of the KV cache, where memory has another case, but in cells that are for it. Requests are
text alone but in cells with pictures; without one, memory of the text is that of the prompt.

Measured are the time to first token (TTFT), the time per output token after the first (TPOT), and output tokens a
second of all requests together, over streamed requests with a fixed number of generated tokens. No two conversations
share a prompt or a picture, so neither prefix nor image caches help anyone but a second turn. Numbers are medians.

A geometry's model has no weights: vLLM makes them. Bundles and adapter have random content. Before the first pass each
gate is asked once what it decides (`traces`).

`steps.py` counts what a single decoding step launches. `locustfile.py` puts load on a server that is already there.
"""
