"""The vLLM that runs us: our settings, loggers and refusals in it, its device, and the rows of its steps."""
