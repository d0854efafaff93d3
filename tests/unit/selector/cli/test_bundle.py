"""`inducekv-bundle` from the command line: results, exit status, one clear line for every error."""

import subprocess
import sys
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


def test_inspect_describes_the_gate(tmp_path: Path) -> None:
    gated = written(random_gated_bundle(gate=GATE), tmp_path / "gated.safetensors")
    # Two layers of 16 features and 4 prototypes: prototypes in float16; all else in float32.
    size = 2 * (2 * 4 * 16) + 4 * (2 * (2 * 16) + 2 * 4 + 2 * 8 + 2)
    printed = command("inspect", gated)
    thresholds = "a (threshold 0.25), b (threshold 0.5)"
    assert f"relevance gate  {thresholds}; {size} bytes\n" in printed
    looks_at = "values of layer 0 and 2, 4 prototypes of each; turns begin with [7, 8], end with 9"
    assert f"gate looks at   {looks_at}\n" in printed


def test_verify(old: Path, model_folders: dict[str, Path]) -> None:
    assert random_bundle().digest in command("verify", old)
    line = refuse("verify", old, "--model", model_folders["llava"])
    for text in (str(old), "another backbone", "head_dim: 8, the model has 64", "tokenizer_digest"):
        assert text in line


def test_damage_is_reported_in_one_line(old: Path, tmp_path: Path) -> None:
    content = bytearray(old.read_bytes())
    content[-5] ^= 1
    old.write_bytes(content)
    for arguments in (["inspect", old], ["verify", old]):
        assert str(old) in refuse(*arguments)
    assert "no such file" in refuse("verify", tmp_path / "none")


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
