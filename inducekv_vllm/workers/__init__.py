"""What runs in a worker of vLLM: resident bundles, the memory of running requests, and key passes."""
