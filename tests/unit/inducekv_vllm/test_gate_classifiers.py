"""The parts of a gate that see means and words, against their definitions, and in a file."""

import math
from collections import Counter
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
import torch

from inducekv_vllm.bundle import Gate, read_bundle, write_bundle
from inducekv_vllm.errors import BundleError
from inducekv_vllm.gate import (
    BUCKETS,
    RANGE,
    MeanScores,
    TokenScores,
    TurnMarks,
    WordScores,
    as_evidence,
    ends_clause,
    evidence_of_texts,
    prompt_evidence,
    runs_of_tokens,
)
from inducekv_vllm.gate import evidence as evidence_module
from inducekv_vllm.gate.clauses import runs
from inducekv_vllm.gate.words import MOST_WORDS, run_counts, runs_of_words
from tests.bundles import classified_gate, random_gated_bundle

K, S, F = 3, 2, 16


def test_the_words_of_a_text() -> None:
    buckets, (counts,) = run_counts("Go, GO on")
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
    ends = words[: MOST_WORDS // 2] + words[-MOST_WORDS // 2 :]
    assert runs_of_words(" ".join(words)) == (ends, [range(MOST_WORDS)])
    sentences = " ".join(f"{word}." if number % 10 == 9 else word for number, word in enumerate(words))
    seen, found = runs_of_words(sentences)
    assert seen == ends
    assert found[0] == range(MOST_WORDS)
    assert all(run.start % 10 == run.stop % 10 == 0 for run in found)
    assert {place for run in found[1:] for place in run} == {*range(60), *range(MOST_WORDS - 60, MOST_WORDS)}


@pytest.mark.parametrize("text", ["", "?!", "What is it?"])
def test_log_odds_of_words(text: str) -> None:
    rng = np.random.default_rng(0)
    rarity = rng.random(BUCKETS).astype(np.float32) + 0.5
    weights, offsets = (rng.standard_normal(shape).astype(np.float32) for shape in ((K, BUCKETS), K))
    buckets, counts = run_counts(text)
    assert len(counts) == 1
    vector = np.zeros(BUCKETS)
    vector[buckets] = counts[0] * rarity[buckets]
    vector /= np.linalg.norm(vector) or 1
    found = WordScores(rarity, weights, offsets).evidence(text)
    np.testing.assert_allclose(found, as_evidence(weights @ vector + offsets), rtol=1e-5)
    assert found.dtype == np.float32


def mean_scores() -> MeanScores:
    generator = torch.Generator().manual_seed(0)
    center, scale = torch.randn(S, F, generator=generator), torch.rand(S, F, generator=generator) + 0.5
    return MeanScores(
        center,
        scale,
        torch.randn(K, S, F, generator=generator) / 4,
        torch.tensor([-1.0, 0.0, 2.0]),
        frozenset({20, 30}),
    )


def test_ranks_add_up() -> None:
    scores, means = mean_scores(), torch.randn(4, S, F, generator=torch.Generator().manual_seed(1))
    parts = (slice(0, 8), slice(8, 16))
    ranks = [
        MeanScores(
            scores.center[:, p], scores.scale[:, p], scores.directions[:, :, p], scores.offsets, scores.clause_ends
        )
        for p in parts
    ]
    sums: list[torch.Tensor] = []
    for rank, part in zip(ranks, parts, strict=True):
        rank.evidence(means[:, :, part], lambda own: sums.append(own) or own)  # type: ignore[func-returns-value]
    total = torch.stack(sums).sum(dim=0)
    for rank, part in zip(ranks, parts, strict=True):
        torch.testing.assert_close(rank.evidence(means[:, :, part], lambda own: total), scores.evidence(means))
    assert bool(scores.evidence(means).gt(0).any())


@pytest.mark.parametrize("num_text", [0, 3, 40])
@pytest.mark.parametrize("with_prototypes", [False, True])
def test_the_evidence_of_a_prompt(num_text: int, with_prototypes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text alone is in the means, however many pieces it is read in."""
    monkeypatch.setattr(evidence_module, "PIECE", 17)
    token_ids = [9, *range(10, 10 + num_text), 5, 5]  # of 40, a clause ends with the 11th and the 21st
    values = torch.randn(len(token_ids), S, F, generator=torch.Generator().manual_seed(2))
    means, P = mean_scores(), 2 if with_prototypes else 0
    prototypes = torch.nn.functional.normalize(torch.randn(S, P, F, generator=torch.Generator().manual_seed(3)), dim=2)
    tokens = TokenScores(means.center, means.scale, prototypes, torch.zeros(S, P))
    arguments = (token_ids, TurnMarks((9,), None), tokens, {5}, lambda at: values[at], lambda sums: sums)
    found = prompt_evidence(*arguments, means)
    text = values[1 : 1 + num_text]
    runs = [text[a:b].mean(dim=0) for a, b in ((0, 40), (0, 11), (0, 21), (11, 21), (11, 40), (21, 40))]
    expected = {0: means.center[None], 3: text.mean(dim=0)[None], 40: torch.stack(runs)}[num_text]
    torch.testing.assert_close(found[S * P :], means.evidence(expected))
    if with_prototypes:
        torch.testing.assert_close(found[: S * P], prompt_evidence(*arguments))


# Runs of clauses


def spoken_runs(text: str) -> list[str]:
    words, found = runs_of_words(text)
    return [" ".join(words[run.start : run.stop]) for run in found]


def test_a_run_is_counted_as_a_text_of_its_own() -> None:
    text = "Hi, it is me again. Where does the train go, and when does it go?"
    buckets, counts = run_counts(text)
    assert len(counts) == 9
    for spoken, of_run in zip(spoken_runs(text), counts, strict=True):
        alone, (expected,) = run_counts(spoken)
        present = of_run.nonzero()[0]
        np.testing.assert_array_equal(buckets[present], alone)
        np.testing.assert_allclose(of_run[present], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", [""]),
        ("?!", [""]),
        ("What is it?", ["what is it"]),
        ("Hi! What is it?", ["hi what is it", "what is it"]),
        (
            "hello, quick question: what is it",
            ["hello quick question what is it", "hello quick question", *["what is it"]],
        ),
        (
            "At 3.14 p.m. he (my son!) ran off",
            ["at 3 14 p m he my son ran off", "at 3 14 p m", "he my son ran off", "he my son"],
        ),
        ("one two\nthree four five", ["one two three four five", "three four five"]),
    ],
)
def test_runs_of_words(text: str, expected: list[str]) -> None:
    found = spoken_runs(text)
    assert found[0] == expected[0]
    assert sorted(set(expected[1:])) == sorted(run for run in found[1:] if run in expected)
    assert len(found) == len(set(found))


def test_runs_are_of_a_few_clauses_at_either_end() -> None:
    ends = list(range(4, 4 * 30 + 1, 4))
    found = list(runs(ends))
    assert found[0] == range(120)
    assert {len(run) // 4 for run in found[1:]} == {1, 2, 3}
    seen = {place // 4 for run in found[1:] for place in run}
    assert seen == {*range(6), *range(24, 30)}
    assert all(run.stop <= 24 or run.start >= 96 for run in found[1:])
    assert list(runs([2, 5])) == [range(5), range(2, 5)]  # two words are no run
    assert list(runs([0])) == [range(0)]


@pytest.mark.parametrize(
    ("token", "ends"),
    [
        (".", True),
        ("?\n", True),
        (" said,", True),
        ('!"', True),
        ("\n\n", True),
        ("。", True),
        ("3.1", False),
        (" a", False),
    ],
)
def test_tokens_that_end_a_clause(token: str, ends: bool) -> None:
    assert ends_clause(token) == ends


def test_tokens_and_words_have_the_same_clauses() -> None:
    words = ["hi", ",", "who", "goes", "there", "?", "it", "is", "me", "."]
    found = runs_of_tokens(list(range(len(words))), {at for at, word in enumerate(words) if ends_clause(word)})
    spoken = [" ".join(words[at] for at in run if words[at].isalpha()) for run in found]
    assert spoken == spoken_runs("Hi, who goes there? It is me.")


def test_the_best_run_counts_if_it_is_better_than_by_chance() -> None:
    scores = mean_scores()
    means = torch.randn(6, S, F, generator=torch.Generator().manual_seed(4)) + scores.center
    alone = [scores.evidence(mean[None]) for mean in means]
    lost = 0.5 * math.log(6) / (2 * RANGE)
    expected = torch.stack([alone[0], *((each - lost).clamp(min=0) for each in alone[1:])]).amax(dim=0)
    torch.testing.assert_close(scores.evidence(means), expected)
    assert not torch.equal(expected, alone[0])


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


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rarity": torch.zeros(BUCKETS)}, "gate_rarity must be above 0"),
        ({"words": torch.zeros(K, 5)}, "gate_words must be"),
        ({"directions": torch.full((K, 2, 16), torch.nan)}, "gate_directions contains NaN"),
        ({"words": None}, "needs all of its tensors"),
        ({"clause_ends": None}, "needs all of its tensors"),
        (dict.fromkeys(("directions", "rarity", "words", "offsets", "clause_ends")), "prototypes or classifiers"),
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


@pytest.mark.parametrize("prototypes", [0, 5])
@pytest.mark.parametrize("with_means", [True, False])
def test_prompts_that_are_seen_together_have_the_evidence_of_each_by_itself(prototypes: int, with_means: bool) -> None:
    if not prototypes and not with_means:
        pytest.skip("a gate sees something")
    generator = torch.Generator().manual_seed(prototypes)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    center, scale = normal(S, F), normal(S, F).abs() + 0.1
    scores = TokenScores(center, scale, normal(S, prototypes, F), torch.full((S, prototypes), 0.1))
    means = MeanScores(center, scale, normal(K, S, F), normal(K), frozenset({7, 8})) if with_means else None
    texts = [torch.randint(1, 20, (n,), generator=generator).tolist() for n in (16, 40, 17, 90)]
    texts.append([1] * 20)  # one clause: it has no runs
    values = [normal(len(text), S, F) for text in texts]
    found = evidence_of_texts(texts, scores, torch.cat(values), lambda sums: sums, means)
    for row, text, own in zip(found, texts, values, strict=True):
        alone = prompt_evidence(text, TurnMarks((), None), scores, (), lambda at, own=own: own[at], lambda x: x, means)
        torch.testing.assert_close(row, alone, rtol=0, atol=1e-6)
