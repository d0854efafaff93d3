"""The gate against its definition: which tokens decide, the evidence in them, and the rule."""

import numpy as np
import pytest
import torch

from inducekv_vllm.errors import ConfigError
from inducekv_vllm.gate import RelevanceGate, TokenScores, TurnMarks, deciding_tokens, in_pieces, last_averaged
from inducekv_vllm.gate.evidence import WINDOW
from inducekv_vllm.gate.rule import ALIKE
from tests.bundles import random_gate

TASKS = ("colours", "counts", "shapes")
BEGIN, END, IMAGE = (1, 2), 3, 9
MARKS = TurnMarks(BEGIN, END)


A_TURN = [*BEGIN, IMAGE, 6, END, 4]


@pytest.mark.parametrize(
    ("prompt", "marks", "text", "pictures"),
    [
        # Neither the system prompt, nor the marks, nor what the template has behind the turn.
        ([1, 5, 5, *BEGIN, 6, 7, END, 1, 4], MARKS, [5, 6], []),
        ([*BEGIN, 6, 7, END, 4, 8, *BEGIN, 6, END, 4], MARKS, [9], []),  # the last turn
        ([*BEGIN, IMAGE, IMAGE, 6, END, 4, *BEGIN, 7, IMAGE, 8, END], MARKS, [9, 11], [10]),
        # Of an earlier turn only pictures: those of the latest turn that has any.
        ([*A_TURN, *BEGIN, 6, IMAGE, IMAGE, END, 4, *BEGIN, 7, 8, END], MARKS, [15, 16], [9, 10]),
        ([5, IMAGE, *BEGIN, 7, END], MARKS, [4], [1]),  # pictures in the system prompt
        ([5, IMAGE, 6], TurnMarks((), None), [0, 2], [1]),  # a template without marks
        ([5, 6, END, 7], TurnMarks((), END), [0, 1], []),
        ([5, 6, 2, 1], MARKS, [0, 1, 2, 3], []),  # a completion prompt
        ([*BEGIN, 6, 7], MARKS, [2, 3], []),  # a turn that does not end
        ([*BEGIN, 6, 7, 4], TurnMarks(BEGIN, None), [2, 3, 4], []),
        # There is always a token.
        ([*BEGIN], MARKS, [1], []),
        ([*BEGIN, END], MARKS, [2], []),
        ([6, *BEGIN, END, 4], MARKS, [4], []),
        ([IMAGE + 1], MARKS, [0], []),
    ],
)
def test_the_tokens_that_decide(prompt: list[int], marks: TurnMarks, text: list[int], pictures: list[int]) -> None:
    assert deciding_tokens(prompt, marks, {IMAGE}) == (text, pictures)


class TestEvidence:
    @pytest.mark.parametrize("num_tokens", [1, 7, 200])
    def test_it_is_its_definition(self, num_tokens: int) -> None:
        """In float64, with loops."""
        gate = random_gate(seed=num_tokens)
        values = torch.randn(num_tokens, 2, 16, generator=torch.Generator().manual_seed(num_tokens))
        found = gate.token_scores.evidence(values)
        assert found.dtype == torch.float32
        expected = []
        for s in range(2):
            tokens = (values[:, s].double() - gate.center[s].double()) * gate.scale[s].double()
            for p in range(4):
                direction, floor = gate.prototypes[s, p].double(), float(gate.floors[s, p].double())
                best = max(float(token @ direction / token.norm()) for token in tokens)
                expected.append(max(0.0, (best - floor) / (1 - floor)))
        np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-6)
        assert (found >= 0).all()
        assert (found <= 1 + 1e-6).all()

    @pytest.mark.parametrize("num_text", [0, 1, 15, 16, 17, 40])
    def test_the_last_layer_is_averaged_over_the_text(self, num_text: int) -> None:
        values = torch.randn(40, 2, 16, generator=torch.Generator().manual_seed(num_text))
        averaged = last_averaged(values, num_text)
        assert torch.equal(averaged[:, 0], values[:, 0])
        text = values[: num_text or 40, 1].double().numpy()
        means = [text[at : at + WINDOW].mean(axis=0) for at in range(max(1, len(text) - WINDOW + 1))]
        for at, of_token in enumerate(averaged[:, 1]):
            np.testing.assert_allclose(of_token.numpy(), means[min(at, len(means) - 1)], rtol=0, atol=1e-6)

    def test_a_token_without_length_is_like_nothing(self) -> None:
        gate = random_gate(floors=torch.zeros(2, 4))
        assert not gate.token_scores.evidence(gate.center[None]).any()


