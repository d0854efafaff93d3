"""`inducekv-serve --check` says what is installed and judges a start in its own words, for people and bug reports."""

import json
import shutil
from pathlib import Path

import pytest
import vllm.logger  # noqa: F401  # it takes its level when it is first imported, for all tests of the process

from inducekv_vllm.vllm_seams import seams
from server import launcher
from server.demo import CHECKPOINT


def checked(capsys: pytest.CaptureFixture[str], *given: str) -> tuple[object, dict[str, str]]:
    """The command's status and its lines, by what they are about."""
    with pytest.raises(SystemExit) as end:
        launcher.main(["--check", *given])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("A bug report has all of this")
    return end.value.code, {line[:12].strip(): line[13:] for line in lines[:-2]}


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the command sets are the test's own."""
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    monkeypatch.setenv("VLLM_PLUGINS", "inducekv")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("INDUCEKV_ADMIN_KEY", "secret")


def test_what_would_be_served(capsys: pytest.CaptureFixture[str]) -> None:
    status, lines = checked(capsys)
    assert status == 0
    assert lines["model"] == f"{CHECKPOINT}: LlavaForConditionalGeneration, torch.float32, 4096 tokens"
    assert (lines["runner"], lines["flags"]) == ("V1", "none is refused")
    assert lines["platform"].startswith("cpu")
    assert lines["seams"] == "all that InduceKV needs of vLLM is there"
    assert "supported is" in lines["vLLM"]
    assert "INDUCEKV_ADMIN_KEY" in lines["environment"]
    assert "secret" not in str(lines)


def test_everything_that_is_refused_is_named_as_at_a_start(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--pipeline-parallel-size", "2", "--mm-processor-cache-type", "shm"]
    status, lines = checked(capsys, str(CHECKPOINT), *flags)
    assert status == 2
    assert "pipeline parallelism: only the last stage has the query key; nor with" in lines["refused"]
    assert "--mm-processor-cache-type shm" in lines["refused"]
    with pytest.raises(SystemExit) as end:
        launcher.main([str(CHECKPOINT), *flags])
    assert end.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"inducekv-serve: error: {lines['refused']}"


def test_a_model_that_is_refused_needs_no_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(CHECKPOINT, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    assert checked(capsys, str(tmp_path / "model"))[0] == 0
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"model_type": "bert"}))
    status, lines = checked(capsys, str(tmp_path / "model"))
    assert status == 2
    assert str(tmp_path / "model") in lines["refused"] or "bert" in lines["refused"]


def test_what_vllm_lacks_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if it is an import that the judgement needs."""
    monkeypatch.setattr(seams, "missing_seams", lambda: ["vllm.a.B.c", "vllm.d"])
    monkeypatch.setattr(launcher, "prepare", lambda *given: (_ for _ in ()).throw(ImportError("vllm.d")))
    with pytest.raises(ImportError, match=r"vllm\.d"):
        launcher.main(["--check", "owner/model"])
    assert "seams        missing: vllm.a.B.c; vllm.d" in capsys.readouterr().out
