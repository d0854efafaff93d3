"""Mutated bundles and task files: each is refused with an error of ours, or read as what it is.

reading.py        what reads them
meter.py          the time and the memory that this takes
json_damage.py    changes of JSON that keep its structure
bundle_files.py   mutations of bundles of every format version
task_files.py     mutations of task files
"""
