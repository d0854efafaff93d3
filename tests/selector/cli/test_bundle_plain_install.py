"""`inducekv-bundle` after a plain `pip install`, without what the extras add."""

from __future__ import annotations

import subprocess
import sys

from server.demo import BUNDLE, CHECKPOINT

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
    command = [sys.executable, "-c", PROGRAM, str(BUNDLE), str(CHECKPOINT)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    for text in ("relevance gate", f"{BUNDLE}: good, 32 entries", "KV tokens a layer"):
        assert text in ended.stdout
