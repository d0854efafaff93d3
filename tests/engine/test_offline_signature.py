"""`MemoryLLM` asks for the signatures of its settings, before a worker hears of the bundle."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from inducekv_vllm.bundle import sign_digest, write_bundle
from inducekv_vllm.errors import BundleError
from inducekv_vllm.frontend import offline
from tests.bundles import FINGERPRINT, random_bundle


def test_only_signed_bundles_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = Ed25519PrivateKey.from_private_bytes(b"k" * 32)
    pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "public.pem").write_bytes(pem)
    monkeypatch.setattr(offline, "backbone_fingerprint", lambda *_: FINGERPRINT)
    monkeypatch.setattr(offline, "placeholder_ids", lambda _: set())
    monkeypatch.setattr(offline, "note_pictures", lambda _: None)
    told: list[str] = []

    def rpc(method: str, args: tuple[str, ...] = ()) -> list[dict[str, Any]]:
        told.append(method)
        return [{"ok": True, "resident_bytes": 1}]

    settings = {"inducekv": {"require_signature": [str(tmp_path / "public.pem")]}}
    model = SimpleNamespace(model="m", revision=None, hf_config=None)
    load = SimpleNamespace(download_dir=None)
    config = SimpleNamespace(additional_config=settings, model_config=model, load_config=load)
    llm: Any = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config, renderer=None), collective_rpc=rpc)
    memories = offline.MemoryLLM(llm)

    bundle = random_bundle()
    write_bundle(bundle, tmp_path / "b.safetensors")
    with pytest.raises(BundleError, match=r"b.safetensors: the bundle is not signed"):
        memories.load_bundle(tmp_path / "b.safetensors")
    assert told == ["inducekv_stats"]
    write_bundle(replace(bundle, signature=sign_digest(bundle.digest, key)), tmp_path / "b.safetensors")
    assert memories.load_bundle(tmp_path / "b.safetensors").digest == bundle.digest
