"""The shortlist: against a plain ranking, its order of ties, its ends."""

import pytest
from torch import Tensor

from selector.paper.shortlist import nearest
from tests.unit.selector.exact import unit_vectors


def by_loops(keys: Tensor, queries: Tensor, count: int) -> list[int]:
    """Rank by rank, each query's next candidate, the most similar first."""
    rankings = [sorted(range(len(keys)), key=lambda i, q=q: (-float(keys[i] @ q), i)) for q in queries]
    chosen: list[int] = []
    for rank in range(len(keys)):
        offers = sorted(
            (-float(keys[order[rank]] @ q), order[rank]) for order, q in zip(rankings, queries, strict=True)
        )
        for _, candidate in offers:
            if candidate not in chosen and len(chosen) < count:
                chosen.append(candidate)
    return sorted(chosen)


@pytest.mark.parametrize("count", [1, 5, 20, 59])
@pytest.mark.parametrize("num_queries", [1, 4, 30])
def test_it_is_the_ranking_by_best_rank(count: int, num_queries: int) -> None:
    keys, queries = unit_vectors(60, 8), unit_vectors(num_queries, 8, seed=1)
    assert nearest(keys, queries, count).tolist() == by_loops(keys, queries, count)


def test_a_shortlist_as_long_as_the_pool_is_the_pool() -> None:
    keys = unit_vectors(7, 4)
    assert nearest(keys, keys[:2], 7).tolist() == nearest(keys, keys[:2], 99).tolist() == list(range(7))
