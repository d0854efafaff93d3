"""A bundle that sends each task to its own LoRA adapter: `inducekv-bundle route`, and the server that loads it."""

import hashlib
import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from inducekv_vllm.bundle import Bundle, read_bundle, write_bundle
from selector.backbone.model import Backbone
from selector.cli.bundle import main
from tests.engine.parity import TOLERANCE, Prompt, World, prompts
from tests.gates import small_fits
from tests.server.http import Bundles, alone, ask, deviation, trace_of
from tests.server.launch import Adapted, save_adapter

QUESTIONS = {
    "a": "What colour is the circle?",
    "b": "How many squares are there? Answer with a number.",
    "base": "Describe the whole picture in one long sentence, please.",
}


def questions(task: str, count: int, seed: int) -> list[Prompt]:
    return [Prompt(prompt.image, QUESTIONS[task]) for prompt in prompts(count, seed)]


def write_task(folder: Path, task: str) -> Path:
    folder.mkdir(parents=True)
    lines = []
    for number, prompt in enumerate(questions(task, 12, seed=51)):
        prompt.image.save(folder / f"{number}.png")
        content: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": f"{number}.png"}},
            {"type": "text", "text": prompt.question},
        ]
        messages = [{"role": "user", "content": content}]
        lines.append(json.dumps({"id": f"{task}{number}", "task": task, "messages": messages, "answer": "x"}))
    (folder / "task.jsonl").write_text("\n".join(lines))
    return folder / "task.jsonl"


# Of PEFT, as people train with them; the second says of linear layers what PEFT says of others.
TRAINED: dict[str, dict[str, Any]] = {
    "a": {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"v_proj": 6}},
    "b": {"use_rslora": True, "fan_in_fan_out": True},
}


