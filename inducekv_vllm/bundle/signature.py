"""Who made a bundle: an Ed25519 signature (RFC 8032) over its digest, carried in the file's metadata."""

import base64
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key
from pydantic import Base64Bytes, BaseModel, ConfigDict, Field

from ..errors import BundleError, ConfigError

_CONTEXT: Final = b"inducekv bundle 1\n"  # so that the key's signatures of other things cannot be used here


class Signature(BaseModel):
    """A signature of a bundle's digest."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    algorithm: Literal["ed25519"] = "ed25519"
    key: str = Field(pattern="^[0-9a-f]{64}$")  # see `key_name`
    value: Annotated[Base64Bytes, Field(min_length=64, max_length=64)]


def key_name(key: Ed25519PublicKey) -> str:
    """sha256 of the raw public key, in hexadecimal; messages show its first 16 digits."""
    return hashlib.sha256(key.public_bytes_raw()).hexdigest()


def sign_digest(digest: str, key: Ed25519PrivateKey) -> Signature:
    """Sign a bundle's digest."""
    value = base64.b64encode(key.sign(_CONTEXT + digest.encode()))
    return Signature(key=key_name(key.public_key()), value=value)


def require_signature(signature: Signature | None, digest: str, keys: Sequence[Ed25519PublicKey], source: str) -> None:
    """Check that one of the keys has signed this digest, of the content that is used. Raises BundleError."""
    names = {key_name(key): key for key in keys}
    wanted = " or ".join(f"{name:.16}" for name in names)
    if signature is None:
        raise BundleError(f"{source}: the bundle is not signed; expected a signature by the key {wanted}")
    if signature.key not in names:
        raise BundleError(f"{source}: the bundle is signed by the key {signature.key:.16}, expected {wanted}")
    try:
        names[signature.key].verify(signature.value, _CONTEXT + digest.encode())
    except InvalidSignature as error:
        problem = "is not one of this content: the bundle or its signature was altered"
        raise BundleError(f"{source}: the signature by the key {signature.key:.16} {problem}") from error


def read_public_key(path: str | os.PathLike[str]) -> Ed25519PublicKey:
    """Read an Ed25519 public key in PEM. Raises ConfigError: the file cannot be read, or holds something else."""
    key: Ed25519PublicKey = _read(path, "public", Ed25519PublicKey)
    return key


def read_private_key(path: str | os.PathLike[str]) -> Ed25519PrivateKey:
    """Read an Ed25519 private key in PEM (PKCS #8), without a password. Raises ConfigError, as `read_public_key`."""
    key: Ed25519PrivateKey = _read(path, "private", Ed25519PrivateKey)
    return key


def _read(path: str | os.PathLike[str], kind: str, expected: type) -> Any:
    try:
        content = Path(path).read_bytes()
        key = load_pem_public_key(content) if kind == "public" else load_pem_private_key(content, password=None)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the key: {error.strerror}") from error
    except (ValueError, UnsupportedAlgorithm, TypeError) as error:
        raise ConfigError(f"{path}: not a {kind} key in PEM, without a password") from error
    if not isinstance(key, expected):
        raise ConfigError(f"{path}: expected an Ed25519 {kind} key, found {type(key).__name__}")
    return key
