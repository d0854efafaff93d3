"""From a table of questions to a served task: memory, LoRA and retrieved examples, taught from the same rows.

    python -m benchmarks.from_a_table --model DIR --work DIR [--base FILE --base-train FILE] [--task CSV ...]

The default table has 80 made-up support tickets and the teams that they go to, whose names no model knows; 24 others
are asked. A tenth of the rows is held out for validation. Each way of `learned.py` keeps what it has learned in
`--work`, so a run that is stopped goes on. Then two vLLM servers, one with InduceKV and one with `--enable-lora`, are
asked over HTTP: the tickets, `--base` questions that the model answers well by itself, and longer and longer tickets,
whose time to first token is taken. Questions of `--base-train` are given to the gate of one of the memories.

Prints the table of docs/results.md and the result as JSON, which `--output` keeps
(`benchmarks/results/from_a_table.json`).
"""
