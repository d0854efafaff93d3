"""The parts of a gate that see means and words, against their definitions, and in a file."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
import torch

from inducekv_vllm.bundle import Gate, read_bundle, write_bundle
from inducekv_vllm.errors import BundleError
from inducekv_vllm.gate import BUCKETS, MeanScores, TokenScores, TurnMarks, WordScores, as_evidence, prompt_evidence
from inducekv_vllm.gate import evidence as evidence_module
from inducekv_vllm.gate.words import MOST_WORDS, word_counts
from tests.bundles import classified_gate, random_gated_bundle

K, S, F = 3, 2, 16


def test_the_words_of_a_text() -> None:
    buckets, counts = word_counts("Go, GO on")
    pieces = Counter(["w go", "w go", "w on", "w go go", "w go on"])
    for word in ("go", "go", "on"):
        spaced = f" {word} "
        pieces.update(spaced[a:b] for a in range(4) for b in range(a + 2, 5))
    expected: Counter[int] = Counter()
    for piece, count in pieces.items():
        expected[crc32(piece.encode()) % BUCKETS] += count
    assert buckets.tolist() == sorted(expected)
    np.testing.assert_allclose(counts, [1 + math.log(expected[bucket]) for bucket in sorted(expected)], rtol=1e-6)


def test_a_long_text_is_seen_at_both_ends() -> None:
    words = [f"word{number}" for number in range(3 * MOST_WORDS)]
    ends = " ".join(words[: MOST_WORDS // 2] + words[-MOST_WORDS // 2 :])
    assert word_counts(" ".join(words))[0].tolist() == word_counts(ends)[0].tolist()


@pytest.mark.parametrize("text", ["", "?!", "What is it?"])
def test_log_odds_of_words(text: str) -> None:
    rng = np.random.default_rng(0)
    rarity = rng.random(BUCKETS).astype(np.float32) + 0.5
    weights, offsets = (rng.standard_normal(shape).astype(np.float32) for shape in ((K, BUCKETS), K))
    buckets, counts = word_counts(text)
    vector = np.zeros(BUCKETS)
    vector[buckets] = counts * rarity[buckets]
    vector /= np.linalg.norm(vector) or 1
    found = WordScores(rarity, weights, offsets).evidence(text)
    np.testing.assert_allclose(found, as_evidence(weights @ vector + offsets), rtol=1e-5)
    assert found.dtype == np.float32


def mean_scores() -> MeanScores:
    generator = torch.Generator().manual_seed(0)
    center, scale = torch.randn(S, F, generator=generator), torch.rand(S, F, generator=generator) + 0.5
    return MeanScores(center, scale, torch.randn(K, S, F, generator=generator) / 4, torch.tensor([-1.0, 0.0, 2.0]))


def test_ranks_add_up() -> None:
    scores, mean = mean_scores(), torch.randn(S, F, generator=torch.Generator().manual_seed(1))
    parts = (slice(0, 8), slice(8, 16))
    ranks = [
        MeanScores(scores.center[:, p], scores.scale[:, p], scores.directions[:, :, p], scores.offsets) for p in parts
    ]
    sums: list[torch.Tensor] = []
    for rank, part in zip(ranks, parts, strict=True):
        rank.evidence(mean[:, part], lambda own: sums.append(own) or own)  # type: ignore[func-returns-value]
    total = torch.stack(sums).sum(dim=0)
    for rank, part in zip(ranks, parts, strict=True):
        torch.testing.assert_close(rank.evidence(mean[:, part], lambda own: total), scores.evidence(mean))
    assert bool(scores.evidence(mean).gt(0).any())


@pytest.mark.parametrize("num_text", [0, 3, 40])
@pytest.mark.parametrize("with_prototypes", [False, True])
def test_the_evidence_of_a_prompt(num_text: int, with_prototypes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text alone is in the mean, however many pieces it is read in."""
    monkeypatch.setattr(evidence_module, "PIECE", 17)
    token_ids = [9, *range(10, 10 + num_text), 5, 5]
    values = torch.randn(len(token_ids), S, F, generator=torch.Generator().manual_seed(2))
    means, P = mean_scores(), 2 if with_prototypes else 0
    prototypes = torch.nn.functional.normalize(torch.randn(S, P, F, generator=torch.Generator().manual_seed(3)), dim=2)
    tokens = TokenScores(means.center, means.scale, prototypes, torch.zeros(S, P))
    arguments = (token_ids, TurnMarks((9,), None), tokens, {5}, lambda at: values[at], lambda sums: sums)
    found = prompt_evidence(*arguments, means)
    mean = values[1 : 1 + num_text].mean(dim=0) if num_text else means.center
    torch.testing.assert_close(found[S * P :], means.evidence(mean))
    if with_prototypes:
        torch.testing.assert_close(found[: S * P], prompt_evidence(*arguments))


# In a file


def test_a_file_keeps_them(tmp_path: Path) -> None:
    gate = classified_gate()
    bundle = random_gated_bundle(gate=gate)
    write_bundle(bundle, tmp_path / "bundle.safetensors")
    read = read_bundle(tmp_path / "bundle.safetensors").gate
    assert read is not None
    assert read.classified == K
    for name, tensor in gate.stored().tensors().items():
        assert torch.equal(read.tensors()[name], tensor), name
    assert read.token_digest == gate.stored().token_digest != classified_gate(seed=1).stored().token_digest


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rarity": torch.zeros(BUCKETS)}, "gate_rarity must be above 0"),
        ({"words": torch.zeros(K, 5)}, "gate_words must be"),
        ({"directions": torch.full((K, 2, 16), torch.nan)}, "gate_directions contains NaN"),
        ({"words": None}, "needs all of its tensors"),
        (dict.fromkeys(("directions", "rarity", "words", "offsets")), "prototypes or classifiers"),
    ],
)
def test_what_a_bundle_refuses(changes: dict[str, torch.Tensor | None], problem: str) -> None:
    gate: Gate = classified_gate(**changes)
    with pytest.raises(BundleError, match=problem):
        random_gated_bundle(gate=gate)


def test_the_classifiers_of_tasks_that_go_are_gone() -> None:
    weights = torch.tensor([[1.0, 0, 0, 2, 0, 0], [0, 0, 3, 0, 0, 4]])  # K = 3, of which the second is nobody's
    gate = classified_gate(weights=weights)
    left = gate.take({"b"})
    assert left.classified == 1
    assert torch.equal(left.weights, torch.tensor([[3.0, 4.0]]))
    assert gate.directions is not None
    assert gate.words is not None
    assert gate.offsets is not None
    assert left.directions is not None
    assert torch.equal(left.directions[0], gate.directions[2])
    assert torch.equal(left.stored().tensors()["gate_words"][0], gate.words[2].half())
    assert torch.equal(left.stored().tensors()["gate_offsets"], gate.offsets[:, [2]])
