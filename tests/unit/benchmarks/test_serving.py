"""The serving benchmark: its methods and prompts, how its servers are started, and its complete smoke run (slow)."""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.serving import files, methods
from benchmarks.serving.cells import BLOCK_TOKENS, Cell, cell
from benchmarks.serving.methods import SERVERS, chosen, make_methods, methods_in
from benchmarks.serving.prompts import PromptMaker
from benchmarks.serving.run import parse_arguments
from benchmarks.serving.servers import commands
from inducekv_vllm.errors import ConfigError
from server.demo import CHECKPOINT

CONTEXT, OUTPUT = 4096, 32


@pytest.fixture(scope="module")
def prompts() -> PromptMaker:
    return PromptMaker(CHECKPOINT, seed=0)


@pytest.fixture(scope="module")
def every(prompts: PromptMaker) -> list[methods.Method]:
    return make_methods(prompts, CONTEXT, OUTPUT)


def test_a_cell_is_read_from_its_name() -> None:
    assert cell("64x2048") == Cell(64, 2048)
    assert [cell(text).name for text in ("1x256", "8x256p", "1x256b")] == [
        "c1_p256",
        "c8_p256_picture",
        "c1_p256_whole_blocks",
    ]
    assert [cell(text).requests for text in ("1x256", "8x256", "64x2048")] == [4, 16, 64]
    for wrong in ("256", "0x256", "1x256q", "1x250b"):
        with pytest.raises(argparse.ArgumentTypeError, match=wrong):
            cell(wrong)


def test_prompts_vary_around_a_cells_length_and_end_no_block_of_the_cache(prompts: PromptMaker) -> None:
    lengths = [prompts.length(prompts.question_in(Cell(1, 256))) for _ in range(60)]
    assert 248 <= min(lengths) < 256 < max(lengths) <= 264
    assert all(tokens % BLOCK_TOKENS for tokens in lengths)
    assert {prompts.length(prompts.question_in(Cell(1, 256, whole_blocks=True))) for _ in range(9)} == {256}


@pytest.mark.parametrize("picture", [False, True])
def test_prompts_are_unique(picture: bool, prompts: PromptMaker) -> None:
    made = [prompts.question(256, picture=picture)[0]["content"] for _ in range(20)]
    assert {len(parts) for parts in made} == {2 if picture else 1}
    assert len({parts[-1]["text"][:40] for parts in made}) == len(made)  # a common start would be a cached prefix
    if picture:
        assert len({parts[0]["image_url"]["url"] for parts in made}) == len(made)


def test_a_prompt_without_room_for_its_picture_is_refused(prompts: PromptMaker) -> None:
    with pytest.raises(ConfigError, match="a prompt of 20 tokens has no room"):
        prompts.question(20, picture=True)


def test_replay_fills_the_context_and_stays_inside_it(prompts: PromptMaker, every: list[methods.Method]) -> None:
    (replay,) = (method for method in every if method.name == methods.PROMPT_REPLAY)
    for _ in range(3):
        assert 0.85 * CONTEXT < prompts.length(replay.messages(Cell(1, 256, picture=True))) + OUTPUT <= CONTEXT


def test_a_method_is_chosen_with_what_it_is_compared_with_and_with_lora(every: list[methods.Method]) -> None:
    def names(prefixes: list[str] | None, servers: tuple[methods.Server, ...] = SERVERS) -> list[str]:
        return [method.name for method in chosen(every, prefixes, servers)]

    assert names(None) == [method.name for method in every]
    assert names(["memory_B64"]) == ["none", "idle", "memory_B64_all", "memory_B64_top8", "lora_none", "lora"]
    assert names(["turn2_decoupled_B64_text"], ("plain", "plugin")) == [
        "none",
        "idle",
        "turn2_none",
        "turn2_idle",
        "turn2_decoupled_B64_text",
    ]
    assert all(name in names(None) for method in every for name in method.bases.values())


def test_each_cell_has_the_methods_that_make_sense_there(every: list[methods.Method]) -> None:
    def names(shape: Cell) -> set[str]:
        return {method.name for method in methods_in(shape, every, CONTEXT, OUTPUT)}

    assert names(Cell(1, 256, picture=True)) == {method.name for method in every}
    assert {"gated_text", "decoupled_B64_text", methods.PROMPT_REPLAY}.isdisjoint(names(Cell(1, 256)))
    assert names(Cell(1, 256)) - names(Cell(1, 2048)) == {methods.LONGER_PROMPT}  # it would not fit the context


def test_a_second_turn_continues_the_first(prompts: PromptMaker, every: list[methods.Method]) -> None:
    (method,) = (each for each in every if each.name == "turn2_none")
    before = [*method.messages(Cell(1, 256, picture=True)), {"role": "assistant", "content": "red"}]
    assert method.then is not None
    words = prompts.length([*before, method.then()]) - prompts.length([*before, {"role": "user", "content": ""}])
    assert words == methods.SECOND_TURN_TOKENS


