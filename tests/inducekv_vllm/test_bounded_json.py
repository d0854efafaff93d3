"""JSON of unknown origin."""

from __future__ import annotations

import gc

import pytest

from inducekv_vllm.bounded_json import without_collections
from inducekv_vllm.bundle import read_bundle
from inducekv_vllm.errors import BundleError


def test_collections_go_on_afterwards() -> None:
    with without_collections():
        assert not gc.isenabled()
        with without_collections():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_collections_go_on_after_an_error() -> None:
    with pytest.raises(BundleError):
        read_bundle("no-such-file")
    assert gc.isenabled()
