"""The serving benchmark's own arithmetic, and its complete smoke run (slow)."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys

import pytest
import torch

from benchmarks.serving import methods, report
from benchmarks.serving.prompts import PromptMaker
from benchmarks.serving.run import chosen, exemplars, parse_arguments, server_arguments
from server.demo import CHECKPOINT


def block(*ttfts: float, tpot: float | None = 0.01, seconds: float = 2.0) -> report.Block:
    requests = [{"ttft": ttft, "tpot": tpot, "prompt_tokens": 256, "output_tokens": 10} for ttft in ttfts]
    return {"requests": requests, "seconds": seconds}


def test_medians_are_over_requests_and_throughput_over_blocks() -> None:
    row = report.summarize([block(0.1, 0.3, seconds=2.0), block(0.2, 5.0, seconds=4.0)])
    assert row["requests"] == 4
    assert row["ttft_ms"] == pytest.approx(250)
    assert row["tpot_ms"] == pytest.approx(10)
    assert row["tokens_per_s"] == pytest.approx((10 + 5) / 2)
    assert math.isnan(report.summarize([block(0.1, tpot=None)])["tpot_ms"])


def test_a_method_is_compared_with_its_own_base() -> None:
    measured = {1: {"none": [block(0.1)], "lora_none": [block(0.2)], "lora": [block(0.3, tpot=0.012, seconds=4.0)]}}
    rows = report.tabulate(measured, {"none": "none", "lora": "lora_none", "lora_none": "lora_none"})["1"]
    assert [rows[name]["ttft_ratio"] for name in measured[1]] == pytest.approx([1, 1, 1.5])
    assert (rows["lora"]["tpot_ratio"], rows["lora"]["throughput_ratio"]) == pytest.approx((1.2, 0.5))


@pytest.mark.parametrize(("ttft", "met"), [(0.249, True), (0.251, False)])
def test_targets_are_judged(ttft: float, met: bool) -> None:
    blocks = {"none": block(0.1), "memory_B64_all": block(ttft), "memory_B256_all": block(1), "longer_prompt": block(3)}
    blocks |= {"decoupled_B64_generation": block(0.12), "decoupled_B64_text": block(0.15)}
    blocks |= {"none_turn2": block(0.02), "decoupled_B64_generation_turn2": block(0.03)}
    measured = {1: {name: [one] for name, one in blocks.items()}}
    reached = report.check_targets(report.tabulate(measured, dict.fromkeys(blocks, "none"))["1"])
    assert [target["met"] for target in reached] == [met, True, True, False, True, False, True]
    assert reached[-1]["reached"] == pytest.approx(1 / 3)


@pytest.fixture(scope="module")
def prompts() -> PromptMaker:
    return PromptMaker(CHECKPOINT, exemplars(), seed=0)


def test_prompts_have_their_exact_length_and_are_unique(prompts: PromptMaker) -> None:
    made = [prompts.question(methods.PROMPT_TOKENS) for _ in range(20)]
    assert {prompts.length(messages) for messages in made} == {methods.PROMPT_TOKENS}
    pictures = {messages[0]["content"][0]["image_url"]["url"] for messages in made}
    texts = {messages[0]["content"][1]["text"][:40] for messages in made}  # a common start would be a cached prefix
    assert len(pictures) == len(texts) == len(made)


def test_replay_fills_the_context_and_stays_inside_it(prompts: PromptMaker) -> None:
    context, output = 4096, 32
    replay = {m.name: m for m in methods.make_methods(prompts, "base", context, output, methods.PROMPT_TOKENS)}[
        methods.PROMPT_REPLAY
    ]
    for _ in range(3):
        assert 0.85 * context < prompts.length(replay.messages()) + output <= context


def test_a_method_is_chosen_with_what_it_is_compared_with(prompts: PromptMaker) -> None:
    every = methods.make_methods(prompts, "base", 4096, 32, methods.PROMPT_TOKENS)
    assert chosen(every, None) == every
    assert [m.name for m in chosen(every, ["memory_B64"])] == ["none", "memory_B64_all", "memory_B64_top8"]
    assert {m.name for m in chosen(every, ["decoupled_B64_text_turn2"])} == {
        "none",
        "none_turn2",
        "decoupled_B64_text_turn2",
    }


def test_a_second_turn_continues_the_first(prompts: PromptMaker) -> None:
    every = {m.name: m for m in methods.make_methods(prompts, "base", 4096, 32, methods.PROMPT_TOKENS)}
    method = every["none_turn2"]
    before = [*method.messages(), {"role": "assistant", "content": "red"}]
    assert method.then is not None
    words = prompts.length([*before, method.then()]) - prompts.length([*before, {"role": "user", "content": ""}])
    assert words == methods.SECOND_TURN_TOKENS


@pytest.mark.parametrize(
    ("on_gpu", "flags", "dtype", "backend"),
    [
        (False, [], "float32", None),
        (False, ["--dtype", "float16"], "float16", None),
        (True, [], "bfloat16", "FLASH_ATTN"),
        (True, ["--dtype", "float16"], "float16", "FLASH_ATTN"),
        (True, ["--serve-args", "--attention-backend", "FLASHINFER"], "bfloat16", "FLASHINFER"),  # the last one counts
    ],
)
def test_the_server_has_a_dtype_and_a_backend_that_memory_can_be_served_with(
    on_gpu: bool, flags: list[str], dtype: str, backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    monkeypatch.setattr(sys, "argv", ["run", "--model", "demo", *flags])
    args = parse_arguments()
    arguments = server_arguments(CHECKPOINT, {}, 256, args)
    given = {flag: value for flag, value in itertools.pairwise(arguments) if flag.startswith("--")}
    assert (args.dtype, given["--dtype"], given.get("--attention-backend")) == (dtype, dtype, backend)


@pytest.mark.slow
def test_the_whole_benchmark_runs_and_ends_in_one_json_line(prompts: PromptMaker) -> None:
    command = [sys.executable, "-m", "benchmarks.serving.run", "--model", "demo", "--smoke"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    result = json.loads(lines[-1])
    rows = result["concurrency"]["1"]
    every = methods.make_methods(prompts, "base", 4096, 4, methods.PROMPT_TOKENS)
    assert list(rows) == [*(method.name for method in every), "lora_none", "lora"]
    lengths = {name: row["prompt_tokens"] for name, row in rows.items()}
    assert lengths["none"] == lengths["memory_B64_all"] == lengths["memory_B256_top8"] == methods.PROMPT_TOKENS
    assert lengths["longer_prompt"] == methods.PROMPT_TOKENS + methods.LONGER_BY
