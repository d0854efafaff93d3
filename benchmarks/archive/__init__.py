"""docs/archive/: every file of benchmarks/results/ as tables, and the commands that made them.

    python -m benchmarks.archive            # writes docs/archive/
    python -m benchmarks.archive --figures  # writes the four plots of docs/results.md, too

`catalogue.toml` says which file stands where. Pages are generated: change the catalogue or the renderer, not them.
"""
