"""vLLM's OpenAI server with memory bundles: a launcher, an endpoint plugin and the registry of loaded bundles."""
