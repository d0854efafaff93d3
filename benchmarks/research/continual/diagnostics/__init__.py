"""The paper's figures of a finished run: `python -m benchmarks.research.continual.diagnostics NAME --out DIR`.

Each is a function from a finished run to JSON values, and one that draws these; `results.Finished` reads the run.

memory_attention    hit_rate, ambiguity: retrieval    diversity    calibration    order, sweeps: comparison
"""
