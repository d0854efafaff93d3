"""A suite's data are made by one process at a time, in a folder of their own."""

import json
from pathlib import Path

import pytest

from benchmarks.data_folder import FACTS, data_folder
from benchmarks.locks import HeldElsewhere, locked
from inducekv_vllm.errors import ConfigError


def test_another_process_waits_and_another_suite_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with data_folder(folder, "mine", 7), pytest.raises(HeldElsewhere), locked(folder / "lock", patience=0):
        pass
    with data_folder(folder, "mine", 7):
        pass
    for suite, seed in (("other", 7), ("mine", 8)):
        with (
            pytest.raises(ConfigError, match=r"expected .*, found those of .*'mine'"),
            data_folder(folder, suite, seed),
        ):
            pass


def test_a_folder_whose_data_are_not_whole_belongs_to_no_suite(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), data_folder(tmp_path, "mine", 7):
        raise KeyboardInterrupt
    with data_folder(tmp_path, "other", 7):
        pass
    assert json.loads((tmp_path / FACTS).read_bytes()) == {"suite": "other", "seed": 7}
