"""Memories from elsewhere: a prefix or soft prompt of PEFT, a cartridge, or a text becomes one entry of merged memory.

    text.py        the tokens of a text
    peft.py        an adapter folder of PEFT
    cartridge.py   a file of HazyResearch's Cartridges
    torch_file.py  a file of `torch.save`, read without running anything in it
    source.py      what each of them is before the model is there
    prefix.py      keys and values of tokens in front of a request, as memory at position 0 has them
    bundle.py      the bundle

In the source, a request stands behind p virtual tokens, from position p on; here it stands from 0 on. RoPE makes
attention depend on distances alone, q(t + p) k(i) = q(t) k(i - p), so the virtual tokens stand at -p to -1 here.

Shapes: p virtual tokens, L layers, J KV heads, D head size, d hidden size.
"""
