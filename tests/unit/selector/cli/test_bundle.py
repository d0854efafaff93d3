"""`inducekv-bundle` from the command line: results, exit status, one clear line for every error."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from inducekv_vllm.gate import TurnMarks
from selector.cli.bundle import SUBCOMMANDS
from server.demo import BUNDLE, CHECKPOINT
from tests.bundles import random_bundle, random_gate, random_gated_bundle
from tests.unit.selector.cli.bundle_command import command, refuse, written
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


def test_an_interruption_writes_nothing(
    model_folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("selector.imported.bundle.import_source", stop)
    text, output = tmp_path / "text.txt", tmp_path / "out.safetensors"
    text.write_text("Be brief.")
    output.write_text("the old bundle")
    command("import", "text", text, "--model", model_folders["llava"], "--output", output, status=2)
    assert "interrupted" in capsys.readouterr().err
    assert output.read_text() == "the old bundle"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.safetensors", "text.txt"]


PROGRAM = """
import sys
for name in ("faiss", "vllm", "sklearn", "scipy", "openai", "peft"):
    sys.modules[name] = None
from selector.cli.bundle import main
bundle, model = sys.argv[1:]
sys.exit(max(map(main, (["inspect", bundle], ["verify", bundle, "--model", model]))))
"""


def test_inspect_and_verify_need_no_extra() -> None:
    """They work after a plain `pip install`."""
    run = [sys.executable, "-c", PROGRAM, str(BUNDLE), str(CHECKPOINT)]
    ended = subprocess.run(run, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    for text in ("relevance gate", f"{BUNDLE}: good, 8 entries"):
        assert text in ended.stdout


def test_help_waits_for_no_library() -> None:
    """torch and transformers take seconds to import."""
    program = "import sys; from selector.cli.bundle import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    program += "print(sorted({'numpy', 'rich', 'torch', 'transformers'} & sys.modules.keys()))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "[]"
    assert all(f"    {name} " in ended.stdout for name in SUBCOMMANDS)


def test_every_module_of_a_subcommand_is_there() -> None:
    for name in SUBCOMMANDS:
        with pytest.raises(SystemExit) as ended:
            command(name, "--help")
        assert ended.value.code == 0


def test_names_with_brackets_are_shown_as_they_are(tmp_path: Path) -> None:
    """Rich would take them for marks of its own."""
    entries = tuple(
        entry.model_copy(update={"id": f"[/x]{n}", "task": "[red]:key:"})
        for n, entry in enumerate(random_bundle().metadata.entries)
    )
    printed = command("inspect", written(random_bundle(entries=entries), tmp_path / "b.safetensors"), "--entries")
    assert "tasks           [red]:key: (5)\n" in printed
    assert "4\t[/x]4\t[red]:key:\t" in printed


def test_a_wrong_command_line_is_one_line() -> None:
    for arguments, problem in (
        (["eval", "x", "--questions", "y", "--model", "m", "--url", "u"], "argument --url: not allowed with argument"),
        (["inspekt"], "invalid choice: 'inspekt'"),
        (["verify"], "the following arguments are required: BUNDLE"),
    ):
        assert problem in refuse(*arguments)
