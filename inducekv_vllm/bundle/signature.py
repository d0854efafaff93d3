"""Who made a bundle: an Ed25519 signature (RFC 8032) over its digest, carried in the file's header.

The digest covers all content, and whoever loads a bundle computes it from the very bytes that are loaded. So a
signature that was checked against that digest holds for what is used, whatever happens to the file meanwhile.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key
from pydantic import Base64Bytes, BaseModel, ConfigDict, Field

from ..errors import BundleError, ConfigError

SIGNATURE_KEY: Final = "inducekv_signature"  # in the metadata of the safetensors header
_CONTEXT: Final = b"inducekv bundle 1\n"  # so that the key's signatures of other things cannot be used here
MAX_KEY_BYTES: Final = 2**16


class Signature(BaseModel):
    """A signature of a bundle's digest."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    algorithm: Literal["ed25519"] = "ed25519"
    key: str = Field(pattern="^[0-9a-f]{64}$")  # sha256 of the raw public key, see `key_name`
    value: Annotated[Base64Bytes, Field(min_length=64, max_length=64)]


@dataclass(frozen=True)
class PublicKey:
    """A key that signatures are checked with."""

    key: Ed25519PublicKey
    name: str  # see `key_name`


def key_name(key: Ed25519PublicKey) -> str:
    """sha256 of the raw public key, in hexadecimal; messages show its first 16 digits."""
    return hashlib.sha256(key.public_bytes_raw()).hexdigest()


def sign_digest(digest: str, key: Ed25519PrivateKey) -> Signature:
    """Sign a bundle's digest."""
    value = base64.b64encode(key.sign(_CONTEXT + digest.encode()))
    return Signature(key=key_name(key.public_key()), value=value)


def require_signature(signature: Signature | None, digest: str, keys: Sequence[PublicKey], source: str) -> None:
    """Check that one of the keys has signed this digest.

    Args:
        digest: computed from the content that is used.
        source: what messages call the bundle.

    Raises:
        BundleError: it is not signed, by another key, or the signature is not one of this content.
    """
    wanted = " or ".join(f"{key.name:.16}" for key in keys)
    if signature is None:
        raise BundleError(f"{source}: the bundle is not signed; expected a signature by the key {wanted}")
    key = next((key for key in keys if key.name == signature.key), None)
    if key is None:
        raise BundleError(f"{source}: the bundle is signed by the key {signature.key:.16}, expected {wanted}")
    try:
        key.key.verify(signature.value, _CONTEXT + digest.encode())
    except InvalidSignature as error:
        raise BundleError(
            f"{source}: the signature by the key {key.name:.16} is not one of this content: the bundle or its "
            "signature was altered"
        ) from error


def read_public_key(path: str | os.PathLike[str]) -> PublicKey:
    """Read an Ed25519 public key in PEM.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    content = _content(path)
    try:
        key = load_pem_public_key(content)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path}: not a public key in PEM") from error
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError(f"{path}: expected an Ed25519 public key, found {type(key).__name__}")
    return PublicKey(key, key_name(key))


def read_private_key(path: str | os.PathLike[str]) -> Ed25519PrivateKey:
    """Read an Ed25519 private key in PEM (PKCS #8), without a password.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    content = _content(path)
    try:
        key = load_pem_private_key(content, password=None)
    except TypeError as error:
        raise ConfigError(f"{path}: the private key has a password; give one without") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path}: not a private key in PEM") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{path}: expected an Ed25519 private key, found {type(key).__name__}")
    return key


def _content(path: str | os.PathLike[str]) -> bytes:
    try:
        with Path(path).open("rb") as file:
            return file.read(MAX_KEY_BYTES)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the key: {error.strerror}") from error
