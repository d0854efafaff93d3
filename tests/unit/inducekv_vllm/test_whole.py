"""Files that are replaced: whoever writes is killed, or not alone, and nothing is left or lost."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from inducekv_vllm.files.whole import replacing

KILLED = """
import os, signal, sys
from pathlib import Path
from inducekv_vllm.files.whole import replacing
with replacing(Path(sys.argv[1])) as temporary:
    temporary.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def replace(target: Path, content: bytes) -> None:
    with replacing(target) as temporary:
        temporary.write_bytes(content)


def test_what_a_killed_replacement_leaves_goes_with_the_next_one(tmp_path: Path) -> None:
    """Of this file alone, and by our own names alone."""
    target, other = tmp_path / "m[1].json", tmp_path / "other"
    replace(target, b"before")
    for path in (target, other):
        assert subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False).returncode == -signal.SIGKILL
    for name in (".m[1].json.tmp", ".m[1].json.x.tmp", f".m1.json.{'0' * 16}.tmp"):
        (tmp_path / name).touch()
    assert (target.read_bytes(), len(os.listdir(tmp_path))) == (b"before", 6)
    replace(target, b"after")
    assert target.read_bytes() == b"after"
    left = {name for name in os.listdir(tmp_path) if name.startswith(".other.")}
    assert len(left) == 1
    expected = {"m[1].json", ".m[1].json.tmp", ".m[1].json.x.tmp", f".m1.json.{'0' * 16}.tmp"}
    assert set(os.listdir(tmp_path)) == left | expected


def test_what_somebody_writes_at_the_moment_stays(tmp_path: Path) -> None:
    target = tmp_path / "m"
    with replacing(target) as temporary:
        temporary.write_bytes(b"slow")
        replace(target, b"fast")
        assert target.read_bytes() == b"fast"
    assert (target.read_bytes(), os.listdir(tmp_path)) == (b"slow", ["m"])
