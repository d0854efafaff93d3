"""What a memory costs while serving: one command, one server, every method interleaved.

- `none`              the base model's name: the request as vLLM serves it without memory
- `memory_B{64,256}`  a bundle of B entries, all of them in attention
- `..._top8`          the same bundle, the 8 nearest entries only
- `decoupled_B64_*`   64 entries as decoupled memory, acting on the `prompt`, the `text` after the picture, or the
                      `generation`
- `gated_*`           one task in the sizes of the default recipe behind a gate, acting on the `generation`, the `text`
                      or the `prompt`; `gated_closed`: the gate opens for no request
- `..._turn2`         the second turn of a conversation whose first the server has answered, against `none_turn2`
- `lora`              a LoRA adapter of at most the bytes of 64 entries, on a server of its own, against `lora_none`,
                      no adapter on that server
- `longer_prompt`     no memory, the prompt longer by 2048 tokens: what 256 entries of 8 tokens would cost as text
- `prompt_replay`     no memory, the same exemplars as chat turns with their pictures, as many as the context takes

locust (`locustfile.py`) measures at each concurrency, over streamed requests with a fixed number of generated tokens:
time to first token (TTFT), time per output token after the first (TPOT), and output tokens a second of all requests
together. No two conversations share a prompt or a picture, so neither prefix nor image caches help anyone but a second
turn. Methods take turns in every round, so that a busy machine slows all of them alike; numbers are medians, and ratios
are against `none` of the same run unless it says otherwise.
"""
