"""Facts that are taught, not trained: which questions are answered from them, which are not, and how fast.

public.py        other people's questions: what is answered, and what must not be
judge.py         a model that judges what words leave open
size.py          time and memory beside many facts
judged_time.py   over HTTP, requests that are judged beside others: to the first token, and what it costs other streams
teaching.py      over HTTP, beside running streams: from the call to the first right answer
common_words.py  makes the file of `inducekv_vllm/facts/languages` that says how common words are
"""
