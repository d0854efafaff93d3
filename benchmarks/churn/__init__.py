"""A soak test of a server under change: requests over four bundles that are replaced and unloaded meanwhile.

run.py        the command
changes.py    who changes the bundles, and which contents a name stood for at a time
crowd.py      what each content answers alone, the requests, and the verdict on each answer
leaks.py      what is left in the server afterwards

loads.py          what a load costs, and what running requests notice
fragmentation.py  what holes in the memory pool cost
"""
