"""What was trained elsewhere answers as there: PEFT's prefixes and soft prompts, a cartridge, a text in front."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from benchmarks.server_process import serving
from inducekv_vllm.bundle import Bundle, read_bundle, write_bundle
from selector.backbone.model import Backbone
from selector.cli.bundle import main
from tests.engine.parity import EAGER, FEWER_PROCESSES, TOLERANCE, Prompt, World, prompts, text_prompts
from tests.imported import ADAPTERS, OF_CACHE, behind_adapter, behind_cache, behind_text, save_adapter, save_cartridge
from tests.server.http import Bundles, ask, tokens_and_logprobs
from tests.server.launch import ENVIRONMENT, FLAGS, GATED_TASKS
from tests.tiny_models import save_tiny_qwen3_vl

TEXT = "The picture shows two green stars and a yellow ring. Answer in a sentence.\n"
MATTERS = 0.05  # of a log-probability: without the memory it is another one


@dataclass
class Side:
    """A model on a server, and the same model in transformers."""

    model: Path
    backbone: Backbone
    client: openai.OpenAI
    bundles: Bundles
    folder: Path

    def imported(self, kind: str, source: Path, *options: str) -> Path:
        path = self.folder / f"{source.stem}-{kind}.safetensors"
        arguments = ["import", kind, str(source), "--model", str(self.model), "--output", str(path), *options]
        assert main(arguments) == 0
        return path

    def answers_as(self, path: Path, prompt: Prompt, source: Any) -> None:
        """With the bundle, twice: the second time from the prefix cache. `source(inputs, answer)` is the reference."""
        inputs = self.backbone.encode(prompt.chat_messages, prompt.images)
        with self.bundles.loaded("imported", path):
            first, second = (tokens_and_logprobs(ask(self.client, "imported", prompt)) for _ in range(2))
        tokens, found = first
        expected = source(inputs, tokens)
        assert (torch.tensor(found) - expected).abs().max() < TOLERANCE
        assert second[0] == tokens
        assert second[1] == pytest.approx(found, abs=TOLERANCE)
        plain = tokens_and_logprobs(ask(self.client, "base", prompt))
        assert plain[0] != tokens or abs(torch.tensor(plain[1]) - torch.tensor(found)).max() > MATTERS

    def sizes(self) -> tuple[int, int, int]:
        return self.backbone.num_layers, self.backbone.num_kv_heads, self.backbone.head_dim


@pytest.fixture
def llava(world: World, client: openai.OpenAI, bundles: Bundles, tmp_path: Path) -> Side:
    return Side(world.model, world.backbone, client, bundles, tmp_path)


@pytest.fixture(scope="module")
def qwen(admin_key: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Side]:
    """Of another geometry, and with M-RoPE."""
    folder = tmp_path_factory.mktemp("qwen")
    model = save_tiny_qwen3_vl(folder / "model")
    arguments = [str(model), *FLAGS, "--served-model-name", "base", "--memory-root", str(folder)]
    with (
        serving(arguments, folder / "log", {**ENVIRONMENT, **FEWER_PROCESSES, **EAGER}) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as client,
    ):
        yield Side(model, Backbone.load(model), client, Bundles(url), folder)


def check_text(side: Side, prompt: Prompt) -> None:
    source = side.folder / "text.txt"
    source.write_text(TEXT)
    ids = side.backbone.tokenizer(TEXT)["input_ids"]
    side.answers_as(side.imported("text", source), prompt, lambda *asked: behind_text(side.model, ids, *asked))


def check_cartridge(side: Side, prompt: Prompt) -> None:
    keys, values = save_cartridge(side.folder / "c.pt", *side.sizes(), frozen=2)
    path = side.imported("cartridge", side.folder / "c.pt")
    side.answers_as(path, prompt, lambda *asked: behind_cache(side.model, keys, values, *asked))


def check_adapter(side: Side, name: str, prompt: Prompt) -> None:
    folder = save_adapter(side.model, name, side.folder / name)
    path = side.imported("peft", folder)
    side.answers_as(path, prompt, lambda *asked: behind_adapter(side.model, folder, *asked))


def test_a_text_in_front_of_a_picture(llava: Side) -> None:
    check_text(llava, prompts(1, seed=7)[0])


def test_a_cartridge_in_front_of_a_picture(llava: Side) -> None:
    check_cartridge(llava, prompts(1, seed=8)[0])


@pytest.mark.parametrize("name", ADAPTERS)
def test_every_adapter_of_peft(llava: Side, name: str) -> None:
    prompt = prompts(1, seed=9)[0] if name in OF_CACHE else text_prompts(1, seed=9)[0]  # PEFT has no pictures there
    check_adapter(llava, name, prompt)


@pytest.mark.slow  # a server of its own
def test_another_geometry_with_three_axes_of_rope(qwen: Side) -> None:
    check_text(qwen, prompts(1, seed=10)[0])
    check_cartridge(qwen, text_prompts(1, seed=11)[0])
    for name in ("prefix", "p-tuning-mlp"):
        check_adapter(qwen, name, text_prompts(1, seed=12)[0])


def test_a_swap_while_it_is_loaded(llava: Side) -> None:
    """Another import under the same name: the same prompt is not answered from the blocks of the first one."""
    prompt, answers = prompts(1, seed=13)[0], []
    inputs = llava.backbone.encode(prompt.chat_messages, prompt.images)
    sources = [save_cartridge(llava.folder / f"{n}.pt", *llava.sizes(), seed=n) for n in range(2)]
    paths = [llava.imported("cartridge", llava.folder / f"{n}.pt") for n in range(2)]
    with llava.bundles.loaded("imported", paths[0]):
        for path in (paths[0], paths[1], paths[0]):
            llava.bundles.server.load("imported", path, replace=True)
            answers.append(tokens_and_logprobs(ask(llava.client, "imported", prompt)))
    assert answers[0][0] == answers[2][0]
    for (tokens, found), (keys, values) in zip(answers[:2], sources, strict=True):
        expected = behind_cache(llava.model, keys, values, inputs, tokens)
        assert (torch.tensor(found) - expected).abs().max() < TOLERANCE


def test_behind_a_gate(llava: Side, gated_bundle: tuple[Bundle, Path], questions: list[Prompt]) -> None:
    """The first question opens it, and the second does not."""
    source = llava.folder / "text.txt"
    source.write_text(TEXT)
    ids = llava.backbone.tokenizer(TEXT)["input_ids"]
    imported, (gated, _) = read_bundle(llava.imported("text", source, "--task", GATED_TASKS[0])), gated_bundle
    path = llava.folder / "gated.safetensors"
    write_bundle(imported.with_gate(gated.gate.take([GATED_TASKS[0]]), {}), path)
    with llava.bundles.loaded("imported", path):
        found = [tokens_and_logprobs(ask(llava.client, "imported", each)) for each in questions[:2]]
    inputs = llava.backbone.encode(questions[0].chat_messages, questions[0].images)
    expected = behind_text(llava.model, ids, inputs, found[0][0])
    assert (torch.tensor(found[0][1]) - expected).abs().max() < TOLERANCE
    assert found[1] == tokens_and_logprobs(ask(llava.client, "base", questions[1]))
