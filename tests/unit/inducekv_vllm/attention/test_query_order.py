"""Memory's keys meet queries in the order in which the served model has their numbers."""

import torch

from inducekv_vllm.attention.query_order import in_served_order
from tests.bundles import random_bundle


class Llama4:
    """vLLM's, as far as the order goes."""

    def permute_qk_weight_for_rotary(self) -> None:
        """It loads the rows of W_q [H D, d] so: the first of each pair, then the second."""


def test_keys_come_in_halves_where_queries_do() -> None:
    bundle = random_bundle()
    assert in_served_order(bundle, object()) is bundle
    keys, D = in_served_order(bundle, Llama4()).payload_keys, bundle.payload_keys.shape[-1]
    order = [*range(0, D, 2), *range(1, D, 2)]
    torch.testing.assert_close(keys, bundle.payload_keys[..., order], rtol=0, atol=0)
    query = torch.randn(D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits = bundle.payload_keys.double() @ query
    torch.testing.assert_close(keys.double() @ query[order], logits)
