"""A bundle in a worker's host memory: read and checked, with what its requests look up there.

Shapes: see the package; B entries, L layers of the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..backbone.fact_reader import FactReader
from ..backbone.stored_facts import StoredAnswers
from ..bundle import Bundle
from ..bundle.lookup import BundleIndex
from ..gate import WordScores
from ..retrieval.entry_terms import IntArray

BoolArray = NDArray[np.bool_]

HEAP_BYTES = 12  # that Python's objects take for each byte of the metadata; measured with 20 facts, fewer with more


@dataclass(frozen=True, eq=False, kw_only=True)
class HostPart:
    """What stays on the host while a bundle is resident."""

    index: BundleIndex
    acts: BoolArray  # [B, L], in which layers an entry does anything
    # On the first rank: the part of a gate that looks at words, facts, and what reads a question for either.
    words: WordScores | None = None
    facts: StoredAnswers | None = None
    reader: FactReader | None = None

    @property
    def first_layers(self) -> IntArray:
        """The first layer in which each entry does anything, L if none: [B]."""
        found: IntArray = np.where(self.acts.any(axis=1), self.acts.argmax(axis=1), self.acts.shape[1])
        return found


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
            acts=layers_of_entries(bundle),
            words=words,
            facts=facts,
            reader=reader,
        )
        tensors = sum(tensor.nbytes for tensor in bundle.tensors().values())
        return cls(bundle, part, tensors + HEAP_BYTES * len(bundle.metadata.model_dump_json()))


def layers_of_entries(bundle: Bundle) -> BoolArray:
    """In which layers of the model each entry does anything: [B, L].

    Values of 0 add nothing to the output of decoupled memory, whatever their keys are. To merged memory they do.
    """
    metadata, values = bundle.metadata, bundle.payload_values
    found = np.zeros((bundle.num_entries, metadata.backbone.num_layers), dtype=np.bool_)
    if metadata.form == "merged":
        return ~found
    acts = values.flatten(2).any(dim=2)  # [layers with payloads, B]
    if bundle.map_out is not None:
        acts |= bundle.map_out.flatten(2).any(dim=2)
    acts &= (bundle.value_gates != 0)[:, None]
    found[:, list(metadata.memory_layers)] = acts.T.numpy()
    return found
