"""The memory bundle: one safetensors file with the whole adaptation state of a task stream.

metadata.py   entries, backbone, form, gate tasks: everything that is not a tensor
tensors.py    the tensors, their digest and their checks
magnitudes.py how large their numbers may be where they are served
signature.py  who made it
rows.py       what it takes of a pool
file.py       reading and writing, atomically and without unpickling
activation.py from which position of a request memory acts
adapters.py   the LoRA adapters that a bundle records
lookup.py     what a bundle's gate and index say about a request
plain_text.py what a question or an answer may not hold
source.py     what tells one training example from another
"""

from .file import MAX_HEADER_BYTES, MAX_SERVED_BYTES, METADATA_KEY, file_content, read_bundle, write_bundle
from .magnitudes import MagnitudeLimits, check_magnitudes, magnitude_limits
from .metadata import (
    FORMAT_VERSION,
    AdapterRecord,
    BackboneFingerprint,
    BundleMetadata,
    EntryRecord,
    FactRecord,
    GateRecord,
    OutputMap,
    PayloadDtype,
    PictureRecord,
    Record,
)
from .signature import Signature, read_private_key, read_public_key, require_signature, sign_digest
from .tensors import (
    ENTRY_AXES,
    UNIT_NORM_TOLERANCE,
    Bundle,
    Gate,
    bundle_digest,
    bundle_without_entries,
    expected_shapes,
    facts_of,
    with_metadata,
)

__all__ = [
    "ENTRY_AXES",
    "FORMAT_VERSION",
    "MAX_HEADER_BYTES",
    "MAX_SERVED_BYTES",
    "METADATA_KEY",
    "UNIT_NORM_TOLERANCE",
    "AdapterRecord",
    "BackboneFingerprint",
    "Bundle",
    "BundleMetadata",
    "EntryRecord",
    "FactRecord",
    "Gate",
    "GateRecord",
    "MagnitudeLimits",
    "OutputMap",
    "PayloadDtype",
    "PictureRecord",
    "Record",
    "Signature",
    "bundle_digest",
    "bundle_without_entries",
    "check_magnitudes",
    "expected_shapes",
    "facts_of",
    "file_content",
    "magnitude_limits",
    "read_bundle",
    "read_private_key",
    "read_public_key",
    "require_signature",
    "sign_digest",
    "with_metadata",
    "write_bundle",
]
