"""The serving benchmark: its prompts, what its servers share, and its complete smoke run (slow)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.serving import files, methods
from benchmarks.serving.cells import BLOCK_TOKENS, Cell
from benchmarks.serving.methods import SERVERS, chosen, make_methods, methods_in
from benchmarks.serving.prompts import PromptMaker
from benchmarks.serving.servers import commands
from server.demo import CHECKPOINT

CONTEXT, OUTPUT = 4096, 32


@pytest.fixture(scope="module")
def prompts() -> PromptMaker:
    return PromptMaker(CHECKPOINT, seed=0)


@pytest.fixture(scope="module")
def every(prompts: PromptMaker) -> list[methods.Method]:
    return make_methods(prompts, CONTEXT, OUTPUT)


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


def test_replay_fills_the_context_and_stays_inside_it(prompts: PromptMaker, every: list[methods.Method]) -> None:
    (replay,) = (method for method in every if method.name == methods.PROMPT_REPLAY)
    for _ in range(3):
        assert 0.85 * CONTEXT < prompts.length(replay.messages(Cell(1, 256, picture=True))) + OUTPUT <= CONTEXT


def test_a_second_turn_continues_the_first(prompts: PromptMaker, every: list[methods.Method]) -> None:
    (method,) = (each for each in every if each.name == "turn2_none")
    before = [*method.messages(Cell(1, 256, picture=True)), {"role": "assistant", "content": "red"}]
    assert method.then is not None
    words = prompts.length([*before, method.then()]) - prompts.length([*before, {"role": "user", "content": ""}])
    assert words == methods.SECOND_TURN_TOKENS


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
