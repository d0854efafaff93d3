"""Facts that are taught, not trained: which questions are answered from them, which are not, and how fast.

families.py   families of facts from installed packages, in wordings that are stored and in others
refusal.py    half of the facts are stored, all are asked: what is answered from the memory
teaching.py   over HTTP, beside running streams: from the call to the first right answer
"""