@pytest.fixture(scope="module")
def folder(adapted: Adapted, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Task data, and the adapters "a" and "b" with the models that have them merged in."""
    folder = tmp_path_factory.mktemp("route")
    for task in QUESTIONS:
        write_task(folder / task, task)
    for seed, task in enumerate("ab"):
        merged = folder / f"merged-{task}"
        save_adapter(adapted.folder / "model", folder / f"adapter-{task}", merged, seed, **TRAINED[task])
    return folder


def route(adapted: Adapted, folder: Path, *adapters: str, output: str = "routed") -> list[str]:
    command = ["route", "--model", str(adapted.folder / "model"), "--base", str(folder / "base/task.jsonl")]
    command += [part for adapter in adapters for part in ("--adapter", adapter)]
    return [*command, "--output", str(folder / f"{output}.safetensors")]


def adapter(folder: Path, task: str, weights: str | None = None) -> str:
    return f"{task}={folder / f'adapter-{weights or task}'}:{folder / task / 'task.jsonl'}"


@pytest.fixture(scope="module")
def routed(adapted: Adapted, folder: Path) -> Path:
    with small_fits():
        assert main(route(adapted, folder, adapter(folder, "a"), adapter(folder, "b"))) == 0
    return folder / "routed.safetensors"


def test_what_the_command_writes(routed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metadata = read_bundle(routed).metadata
    assert (metadata.recipe, metadata.entries) == ("route", ())
    assert metadata.gate_tasks == ("a", "b")
    assert [(r.task, r.path, r.rank) for r in metadata.task_adapters] == [("a", "adapter-a", 4), ("b", "adapter-b", 4)]
    assert main(["inspect", str(routed)]) == 0
    assert "a (adapter-a, rank 4" in capsys.readouterr().out


def test_each_request_runs_with_its_tasks_adapter_or_none(adapted: Adapted, folder: Path, routed: Path) -> None:
    """All at once, beside requests without memory: no request of a batch gets another one's adapter."""
    worlds = {"base": adapted.plain} | {
        task: World(folder / f"merged-{task}", Backbone.load(folder / f"merged-{task}"), {}, {}) for task in "ab"
    }
    cases = [(task, prompt) for i in range(4) for task in QUESTIONS for prompt in questions(task, 1, seed=60 + i)]
    with (
        Bundles(adapted.url).loaded("routed", routed),
        openai.OpenAI(base_url=f"{adapted.url}/v1", api_key="none", max_retries=0) as client,
        ThreadPoolExecutor(16) as pool,
    ):
        responses = list(pool.map(lambda case: ask(client, "routed", case[1], extra_body=alone("routed")), cases))
        plain = list(pool.map(lambda case: ask(client, "base", case[1]), cases))
    for (task, prompt), response, untouched in zip(cases, responses, plain, strict=True):
        assert trace_of(response)["gate"]["task"] == (None if task == "base" else task)
        assert (trace_of(response)["adapter"] is None) == (task == "base")
        assert deviation(worlds[task], response, prompt, None) <= TOLERANCE
        assert deviation(adapted.plain, untouched, prompt, None) <= TOLERANCE
        if task != "base":
            assert deviation(adapted.plain, response, prompt, None) > 100 * TOLERANCE


def refusal(adapted: Adapted, path: Path) -> str:
    response = Bundles(adapted.url).load("refused", path)
    assert response.status_code == 400
    assert "refused" not in Bundles(adapted.url).cards()
    return str(response.json()["error"]["message"])


def changed(bundle: Bundle, file: Path, **record: Any) -> Path:
    """The bundle with another record of its first adapter."""
    first, *others = bundle.metadata.task_adapters
    fields = ("backbone", "budget", "entries", "weighting", "recipe", "settings", "form")
    tensors = {name: t for name, t in bundle.tensors().items() if not name.startswith("gate_")}
    arguments: dict[str, Any] = {name: getattr(bundle.metadata, name) for name in fields} | tensors
    adapters = (first.model_copy(update=record), *others)
    write_bundle(Bundle.create(**arguments, gate=bundle.gate, task_adapters=adapters), file)
    return file


def test_the_server_refuses_adapters_it_cannot_serve(
    adapted: Adapted, folder: Path, routed: Path, bundles: Bundles
) -> None:
    assert "start the server with --enable-lora" in bundles.load("refused", routed).json()["error"]["message"]
    bundle, path = read_bundle(routed), folder / "changed.safetensors"
    assert "has rank 16, the server's --max-lora-rank is 8" in refusal(adapted, changed(bundle, path, rank=16))
    assert "cannot read the adapter: No such file" in refusal(adapted, changed(bundle, path, path="nowhere"))
    message = refusal(adapted, changed(bundle, path, path="adapter-b"))
    assert "the adapter of task 'a'" in message
    assert "is not the one that the bundle was made with" in message


def copied(folder: Path, name: str, change: Callable[[str, Tensor], tuple[str, Tensor]]) -> Path:
    """The adapter "a" with other weights."""
    copy = Path(shutil.copytree(folder / "adapter-a", folder / name))
    weights = load_file(copy / "adapter_model.safetensors")
    save_file(dict(change(*each) for each in weights.items()), copy / "adapter_model.safetensors")
    return copy


def renamed(before: str, after: str) -> Callable[[str, Tensor], tuple[str, Tensor]]:
    return lambda name, weight: (name.replace(before, after), weight)


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("twin", renamed("language_model.model.", "model."), "0 of 12 tensors meet a module that vLLM adapts"),
        ("tower", renamed("language_model.model.", "vision_tower.vision_model.encoder."), "0 of 12 tensors meet"),
        ("deeper", renamed("layers.1.", "layers.41."), "8 of 12 tensors meet a module that vLLM adapts in this model"),
        ("zero", lambda name, weight: (name, 0 * weight), "the LoRA adapter changes nothing: its products are zero"),
    ],
)
def test_an_adapter_is_loaded_only_if_all_of_it_acts(
    name: str,
    change: Callable[[str, Tensor], tuple[str, Tensor]],
    problem: str,
    adapted: Adapted,
    folder: Path,
    routed: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By the command, and by the server, whatever command made the bundle."""
    other = copied(folder, name, change)
    assert main(route(adapted, folder, f"a={other}:{folder / 'a/task.jsonl'}", output="refused")) == 2
    assert problem.partition("tensors")[0] in capsys.readouterr().err
    assert not (folder / "refused.safetensors").exists()
    sha = hashlib.sha256()
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        sha.update(hashlib.sha256((other / file).read_bytes()).digest())
    path = changed(read_bundle(routed), folder / "changed.safetensors", path=name, digest=sha.hexdigest())
    assert problem in refusal(adapted, path)
