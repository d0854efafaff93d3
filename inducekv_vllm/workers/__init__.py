"""What runs in a worker of vLLM: resident bundles, decisions, and the memory of running requests."""
