"""`inducekv-bundle` from the command line: results, exit status, one clear line for every error."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from inducekv_vllm.bundle import read_bundle, write_bundle
from selector.cli.bundle import main
from tests.inducekv_vllm.bundles import random_bundle, random_gated_bundle
from tests.selector.conftest import record, write_task


@pytest.fixture
def bundle_file(tmp_path: Path) -> Path:
    path = tmp_path / "memory.safetensors"
    write_bundle(random_bundle(), path)
    return path


def one_error_line(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if "Loading weights" not in line]
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("inducekv-bundle: error: ")
    assert "Traceback" not in captured.err
    return lines[0]


def test_inspect(bundle_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = random_bundle()
    assert main(["inspect", str(bundle_file), "--entries"]) == 0
    output = capsys.readouterr().out
    for text in (bundle.digest, "5 of 5", "t (5)", "sqrt", "policy=random", "e4\tt\tab", "0.07", "rope_theta"):
        assert text in output


def test_inspect_and_diff_tell_the_gate(bundle_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(bundle_file)]) == 0
    assert "relevance gate  none" in capsys.readouterr().out
    old, new = tmp_path / "old.safetensors", tmp_path / "new.safetensors"
    bundle = random_gated_bundle()
    write_bundle(bundle, old)
    assert main(["inspect", str(old)]) == 0
    output = capsys.readouterr().out
    # Two tasks of two float16 keys of 16 numbers and a float32 each.
    assert "relevance gate  a (threshold 0.25), b (threshold -0.5); 136 bytes" in output

    gate = bundle.gate
    assert gate is not None
    write_bundle(random_gated_bundle(gate=replace(gate, thresholds=torch.tensor([0.25, 0.5]))), new)
    assert main(["diff", str(old), str(new)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith("digest: ")] == ["gate threshold of b: largest change 1"]
    assert main(["diff", str(bundle_file), str(new)]) == 1
    assert "gate_tasks: () -> ('a', 'b')" in capsys.readouterr().out.splitlines()


def test_verify(bundle_file: Path, model_folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(bundle_file)]) == 0
    assert random_bundle().digest in capsys.readouterr().out
    assert main(["verify", str(bundle_file), "--model", str(model_folders["llava"])]) == 2
    line = one_error_line(capsys)
    for text in (str(bundle_file), "another backbone", "head_dim: 8, other 64", "tokenizer_digest"):
        assert text in line


def test_damage_is_told_in_one_line(bundle_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = bytearray(bundle_file.read_bytes())
    content[-5] ^= 1
    bundle_file.write_bytes(content)
    for command in (["inspect"], ["verify"], ["diff", str(bundle_file)]):
        assert main([*command, str(bundle_file)]) == 2
        assert str(bundle_file) in one_error_line(capsys)
    assert main(["verify", str(tmp_path / "none")]) == 2
    assert "no such file" in one_error_line(capsys)


def test_diff(bundle_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", str(bundle_file), str(bundle_file)]) == 0
    assert "identical" in capsys.readouterr().out
    old = random_bundle()
    records = list(old.metadata.entries)
    records[4] = records[4].model_copy(update={"id": "new"})
    records[3] = records[3].model_copy(update={"source_digest": "cd"})
    keys = old.payload_keys.clone()
    keys[1, 2, 0, 0, 0] += 0.5
    changed = random_bundle(
        payload_keys=keys, entries=tuple(records), temperature=0.09, parent_digest=old.digest, weighting="prior"
    )
    other = tmp_path / "other.safetensors"
    write_bundle(changed, other)
    assert main(["diff", str(bundle_file), str(other)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert f"parent_digest: None -> {old.digest}" in lines
    assert "weighting: sqrt -> prior" in lines
    assert "entry removed: e4" in lines
    assert "entry added: new" in lines
    assert any(line.startswith("entry e3: made from another example") for line in lines)
    assert any(line.startswith("payload_keys of the 4 entries kept: largest change 0.5") for line in lines)
    assert "temperature: largest change 0.02" in lines
    assert not any(line.startswith(("payload_values", "retrieval_keys", "layer_bias", "backbone")) for line in lines)


def test_diff_finds_another_order_of_the_same_entries(
    bundle_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = random_bundle()
    swap = [1, 0, 2, 3, 4]
    other = tmp_path / "other.safetensors"
    write_bundle(
        random_bundle(
            retrieval_keys=old.retrieval_keys[swap],
            payload_keys=old.payload_keys[:, swap],
            payload_values=old.payload_values[:, swap],
            entries=tuple(old.metadata.entries[i] for i in swap),
        ),
        other,
    )
    assert main(["diff", str(bundle_file), str(other)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == ["entries kept are in another order"]


def test_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    text = {
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    path.write_text(json.dumps({"model_type": "qwen3_vl", "text_config": text}))
    assert main(["plan", "--config", str(path)]) == 0
    output = capsys.readouterr().out
    for text in ("72.31", "144.62", "289.25", "578.50", "4096"):
        assert text in output
    assert main(["plan", "--config", str(path), "--budget", "64", "--payload-tokens", "16"]) == 0
    assert "144.31" in capsys.readouterr().out
    for arguments, problem in [
        (["--payload-tokens", "0"], "--payload-tokens must be at least 1"),
        (["--budget", "-4"], "--budget must be at least 1"),
    ]:
        assert main(["plan", "--config", str(path), *arguments]) == 2
        assert problem in one_error_line(capsys)
    path.write_text("{")
    assert main(["plan", "--config", str(path)]) == 2
    assert "not JSON" in one_error_line(capsys)


def build_arguments(model: Path, task: Path, output: Path, *more: str) -> list[str]:
    return [
        *("build", "--model", str(model), "--task", str(task), "--budget", "4", "--payload-tokens", "3"),
        *("--output", str(output), *more),
    ]


def test_build(
    model_folders: dict[str, Path], task_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    more = ("--policy", "k-center", "--weighting", "prior", "--seed", "3")
    for output in (first, second):
        assert main(build_arguments(model_folders["qwen3-vl"], task_file, output, *more)) == 0
    assert first.read_bytes() == second.read_bytes()
    bundle = read_bundle(first)
    assert bundle.digest in capsys.readouterr().out
    assert bundle.metadata.settings == {
        "budget": 4,
        "payload_tokens": 3,
        "policy": "k-center",
        "weighting": "prior",
        "seed": 3,
        "candidates": 12,
    }
    assert main(["verify", str(first), "--model", str(model_folders["qwen3-vl"])]) == 0


def test_build_refuses_bad_input(
    model_folders: dict[str, Path], task_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llava, output = model_folders["llava"], tmp_path / "out.safetensors"
    broken = write_task(tmp_path / "broken", [record(0), record(1)])
    broken.write_text(broken.read_text() + "{\n")
    no_image = write_task(tmp_path / "no-image", [record(99)])
    no_picture = write_task(tmp_path / "no-picture", [record(0)])
    (no_picture.parent / "images/0.png").write_text("not a picture")
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    for arguments, problem in [
        (build_arguments(llava, broken, output), "train.jsonl, line 3: malformed JSON"),
        (build_arguments(llava, no_image, output), "line 1: the image"),
        (build_arguments(llava, no_picture, output), "not a readable image"),
        (build_arguments(llava, empty, output), "the file holds no examples"),
        (build_arguments(llava, tmp_path / "none.jsonl", output), "cannot read"),
        (build_arguments(tmp_path / "no-model", task_file, output), "no such model folder"),
        (build_arguments(llava, task_file, tmp_path / "none" / "x"), "does not exist"),
        (build_arguments(llava, task_file, tmp_path), "is a folder"),
        (build_arguments(llava, task_file, output, "--budget", "0"), "budget must be at least 1"),
        (build_arguments(llava, task_file, output, "--device", "cuda:77"), "device"),
    ]:
        assert main(arguments) == 2, arguments
        assert problem in one_error_line(capsys)
    assert not output.exists()
    assert not list(tmp_path.glob(".*"))


def test_an_interruption_writes_nothing(
    model_folders: dict[str, Path],
    task_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import selector.update.build

    def interrupt(*arguments: object, **keywords: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(selector.update.build, "extract", interrupt)
    output = tmp_path / "out.safetensors"
    output.write_text("the old bundle")
    assert main(build_arguments(model_folders["llava"], task_file, output)) == 2
    assert "interrupted" in capsys.readouterr().err
    assert output.read_text() == "the old bundle"
    assert [path.name for path in tmp_path.iterdir()] == ["out.safetensors"]


def test_usage_errors_are_argparses(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["build"], ["guess"]):
        with pytest.raises(SystemExit) as error:
            main(arguments)
        assert error.value.code == 2


def test_the_module_runs_as_a_program(bundle_file: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "selector.cli.bundle", "verify", str(bundle_file) + "x"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("inducekv-bundle: error: ")
