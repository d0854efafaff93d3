"""What tells one training example from another."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any


def source_digest_of(messages: Sequence[dict[str, Any]], images: Sequence[bytes]) -> str:
    """sha256 of the model's input: the messages and the bytes of the images, not their paths."""
    content = {"messages": list(messages), "images": [hashlib.sha256(data).hexdigest() for data in images]}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
