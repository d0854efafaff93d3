"""Signed bundles: who signed is known, and nothing else passes."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, NoEncryption, PrivateFormat

from inducekv_vllm.bundle import (
    METADATA_KEY,
    read_bundle,
    read_private_key,
    read_public_key,
    require_signature,
    sign_digest,
    write_bundle,
)
from inducekv_vllm.bundle.signature import key_name
from inducekv_vllm.errors import BundleError, ConfigError
from tests.bundles import random_bundle

OURS, THEIRS = Ed25519PrivateKey.from_private_bytes(b"o" * 32), Ed25519PrivateKey.from_private_bytes(b"t" * 32)
BUNDLE = random_bundle()
SIGNATURE = sign_digest(BUNDLE.digest, OURS)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A bundle that we have signed."""
    write_bundle(replace(BUNDLE, signature=SIGNATURE), tmp_path / "b.safetensors")
    return tmp_path / "b.safetensors"


def refusal(path: Path, *keys: Ed25519PrivateKey) -> str:
    bundle = read_bundle(path)
    with pytest.raises(BundleError) as error:
        require_signature(bundle.signature, bundle.digest, [key.public_key() for key in keys], str(path))
    assert str(path) in str(error.value)
    return str(error.value)


def test_a_signature_travels_with_the_file_and_does_not_change_the_digest(path: Path, tmp_path: Path) -> None:
    bundle = read_bundle(path)
    assert bundle.digest == BUNDLE.digest
    assert bundle.metadata == BUNDLE.metadata
    for keys in ([OURS], [THEIRS, OURS]):
        require_signature(bundle.signature, bundle.digest, [key.public_key() for key in keys], "b")
    write_bundle(bundle, tmp_path / "copy.safetensors")
    assert read_bundle(tmp_path / "copy.safetensors").signature == SIGNATURE


def test_unsigned_and_by_another_key(path: Path, tmp_path: Path) -> None:
    write_bundle(BUNDLE, tmp_path / "plain.safetensors")
    ours, theirs = key_name(OURS.public_key())[:16], key_name(THEIRS.public_key())[:16]
    assert f"is not signed; expected a signature by the key {ours}" in refusal(tmp_path / "plain.safetensors", OURS)
    assert f"is signed by the key {ours}, expected {theirs}" in refusal(path, THEIRS)


def test_a_signature_of_other_content(path: Path) -> None:
    """Of another bundle, also one with our digest claimed; by a key that claims to be ours; with a bit changed."""
    other = random_bundle(temperature=0.08)
    claimed = sign_digest(BUNDLE.digest, THEIRS).model_copy(update={"key": SIGNATURE.key})
    flipped = [
        SIGNATURE.model_copy(update={"value": bytes(b ^ (at == place) for at, b in enumerate(SIGNATURE.value))})
        for place in (0, 31, 32, 63)
    ]
    wrong = [(BUNDLE, signature) for signature in (sign_digest(other.digest, OURS), claimed, *flipped)]
    for bundle, signature in (*wrong, (other, SIGNATURE)):
        write_bundle(replace(bundle, signature=signature), path)
        assert "is not one of this content: the bundle or its signature was altered" in refusal(path, OURS)


@pytest.mark.parametrize("value", ["", {}, "x", {"key": "00", "value": "AA=="}, [[]], "x" * 10000])
def test_signatures_that_cannot_be_read(path: Path, value: Any) -> None:
    metadata = BUNDLE.metadata.model_dump(mode="json") | {"signature": value}
    safetensors.torch.save_file(BUNDLE.tensors(), path, metadata={METADATA_KEY: json.dumps(metadata)})
    with pytest.raises(BundleError, match=r"b.safetensors: metadata: signature"):
        read_bundle(path)


def test_keys_that_openssl_makes(tmp_path: Path) -> None:
    private, shared = tmp_path / "key.pem", tmp_path / "key.pub.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", private], check=True)
    subprocess.run(["openssl", "pkey", "-in", private, "-pubout", "-out", shared], check=True)
    signature = sign_digest(BUNDLE.digest, read_private_key(private))
    require_signature(signature, BUNDLE.digest, [read_public_key(shared)], "b")
    with pytest.raises(ConfigError, match=r"key.pub.pem: not a private key"):
        read_private_key(shared)
    with pytest.raises(ConfigError, match=r"key.pem: not a public key"):
        read_public_key(private)


def test_keys_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    pem = Encoding.PEM, PrivateFormat.PKCS8
    (tmp_path / "rsa").write_bytes(generate_private_key(65537, 1024).private_bytes(*pem, NoEncryption()))
    (tmp_path / "secret").write_bytes(OURS.private_bytes(*pem, BestAvailableEncryption(b"password")))
    for name, problem in (
        ("none", "cannot read the key: No such file"),
        ("text", "not a private key in PEM"),
        ("rsa", "expected an Ed25519 private key, found RSAPrivateKey"),
        ("secret", "not a private key in PEM, without a password"),
    ):
        with pytest.raises(ConfigError, match=f"{name}: .*{problem}"):
            read_private_key(tmp_path / name)
