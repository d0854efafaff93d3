"""The paper's figures: each is a function over the folder of a finished run, and its picture.

    python -m benchmarks.continual.diagnostics NAME --out DIR [--method M] [--budget B] [--seed S ...]

DIR is the folder of a `python -m benchmarks.continual run`, read by `benchmarks.continual.results`;
DIR/diagnostics/NAME.json and NAME.png are written.
"""
