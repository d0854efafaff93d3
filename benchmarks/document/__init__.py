"""A document as a memory, against the document in the prompt, retrieved pieces of it, and LoRA."""
