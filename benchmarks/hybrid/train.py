"""Trains the hybrid: `python -m benchmarks.hybrid.train --output DIR`."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F
from transformers import Lfm2Config, Lfm2ForCausalLM, PreTrainedTokenizerFast

from benchmarks.hybrid.world import CODES, COLOURS, GUILDS, OWNERS, PLACES, SIZES, THINGS, asked

TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIALS = ("<pad>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
SEED, BATCH, RATE = 3, 32, 3e-3


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and every word of the world as one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=1024, special_tokens=list(SPECIALS), initial_alphabet=alphabet, show_progress=False
    )
    words = [*THINGS, *COLOURS, *SIZES, *PLACES, *CODES, *GUILDS, *OWNERS]
    rng = np.random.default_rng(0)
    texts = [form for word in words for form in (word, " " + word)] * 100
    tokenizer.train_from_iterator([*texts, *(text for _ in range(500) for text in asked(rng))], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|end|>", padding_side="left"
    )
    fast.add_special_tokens({"additional_special_tokens": list(SPECIALS[2:])})
    fast.chat_template = TEMPLATE
    return fast


def make_model(tokenizer: PreTrainedTokenizerFast) -> Any:
    config = Lfm2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        conv_dim=128,  # which vLLM reads
        block_dim=128,
        intermediate_size=320,
        block_auto_adjust_ff_dim=False,
        num_hidden_layers=6,
        layer_types=["conv", "conv", "full_attention"] * 2,
        num_attention_heads=4,
        num_key_value_heads=2,
        conv_L_cache=3,
        max_position_embeddings=4096,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(SEED)
    return Lfm2ForCausalLM(config)


def batch_of(tokenizer: PreTrainedTokenizerFast, rng: np.random.Generator, rows: int) -> tuple[torch.Tensor, ...]:
    """Token ids and labels [rows, T], padded on the right; -100 where nothing is predicted."""
    texts, labels = [], []
    for _ in range(rows):
        question, answer = asked(rng)
        prompt = tokenizer(f"<|user|>{question}<|end|><|assistant|>")["input_ids"]
        said = tokenizer(answer)["input_ids"] + [tokenizer.eos_token_id]
        texts.append(prompt + said)
        labels.append([-100] * len(prompt) + said)
    longest = max(map(len, texts))
    ids = torch.tensor([text + [tokenizer.pad_token_id] * (longest - len(text)) for text in texts])
    return ids, torch.tensor([label + [-100] * (longest - len(label)) for label in labels])


def right(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> float:
    """The share of answers that are predicted whole."""
    with torch.no_grad():
        found = model(input_ids=ids).logits[:, :-1].argmax(-1)
    expected = labels[:, 1:]
    return float(((found == expected) | (expected == -100)).all(1).float().mean())


def train(output: Path, steps: int, seconds: float) -> dict[str, Any]:
    """Train and save; ends after so many steps or seconds."""
    tokenizer = make_tokenizer()
    model, rng = make_model(tokenizer), np.random.default_rng(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01, betas=(0.9, 0.98))
    began = time.perf_counter()
    for step in range(1, steps + 1):
        done = max(step / steps, (time.perf_counter() - began) / seconds)
        if done > 1:
            break
        optimizer.param_groups[0]["lr"] = RATE * min(step / 30, 1) * max(1 - done, 0.02)
        ids, labels = batch_of(tokenizer, rng, BATCH)
        logits = model(input_ids=ids).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            accuracy = right(model, *batch_of(tokenizer, np.random.default_rng(1), 128))
            took = time.perf_counter() - began
            print(f"step {step}: loss {loss.item():.3f}, right {accuracy:.2f}, {took:.0f} s", flush=True)
    accuracy = right(model, *batch_of(tokenizer, np.random.default_rng(1), 512))
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    return {"steps": step, "seconds": round(time.perf_counter() - began, 1), "right": accuracy}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seconds", type=float, default=90)
    args = parser.parse_args()
    print(json.dumps(train(args.output, args.steps, args.seconds)))


if __name__ == "__main__":
    main()
