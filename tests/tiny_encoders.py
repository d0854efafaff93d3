"""Small encoders with random weights, in folders: classifiers of pairs, and encoders of sentences."""

from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

WORDS = "what which is does the code of lima oslo have has town a ? . 1 2 how tall ana not"


def save_classifier(folder: Path, outputs: int, kind: Any = BertForSequenceClassification) -> Path:
    """A tiny BERT with its tokenizer."""
    torch.manual_seed(outputs)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS.split()]
    tokenizer = BertTokenizer(vocab={word: number for number, word in enumerate(vocabulary)})
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=40,
        initializer_range=1.0,
        num_labels=outputs,
    )
    kind(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
