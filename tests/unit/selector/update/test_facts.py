"""What a run keeps as facts takes no more bytes than its budget's entries may."""

from pathlib import Path

import pytest

from inducekv_vllm.errors import CapacityError
from inducekv_vllm.teaching import fact_of, stored_bytes
from selector.backbone.model import Backbone
from selector.backbone.scoring import Scorer
from selector.update.facts import OF_EXAMPLES, _taught, most_bytes
from tests.tiny_families import FAMILIES


def test_facts_of_runs_take_what_entries_may_take(tmp_path: Path) -> None:
    scorer = Scorer(Backbone.load(FAMILIES["llama"](tmp_path)))
    of_runs = [fact_of(f"What is number {n}?", "this", id=f"{OF_EXAMPLES}t/{n}") for n in range(30)]
    by_hand = [fact_of(f"Who is number {n}?", "this") for n in range(200)]
    first = _taught(None, of_runs[:1], scorer, budget=10**6, payload_tokens=1)
    one_entry = most_bytes(first.metadata.backbone, 1, 1)
    budget = stored_bytes(None, of_runs) // one_entry
    assert len(_taught(None, of_runs, scorer, budget + 1, 1).metadata.facts) == 30
    refused = f"the facts of runs would take .* more than the {budget * one_entry} of {budget} entries"
    with pytest.raises(CapacityError, match=refused):
        _taught(first, of_runs, scorer, budget, 1)
    beside = _taught(None, by_hand, scorer, 10**6, 1)  # what is taught by hand has a budget of its own
    assert len(_taught(beside, of_runs, scorer, budget + 1, 1).metadata.facts) == 230
