"""What explains a run's numbers: each module reads the folder of a finished run and measures one thing.

    python -m benchmarks.continual.diagnostics NAME --out DIR [--method M] [--budget B] [--seed S ...]

DIR is the folder of a `python -m benchmarks.continual run`; DIR/diagnostics/NAME.json and NAME.png are written.
`framework` has what they share, and says what a diagnostic is.
"""