@pytest.mark.parametrize(
    ("on_gpu", "given", "dtype", "backend"),
    [
        (False, [], "float32", None),
        (False, ["--dtype", "float16"], "float16", None),
        (True, [], "bfloat16", "FLASH_ATTN"),
        (True, ["--dtype", "float16"], "float16", "FLASH_ATTN"),
        (True, ["--serve-args", "--attention-backend", "FLASHINFER"], "bfloat16", "FLASHINFER"),  # the last one counts
    ],
)
def test_servers_have_a_dtype_and_a_backend_that_memory_can_be_served_with(
    on_gpu: bool, given: list[str], dtype: str, backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    monkeypatch.setattr(sys, "argv", ["run", "--model", "demo", *given])
    args = parse_arguments()
    arguments = [*files.flags(256, 1, 1, 1 << 20, args.dtype, is_dummy=False), *args.serve_args]
    found = {flag: value for flag, value in itertools.pairwise(arguments) if flag.startswith("--")}
    assert (args.dtype, found["--dtype"], found.get("--attention-backend")) == (dtype, dtype, backend)
    assert "--load-format" not in found


def test_three_servers_of_one_model_share_flags_and_no_cache(tmp_path: Path) -> None:
    shared = ["--max-model-len", "256"]
    some = files.Files(Path("M"), True, {"a": Path("A")}, Path("L"), 1, {}, weights_bytes=1, token_bytes=1)
    made = commands(some, 16, shared, tmp_path)
    assert tuple(made) == SERVERS
    assert all(each.arguments[-2:] == shared for each in made.values())
    assert len({each.environment["VLLM_CACHE_ROOT"] for each in made.values()}) == 3
    assert [each.environment.get("VLLM_PLUGINS") for each in made.values()] == ["", None, ""]
    assert "a=A" in made["plugin"].arguments
    assert "lora=L" in made["lora"].arguments
    assert not {"a=A", "lora=L"} & set(made["plain"].arguments)


def test_the_cache_has_room_for_the_requests_of_every_cell(
    every: list[methods.Method], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU three servers share what is free, and a cell that does not fit is left out."""
    few, many = Cell(1, 256), Cell(64, 2048)
    plan = {each: methods_in(each, chosen(every, ["gated"], SERVERS), CONTEXT, OUTPUT) for each in (few, many)}
    needed = files.cache_tokens(plan, CONTEXT, OUTPUT)
    assert needed[few] >= 264 + OUTPUT
    assert 64 * (2056 + OUTPUT) <= needed[many] <= 64 * CONTEXT
    made = files.Files(Path("M"), True, {}, Path("L"), 0, {}, weights_bytes=7 << 30, token_bytes=147456)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for free_gib, left_out in ((139, []), (78, [many])):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free_gib: (free << 30, free << 30))
        size, without_room = files.cache_bytes(needed, made, 3)
        assert without_room == left_out
        assert 3 * (size + made.weights_bytes) < free_gib << 30
        assert all(needed[each] * made.token_bytes <= size for each in needed if each not in left_out)


def test_a_geometrys_folder_has_a_token_for_every_id(tmp_path: Path) -> None:
    from dataclasses import replace

    from transformers import AutoTokenizer

    from benchmarks.geometries import GEOMETRIES
    from benchmarks.serving.model import make_folder

    folder = make_folder(replace(GEOMETRIES["tiny"], vocabulary=2000), "float32", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == 2000 == json.loads((folder / "config.json").read_text())["text_config"]["vocab_size"]
    assert all(tokenizer.decode([number]) for number in range(1024, 2000))
    assert not list(folder.glob("*.safetensors"))


def test_bundles_and_adapter_are_made_without_weights(tmp_path: Path) -> None:
    from benchmarks.geometries import GEOMETRIES
    from benchmarks.serving.model import make_folder
    from inducekv_vllm.bundle import read_bundle

    geometry = GEOMETRIES["tiny"]
    folder = make_folder(geometry, "float32", tmp_path / "model")
    names = ["memory_B64", "decoupled_B64_text", "gated_same_pass"]
    made = files.make_files(folder, True, names, 16, "float32", tmp_path)
    assert sorted(made.bundles) == sorted(names)
    assert [read_bundle(made.bundles[name]).num_entries for name in names] == [64, 64, 1]
    square = geometry.hidden_size + geometry.heads * geometry.head_size  # of queries and output: in and out
    narrow = geometry.hidden_size + geometry.kv_heads * geometry.head_size
    mlp = geometry.hidden_size + geometry.intermediate_size
    assert made.stored_bytes["lora"] == 2 * 16 * geometry.layers * (2 * square + 2 * narrow + 3 * mlp)
    assert made.token_bytes == 2 * 4 * geometry.layers * geometry.kv_heads * geometry.head_size


@pytest.mark.slow
def test_the_whole_benchmark_runs_and_ends_in_one_json_line(every: list[methods.Method]) -> None:
    command = [sys.executable, "-m", "benchmarks.serving.run", "--model", "demo", "--smoke"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    result = json.loads(lines[-1])
    rows = result["cells"]["c1_p256_picture"]
    assert list(rows) == [method.name for method in every]
    assert result["passes"] == 1
    assert {trace["open"] for name, trace in result["traces"].items() if "closed" in name} == {False}
    assert all(trace["open"] for name, trace in result["traces"].items() if "closed" not in name)
    assert rows["longer_prompt"]["prompt_tokens"] > methods.LONGER_BY + 240
