"""JSON of unknown origin."""

from __future__ import annotations

import gc

import pytest

from inducekv_vllm.bounded_json import without_collections


def test_collections_go_on_afterwards() -> None:
    with pytest.raises(KeyError), without_collections():
        assert not gc.isenabled()
        with without_collections():
            pass
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()
