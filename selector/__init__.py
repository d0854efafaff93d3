"""The offline side of InduceKV: task data, extraction from a frozen backbone, injection in transformers, selection."""
