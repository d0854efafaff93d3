"""Reading a finished run, and the command of the diagnostics."""

import shutil

import numpy as np
import pytest

from benchmarks.research.continual.results import Finished
from inducekv_vllm.errors import ConfigError, TaskDataError
from tests.bundles import random_bundle
from tests.research.finished_runs import refusal, write_configuration, write_finished_run

MEMORY = [{"a": [True, True], "base": [True]}, {"a": [True, False], "b": [True, True], "base": [False]}]
PLAIN = [{"a": [False, False], "base": [True]}, {"a": [False, True], "b": [False, False], "base": [True]}]


@pytest.fixture
def out(tmp_path):
    write_configuration(tmp_path)
    bundles = [random_bundle(seed=seed) for seed in (0, 1)]
    write_finished_run(tmp_path, "refined", MEMORY, seed=0, bundles=bundles)
    write_finished_run(tmp_path, "refined", MEMORY, seed=1)
    write_finished_run(tmp_path, "no_memory", PLAIN, seed=5)
    return tmp_path


def test_a_run_is_read_with_its_matrix_predictions_and_memory(out):
    first, second = Finished.read(out).runs("refined", 32)
    assert (first.seed, second.seed, first.order) == (0, 1, ["a", "b"])
    np.testing.assert_array_equal(first.accuracy, [[1.0, np.nan], [0.5, 1.0]])
    assert first.base == [1.0, 0.0]
    assert list(first.predictions(0)) == [("a", "0"), ("a", "1"), ("base", "0")]
    assert not first.predictions()["a", "1"].right
    assert first.bundle(0).digest == random_bundle(seed=0).digest
    assert first.bundle().digest == random_bundle(seed=1).digest
    with pytest.raises(ConfigError, match="refined has no memory bundle to look at: what it makes is 'none'"):
        second.bundle()
    first.state(0).rename(first.state(0).with_name("gone"))
    with pytest.raises(ConfigError, match=r"00-a/state: the state after this task was not kept; `--keep-states all`"):
        first.bundle(0)


def test_predictions_are_paired_with_the_untouched_model_whatever_its_seed(out):
    finished = Finished.read(out)
    pairs = finished.paired(finished.runs("refined")[0])
    assert [mine.task for mine, _ in pairs] == ["a", "a", "b", "b", "base"]
    assert [mine.right for mine, _ in pairs] == [True, False, True, True, False]
    assert [theirs.right for _, theirs in pairs] == [False, True, False, False, True]
    # Predictions of other questions are not paired.
    path = out / "no_memory/budget-32/seed-5/01-b/predictions.jsonl"
    path.write_text(path.read_text().replace('"base", "id": "0"', '"base", "id": "9"'))
    with pytest.raises(TaskDataError, match="predictions of different questions"):
        finished.paired(finished.runs("refined")[0])


def test_the_suite_is_the_one_that_was_asked_about_and_no_other(demo_suite, tmp_path):
    source, suite = demo_suite(2, 1, 1, "guild", "field")
    data = tmp_path / "data"
    shutil.copytree(source, data)
    write_configuration(tmp_path, suite=suite)
    assert Finished.read(tmp_path, data=source).suite == suite
    assert Finished.read(tmp_path).suite.digest() == suite.digest()
    lines = (data / "guild" / "train.jsonl").read_text().splitlines()
    (data / "guild" / "train.jsonl").write_text(lines[0] + "\n")
    with pytest.raises(ConfigError, match="not the data of the run"):
        _ = Finished.read(tmp_path).suite


def test_the_command_names_what_is_missing(out, capsys):
    error = refusal(capsys, "calibration", out, "--method", "paper", "--budget", 32)
    assert "error: no finished run of paper, budget 32" in error
    assert error.count("\n") == 1
    assert not (out / "diagnostics").exists()
