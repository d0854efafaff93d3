"""Signed bundles: who signed is known, and nothing else passes."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, NoEncryption, PrivateFormat

from inducekv_vllm.bundle import (
    METADATA_KEY,
    Signature,
    read_bundle,
    read_private_key,
    read_public_key,
    require_signature,
    sign_digest,
    write_bundle,
)
from inducekv_vllm.bundle.signature import key_name
from inducekv_vllm.errors import BundleError, ConfigError
from tests.inducekv_vllm.bundles import random_bundle

OURS, THEIRS = Ed25519PrivateKey.from_private_bytes(b"o" * 32), Ed25519PrivateKey.from_private_bytes(b"t" * 32)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A bundle that we have signed."""
    bundle = random_bundle()
    write_bundle(replace(bundle, signature=sign_digest(bundle.digest, OURS)), tmp_path / "b.safetensors")
    return tmp_path / "b.safetensors"


def refusal(path: Path, *keys: Ed25519PrivateKey) -> str:
    bundle = read_bundle(path)
    with pytest.raises(BundleError) as error:
        require_signature(bundle.signature, bundle.digest, [key.public_key() for key in keys], str(path))
    assert str(path) in str(error.value)
    return str(error.value)


def test_a_signature_travels_with_the_file_and_does_not_change_the_digest(path: Path, tmp_path: Path) -> None:
    bundle = read_bundle(path)
    assert bundle.digest == random_bundle().digest
    for keys in ([OURS], [THEIRS, OURS]):
        require_signature(bundle.signature, bundle.digest, [key.public_key() for key in keys], "b")
    write_bundle(bundle, tmp_path / "copy.safetensors")
    assert read_bundle(tmp_path / "copy.safetensors").signature == bundle.signature


def test_unsigned_and_by_another_key(path: Path, tmp_path: Path) -> None:
    write_bundle(random_bundle(), tmp_path / "plain.safetensors")
    ours, theirs = key_name(OURS.public_key())[:16], key_name(THEIRS.public_key())[:16]
    assert f"is not signed; expected a signature by the key {ours}" in refusal(tmp_path / "plain.safetensors", OURS)
    assert f"is signed by the key {ours}, expected {theirs}" in refusal(path, THEIRS)


def rewrite(path: Path, **metadata: str | None) -> None:
    with safetensors.safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no dictionary
        before = file.metadata()
    after = {name: value for name, value in (before | metadata).items() if value is not None}
    safetensors.torch.save_file(tensors, path, metadata=after)


def test_a_signature_of_other_content(path: Path) -> None:
    """Of another bundle; of the same bundle by a key that claims to be ours; with each bit changed."""
    good = read_bundle(path).signature
    assert good is not None
    other = sign_digest(random_bundle(seed=1).digest, OURS)
    claimed = sign_digest(random_bundle().digest, THEIRS).model_copy(update={"key": good.key})
    flipped = [
        good.model_copy(update={"value": bytes(b ^ (1 << bit) * (i == place) for i, b in enumerate(good.value))})
        for place in (0, 31, 32, 63)
        for bit in (0, 6)
    ]
    for wrong in (other, claimed, *flipped):
        rewrite(path, inducekv_signature=wrong.model_dump_json())
        assert "is not one of this content: the bundle or its signature was altered" in refusal(path, OURS)


def test_content_that_was_altered_and_given_a_new_digest(path: Path) -> None:
    signature = read_bundle(path).signature
    altered = random_bundle(temperature=0.08)
    write_bundle(replace(altered, signature=signature), path)
    assert "is not one of this content" in refusal(path, OURS)


@pytest.mark.parametrize(
    "text", ["", "{}", "null", '"x"', '{"key": "00", "value": "AA=="}', Signature.__name__, "[" * 10000]
)
def test_signatures_that_cannot_be_read(path: Path, text: str) -> None:
    rewrite(path, inducekv_signature=text)
    with pytest.raises(BundleError, match=r"b.safetensors: the signature(: | is not a text of )"):
        read_bundle(path)


def test_the_metadata_is_still_what_it_was(path: Path) -> None:
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata().keys() == {METADATA_KEY, "inducekv_signature"}


def test_keys_that_openssl_makes(tmp_path: Path) -> None:
    private, shared = tmp_path / "key.pem", tmp_path / "key.pub.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", private], check=True)
    subprocess.run(["openssl", "pkey", "-in", private, "-pubout", "-out", shared], check=True)
    digest = random_bundle().digest
    require_signature(sign_digest(digest, read_private_key(private)), digest, [read_public_key(shared)], "b")
    with pytest.raises(ConfigError, match=r"key.pub.pem: not a private key"):
        read_private_key(shared)
    with pytest.raises(ConfigError, match=r"key.pem: not a public key"):
        read_public_key(private)


def test_keys_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    rsa = generate_private_key(65537, 1024)
    pem = Encoding.PEM, PrivateFormat.PKCS8
    (tmp_path / "rsa").write_bytes(rsa.private_bytes(*pem, NoEncryption()))
    (tmp_path / "secret").write_bytes(OURS.private_bytes(*pem, BestAvailableEncryption(b"password")))
    for name, problem in (
        ("none", "cannot read the key: No such file"),
        ("text", "not a private key in PEM"),
        ("rsa", "expected an Ed25519 private key, found RSAPrivateKey"),
        ("secret", "not a private key in PEM, without a password"),
    ):
        with pytest.raises(ConfigError, match=f"{name}: .*{problem}"):
            read_private_key(tmp_path / name)
