"""Many bundles on one server: more than its pool has room for, found by name when a request asks for them.

run.py        the command
bundles.py    the bundles, and what each of them answers alone
traffic.py    requests under Zipf's law, a scan, strangers' names, and the verdict on each answer
names.py      a server that knows 100,000 names
alone.py      a warm name of a fleet against the only bundle of a server
router.py     one fleet on two servers behind vLLM's router
"""
