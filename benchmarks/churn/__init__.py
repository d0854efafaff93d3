"""A server under change: thousands of requests over four bundles, while bundles are replaced, unloaded and loaded.

    run.py        the command
    contents.py   the contents of the bundles, and what each answers when it is asked alone
    changes.py    who changes the bundles while requests run, and which contents a name stood for at a time
    crowd.py      the requests, and the verdict on each answer
    leaks.py      what is left in the server afterwards
    gaps.py       the time between tokens, without changes and with them

The server runs the demo model in float32, with so few blocks of KV cache that requests are preempted.
"""
