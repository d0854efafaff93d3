"""What a request for memory asks of the engine, and what comes back: for HTTP, and for `vllm.LLM`."""
