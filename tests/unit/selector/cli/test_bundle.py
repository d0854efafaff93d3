"""`inducekv-bundle` from the command line: results, exit status, one clear line for every error."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from inducekv_vllm.bundle import read_bundle
from inducekv_vllm.gate import TurnMarks
from server.demo import BUNDLE, CHECKPOINT
from tests.bundles import random_bundle, random_gate, random_gated_bundle
from tests.task_data import record, write_task
from tests.unit.selector.cli.bundle_command import command, refuse, written
from tests.unit.selector.imitated import imitated_server
from tests.unit.selector.stream import stop

GATE = random_gate(marks=TurnMarks((7, 8), 9), thresholds=torch.tensor([0.25, 0.5]))


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """The file of `random_bundle()`."""
    return written(random_bundle(), tmp_path / "old.safetensors")


def test_inspect(old: Path) -> None:
    printed = command("inspect", old, "--entries")
    digest = random_bundle().digest
    for text in (digest, "5 of 5", "t (5)", "sqrt", "policy=random", "e4\tt\tab", "0.07", "rope_theta"):
        assert text in printed
    assert "relevance gate  none" in printed


def test_inspect_and_diff_describe_the_gate(old: Path, tmp_path: Path) -> None:
    gated = written(random_gated_bundle(gate=GATE), tmp_path / "gated.safetensors")
    # Two layers of 16 features and 4 prototypes: prototypes in float16; all else in float32.
    size = 2 * (2 * 4 * 16) + 4 * (2 * (2 * 16) + 2 * 4 + 2 * 8 + 2)
    printed = command("inspect", gated)
    thresholds = "a (threshold 0.25), b (threshold 0.5)"
    assert f"relevance gate  {thresholds}; {size} bytes\n" in printed
    looks_at = "values of layer 0 and 2, 4 prototypes of each; turns begin with [7, 8], end with 9"
    assert f"gate looks at   {looks_at}\n" in printed

    gate = replace(GATE, thresholds=torch.tensor([0.25, 1.5]), floors=GATE.floors + torch.tensor([0.25, 0, 0, 0]))
    new = written(random_gated_bundle(gate=gate), tmp_path / "new.safetensors")
    lines = command("diff", gated, new, status=1).splitlines()
    assert [line for line in lines if not line.startswith("digest: ")] == [
        "gate floors: largest change 0.25",
        "gate threshold of b: largest change 1",
    ]
    assert "gate_tasks: () -> ('a', 'b')" in command("diff", old, new, status=1).splitlines()


def test_verify(old: Path, model_folders: dict[str, Path]) -> None:
    assert random_bundle().digest in command("verify", old)
    line = refuse("verify", old, "--model", model_folders["llava"])
    for text in (str(old), "another backbone", "head_dim: 8, the model has 64", "tokenizer_digest"):
        assert text in line


def test_damage_is_reported_in_one_line(old: Path, tmp_path: Path) -> None:
    content = bytearray(old.read_bytes())
    content[-5] ^= 1
    old.write_bytes(content)
    for arguments in (["inspect", old], ["verify", old], ["diff", old, old]):
        assert str(old) in refuse(*arguments)
    assert "no such file" in refuse("verify", tmp_path / "none")


def test_diff(old: Path, tmp_path: Path) -> None:
    assert "identical" in command("diff", old, old)
    bundle = random_bundle()
    records = list(bundle.metadata.entries)
    records[4] = records[4].model_copy(update={"id": "new"})
    records[3] = records[3].model_copy(update={"source_digest": "cd"})
    keys = bundle.payload_keys.clone()
    keys[1, 2, 0, 0, 0] += 0.5
    changed = random_bundle(
        payload_keys=keys, entries=tuple(records), temperature=0.09, parent_digest=bundle.digest, weighting="prior"
    )
    lines = command("diff", old, written(changed, tmp_path / "new.safetensors"), status=1).splitlines()
    assert f"parent_digest: None -> {bundle.digest}" in lines
    assert "weighting: sqrt -> prior" in lines
    assert "entry removed: e4" in lines
    assert "entry added: new" in lines
    assert any(line.startswith("entry e3: made from another example") for line in lines)
    assert any(line.startswith("payload_keys of the 4 entries kept: largest change 0.5") for line in lines)
    assert "temperature: largest change 0.02" in lines
    assert not any(line.startswith(("payload_values", "retrieval_keys", "layer_bias", "backbone")) for line in lines)


def test_plan(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    sizes = {"hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8}
    path.write_text(json.dumps({"model_type": "qwen3_vl", "text_config": sizes | {"head_dim": 128}}))
    printed = command("plan", "--config", path)
    for number in ("72.31", "144.62", "289.25", "578.50", "4096"):
        assert number in printed
    assert "144.31" in command("plan", "--config", path, "--budget", "64", "--payload-tokens", "16")
    in_float32 = command("plan", "--config", path, "--budget", "64", "--payload-dtype", "float32")
    assert str(64 * (2 * 2560 + 4 * 36 * 8 * 8 * (128 + 128))) in in_float32
    assert "--payload-tokens must be at least 1" in refuse("plan", "--config", path, "--payload-tokens", "0")
    assert "--budget must be at least 1" in refuse("plan", "--config", path, "--budget", "-4")
    latents = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128}
    path.write_text(json.dumps(sizes | latents))
    printed = command("plan", "--config", path, "--budget", "64")
    assert "latents for all heads: keys of 576, values of 512" in printed
    assert "38.56" in printed  # as it is stored
    assert "72.31" in printed  # by the paper's formula
    path.write_text("{")
    assert "not JSON" in refuse("plan", "--config", path)


def build(model: Path, task: Path, output: Path, *more: str) -> list[object]:
    data = ["build", "--model", model, "--task", task, "--output", output]
    return [*data, "--budget", "4", "--payload-tokens", "3", *more]


def test_build(model_folders: dict[str, Path], task_file: Path, tmp_path: Path) -> None:
    model, first, second = model_folders["qwen3-vl"], tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    more = ("--policy", "k-center", "--weighting", "prior", "--seed", "3")
    printed = [command(*build(model, task_file, output, *more)) for output in (first, second)]
    assert first.read_bytes() == second.read_bytes()
    bundle = read_bundle(first)
    assert all(bundle.digest in text for text in printed)
    assert bundle.metadata.settings == {
        "budget": 4,
        "payload_tokens": 3,
        "policy": "k-center",
        "weighting": "prior",
        "seed": 3,
        "candidates": 12,
    }
    command("verify", first, "--model", model)


def test_build_refuses_bad_input(model_folders: dict[str, Path], task_file: Path, tmp_path: Path) -> None:
    llava, output = model_folders["llava"], tmp_path / "out.safetensors"
    broken = write_task(tmp_path / "broken", [record(0), record(1)])
    broken.write_text(broken.read_text() + "{\n")
    no_image = write_task(tmp_path / "no-image", [record(99)])
    no_picture = write_task(tmp_path / "no-picture", [record(0)])
    (no_picture.parent / "images/0.png").write_text("not a picture")
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    for arguments, problem in [
        (build(llava, broken, output), "train.jsonl, line 3: malformed JSON"),
        (build(llava, no_image, output), "line 1: the image"),
        (build(llava, no_picture, output), "not a readable image"),
        (build(llava, empty, output), "the file holds no examples"),
        (build(llava, tmp_path / "none.jsonl", output), "cannot read"),
        (build(tmp_path / "no-model", task_file, output), "no such model folder"),
        (build(llava, task_file, tmp_path / "none" / "x"), "does not exist"),
        (build(llava, task_file, tmp_path), "is a folder"),
        (build(llava, task_file, output, "--budget", "0"), "budget must be at least 1"),
        (build(llava, task_file, output, "--device", "cuda:77"), "device"),
    ]:
        assert problem in refuse(*arguments)
    assert not output.exists()
    assert not list(tmp_path.glob(".*"))


def test_an_interruption_writes_nothing(
    model_folders: dict[str, Path],
    task_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("selector.update.build.extract", stop)
    output = tmp_path / "out.safetensors"
    output.write_text("the old bundle")
    command(*build(model_folders["llava"], task_file, output), status=2)
    assert "interrupted" in capsys.readouterr().err
    assert output.read_text() == "the old bundle"
    assert [path.name for path in tmp_path.iterdir()] == ["out.safetensors"]


PROGRAM = """
import sys
for name in ("faiss", "vllm", "sklearn", "scipy", "openai", "peft"):
    sys.modules[name] = None
