"""The demonstration on a real pretrained model, SmolLM2-135M-Instruct.

teaching    a memory and PromptReplay's exemplars of a few real-data tasks, learned once and kept in the cache
run_demo    a server with that memory: `make demo-real`
"""
