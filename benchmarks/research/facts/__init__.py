"""Facts that are taught, not trained: which questions are answered from them, which are not, and how fast.

families.py     families of facts from installed packages, in wordings that are stored and in others
refusal.py      half of the facts are stored, all are asked: what is answered from the memory
pictures.py     half of the things are stored with a picture, all are asked about in pictures
engine.py       the engine that both ask
seeds_table.py  how both print what they find
behind_gate.py  the same behind a gate of eight tasks: which questions find a fact
full.py         which facts stay when there is no room
extracted.py    the paper's extracted entries with answers in them, beside the prompt
teaching.py     over HTTP, beside running streams: from the call to the first right answer
"""
