"""What explains a run's numbers: each diagnostic reads the folder of a finished run and measures one thing.

    python -m benchmarks.continual.diagnostics NAME --out DIR [--method M] [--budget B] [--seed S ...]

DIR is the folder of a `python -m benchmarks.continual run`; DIR/diagnostics/NAME.json and NAME.png are written. The
table of all names and their interface are in `__main__`, statistics that several share in `statistics`.
"""