from selector.cli.bundle import main
bundle, model = sys.argv[1:]
commands = ["inspect", bundle], ["verify", bundle, "--model", model], ["plan", "--config", f"{model}/config.json"]
sys.exit(max(map(main, commands)))
"""


def test_inspect_verify_and_plan_need_no_extra() -> None:
    """They work after a plain `pip install`."""
    run = [sys.executable, "-c", PROGRAM, str(BUNDLE), str(CHECKPOINT)]
    ended = subprocess.run(run, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    for text in ("relevance gate", f"{BUNDLE}: good, 8 entries", "KV tokens a layer"):
        assert text in ended.stdout


def test_names_with_brackets_are_shown_as_they_are() -> None:
    """Rich would take them for marks of its own."""
    card = {"name": "[/x]", "digest": "d", "entries": 1, "facts": 0, "tasks": ["[red]:key:"]}
    card |= {"versions": ["d"], "active_requests": 0}
    with imitated_server(lambda request: (200, {"data": [card], "has_more": False})) as url:
        assert command("list", "--url", url).splitlines()[1].split() == ["[/x]", "d", "1", "0", "[red]:key:", "0", "0"]


def test_a_wrong_command_line_is_one_line() -> None:
    for arguments, problem in (
        (["plan", "--config", "x", "--budget", "many"], "argument --budget: invalid int value: 'many'"),
        (["inspekt"], "invalid choice: 'inspekt'"),
        (["verify"], "the following arguments are required: PATH"),
    ):
        assert problem in refuse(*arguments)
