"""A bundle in a worker's host memory: read and checked, with what its requests look up there.

Shapes: see the package; B entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..backbone.fact_reader import FactReader
from ..backbone.stored_facts import StoredAnswers
from ..bundle import Bundle
from ..bundle.lookup import BundleIndex
from ..gate import WordScores
from ..retrieval.entry_terms import IntArray

HEAP_BYTES = 12  # that Python's objects take for each byte of the metadata; measured with 20 facts, fewer with more


@dataclass(frozen=True, eq=False, kw_only=True)
class HostPart:
    """What stays on the host while a bundle is resident."""

    index: BundleIndex
    first_layers: IntArray  # [B], the first layer in which an entry does anything
    # On the first rank: the part of a gate that looks at words, facts, and what reads a question for either.
    words: WordScores | None = None
    facts: StoredAnswers | None = None
    reader: FactReader | None = None


@dataclass(frozen=True, eq=False)
class HostBundle:
    """What a bundle's place in the pool is filled from, and what stays on the host. Nothing has to be read again."""

    bundle: Bundle
    part: HostPart
    nbytes: int  # about

    @classmethod
    def of(
        cls,
        bundle: Bundle,
        words: WordScores | None = None,
        facts: StoredAnswers | None = None,
        reader: FactReader | None = None,
    ) -> HostBundle:
        """Make its index. Arguments as in `HostPart`."""
        part = HostPart(
            index=BundleIndex.from_bundle(bundle),
            first_layers=first_layers(bundle),
            words=words,
            facts=facts,
            reader=reader,
        )
        tensors = sum(tensor.nbytes for tensor in bundle.tensors().values())
        return cls(bundle, part, tensors + HEAP_BYTES * len(bundle.metadata.model_dump_json()))


def first_layers(bundle: Bundle) -> IntArray:
    """The first layer in which each entry of decoupled memory does anything, L if none: [B].

    Values of 0 add nothing to the output, whatever their keys are. To merged memory they do.
    """
    L, B = bundle.payload_values.shape[:2]
    if bundle.metadata.form == "merged":
        return np.zeros(B, dtype=np.int64)
    acts = bundle.payload_values.flatten(2).any(dim=2)  # [L, B]
    if bundle.map_out is not None:
        acts |= bundle.map_out.flatten(2).any(dim=2)
    acts &= (bundle.value_gates != 0)[:, None]
    found: IntArray = torch.where(acts.any(dim=0), acts.int().argmax(dim=0), L).numpy()
    return found