class TestRule:
    def test_it_is_its_definition(self) -> None:
        rng = np.random.default_rng(0)
        decided = set()
        for _ in range(300):
            weights = rng.standard_normal((3, 5)).astype(np.float32)
            thresholds = (rng.random(3) + 0.2).astype(np.float32)
            evidence = (rng.random(5) * rng.choice([0.3, 1.0])).astype(np.float32)
            margins, likeness = [], []
            for row, threshold in zip(weights.astype(float), thresholds.astype(float), strict=True):
                parts = [float(a) * b for a, b in zip(evidence, row, strict=True)]
                margins.append(sum(parts) - threshold)
                most = sum(float(b) for b in row if b > 0)  # what could speak for the task
                likeness.append(sum(part for part in parts if part > 0) / most if most else 0.0)
            decision = RelevanceGate(weights, thresholds, TASKS).decide(evidence)
            np.testing.assert_allclose(decision.margins, margins, rtol=0, atol=1e-12)
            is_open = max(margins) >= 0
            assert decision.task == (TASKS[margins.index(max(margins))] if is_open else None)
            reason = None if is_open else "below_threshold" if max(likeness) >= ALIKE else "outside"
            assert decision.closed == reason
            decided.add(decision.task or decision.closed)
        assert decided == {*TASKS, "outside", "below_threshold"}

    def test_a_margin_of_exactly_0_is_open_and_the_first_of_equal_tasks_wins(self) -> None:
        weights = np.array([[0.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
        evidence = np.array([1.0, 0.5])
        assert RelevanceGate(weights, [1, 1, 1], TASKS).decide(evidence).task == "counts"
        above = np.nextafter(1, 2)
        assert RelevanceGate(weights, [1, above, above], TASKS).decide(evidence).task is None

    def test_why_it_is_closed(self) -> None:
        gate = RelevanceGate([[2.0, -9.0], [0.0, -0.1]], [1.0, 1.0], ("a", "b"))
        assert gate.decide([1.0, 0.0]).closed is None
        assert gate.decide([1.0, 1.0]).closed == "below_threshold"  # the other part speaks against a
        assert gate.decide([0.2, 1.0]).closed == "below_threshold"
        assert gate.decide([0.19, 1.0]).closed == "outside"  # less than a fifth of what can speak for a
        assert gate.decide([0.0, 0.0]).closed == "outside"  # what is far from everything opens nothing

    def test_whose_facts_count(self) -> None:
        weights, thresholds = [[2.0, 0.0], [0.0, 2.0], [1.0, 1.0]], [1.0, 1.0, 1.5]
        gate = RelevanceGate(weights, thresholds, TASKS, near=(-0.5, -0.2, 0.0))
        assert gate.decide([0.5, 0.5]).fact_tasks == ("colours",)  # open: of this task alone
        assert gate.decide([0.25, 0.4]).fact_tasks == ("colours", "counts")  # margins of exactly -0.5 and -0.2
        assert gate.decide([0.24, 0.39]).fact_tasks == ()
        assert gate.decide([0.25, 0.4], among={"counts"}).fact_tasks == ("counts",)
        strict = RelevanceGate(weights, thresholds, TASKS)
        assert (strict.decide([0.5, 0.4]).fact_tasks, strict.decide([0.4, 0.4]).fact_tasks) == (("colours",), ())

    def test_only_some_tasks_may_be_picked(self) -> None:
        gate = RelevanceGate([[3.0], [2.0], [-1.0]], [1.0, 1.0, 1.0], TASKS)
        assert gate.decide([1.0]).task == "colours"
        assert gate.decide([1.0], among={"counts", "shapes"}).task == "counts"
        last = gate.decide([1.0], among={"shapes"})
        assert (last.task, last.closed) == (None, "outside")
        np.testing.assert_array_equal(last.margins, [2.0, 1.0, -2.0])
        assert gate.decide([1.0], among=()).task is None

    def test_evidence_that_is_not_finite_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="evidence of a gate must be finite"):
            RelevanceGate(np.zeros((3, 5)), np.ones(3), TASKS).decide(np.full(5, np.nan))


@pytest.mark.parametrize(
    ("num_text", "num_media"), [(5, 100), (40, 0), (57, 0), (58, 0), (0, 90), (100, 100), (16, 24), (24, 40), (200, 3)]
)
def test_the_evidence_of_pieces_is_that_of_the_whole(num_text: int, num_media: int) -> None:
    """Tokens of a prompt in any order, 40 of them at once."""
    torch.manual_seed(0)
    order = torch.randperm(num_text + num_media).tolist()
    text, media = order[:num_text], order[num_text:]
    values = torch.randn(len(order), 2, 6, dtype=torch.float64)
    prototypes = torch.nn.functional.normalize(torch.randn(2, 5, 6, dtype=torch.float64), dim=2)
    scores = TokenScores(torch.zeros(2, 6).double(), torch.ones(2, 6).double(), prototypes, torch.zeros(2, 5).double())
    pieces = list(in_pieces(text, media, 40))
    assert all(0 < len(own) + len(others) <= 40 for own, others in pieces)
    found = [scores.evidence(last_averaged(values[own + others], len(own))) for own, others in pieces]
    whole = scores.evidence(last_averaged(values[text + media], num_text))
    torch.testing.assert_close(torch.stack(found).amax(0), whole)
    seen = {token for own, others in pieces for token in own + others}
    assert seen == set(order)
