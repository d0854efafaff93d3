"""Settings of methods, and presets: options from a file, under the user's own."""

import pytest

from benchmarks.research.continual.__main__ import parse
from benchmarks.research.continual.methods import METHODS, choose_methods
from benchmarks.research.continual.presets import FOLDER
from inducekv_vllm.errors import ConfigError


def options(*arguments: str) -> dict:
    return vars(parse(["run", "--out", "results", *arguments]))


def test_a_preset_gives_what_the_command_line_leaves_open(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('method = ["lora", "refined"]\nbudget = [8, 16]\ntest_limit = 3\nset = ["steps=4", "base=false"]\n')
    read = options("--preset", str(path))
    assert (read["method"], read["budget"], read["test_limit"]) == (["lora", "refined"], [8, 16], 3)
    assert read["set"] == ["steps=4", "base=false"]
    given = options("--preset", str(path), "--method", "lora", "--budget", "64", "--set", "steps=9")
    assert (given["method"], given["budget"], given["test_limit"]) == (["lora"], [64], 3)
    (lora,) = choose_methods(given["method"], given["set"][0:1] + given["set"][2:])
    assert lora.steps == 9  # of two values the later one counts, and the user's is the later one


def test_a_setting_goes_to_every_method_that_has_it_but_not_to_an_ablation_of_it():
    no_memory, lora = choose_methods(["no_memory", "lora"], ["learning_rate=0.1", "steps=7"])
    assert (lora.learning_rate, lora.steps) == (0.1, 7)
    assert no_memory == METHODS["no_memory"]
    refined, unrefined = choose_methods(["refined", "refined_no_refinement"], ["steps=7", "batch_size=2"])
    assert (refined.steps, unrefined.steps, unrefined.batch_size) == (7, 0, 2)
    paper, without = choose_methods(["paper", "paper_no_anchors"], ["beta=0.25"])
    assert (paper.beta, without.beta) == (0.25, 0.0)
    with pytest.raises(ConfigError, match="what makes an ablation cannot be set"):
        choose_methods(["fixed_calibration"], ["inner_steps=3"])


def test_a_setting_may_name_its_method():
    lora, replay = choose_methods(["lora", "lora_replay"], ["steps=7", "lora.steps=9", "lora_replay.modules=mlp"])
    assert (lora.steps, lora.modules) == (9, "all")
    assert (replay.steps, replay.modules) == (7, "mlp")
    (alone,) = choose_methods(["lora"], ["lora_replay.steps=9"])
    assert alone == METHODS["lora"]


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.toml")))
def test_the_presets_that_come_with_it_are_sound(name):
    read = options("--preset", name)
    names = list(METHODS) if read["method"] == ["all"] else read["method"]
    assert choose_methods(names, read["set"])
    suite = name.removesuffix("-small")
    assert read["suite"] == (suite if suite.startswith("real-") else "demo")
