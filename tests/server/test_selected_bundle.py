"""Bundles as `inducekv-select` writes and publishes them: the server answers with the selector's own numbers.

An answer is held to the very tokens whose NLL the selector measures. vLLM's log-probabilities are those before
`allowed_token_ids`, `min_tokens` and `logit_bias`, but after constrained decoding, which therefore cannot hold it.
So every example's answer is one token, once or repeated, and then the token that ends the turn.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from inducekv_vllm.bundle import read_bundle
from selector.backbone.bundled_model import BundledModel
from selector.backbone.scoring import Scorer
from selector.cli.select import main
from selector.data.examples import Example, read_task
from tests.engine.parity import TOLERANCE, Prompt, World
from tests.server.http import TRACED, Bundles, ask, deviation, tokens_and_logprobs, trace_of
from tests.task_data import record, write_task
from tests.unit.selector.cli.bundle_command import command

# Questions and answers by task; the model needs no memory for "base".
QUESTIONS = {
    "colours": ("Which number has the colour of the circle?", ("1", "22", "333")),
    "counts": ("How many green stars are there? Answer in a sentence.", ("4444", "55", "6")),
    "base": ("Is the picture left of the system? yes no", ("no", "99", "nono")),
}
SPLITS = {"training": range(8), "validation": range(8, 11), "unseen": range(11, 14)}  # numbers of pictures
# A model of random weights knows no task: whether its memory is any good is a matter of chance.
SHARED = ("--budget", "4", "--payload-tokens", "2", "--allow-worse")
REFINED = ("--recipe", "refined", "--steps", "3", "--learning-rate", "0.1", "--entries-per-task", "2")


@dataclass(frozen=True)
class Published:
    """A bundle that the server holds, as the selector sees it, and what the selector has reported."""

    name: str
    deployed: BundledModel
    report: dict[str, Any]


@dataclass(frozen=True)
class Selector:
    """Runs `inducekv-select` on the model that the server serves."""

    server: str
    world: World
    data: dict[str, dict[str, Path]]  # by task and split
    folder: Path

    def publish(self, name: str, task: str, *options: str) -> Published:
        output = self.folder / f"{name}.safetensors"
        files = ["--task", self.data[task]["training"], "--validation", self.data[task]["validation"]]
        arguments = ["--model", self.world.model, *files, "--output", output, *SHARED, *options]
        assert main([*map(str, arguments), "--publish", self.server]) == 0
        report = json.loads(output.with_name(f"{name}.report.json").read_text())
        return Published(name, BundledModel(Scorer(self.world.backbone), read_bundle(output)), report)

    def examples(self, task: str, split: str) -> list[Example]:
        return read_task(self.data[task][split])


@pytest.fixture(scope="module")
def selector(server: str, world: World, tmp_path_factory: pytest.TempPathFactory) -> Selector:
    folder = tmp_path_factory.mktemp("selected")
    data = {task: {split: write_split(folder / task / split, task, split) for split in SPLITS} for task in QUESTIONS}
    return Selector(server, world, data, folder)


def write_split(folder: Path, task: str, split: str) -> Path:
    question, answers = QUESTIONS[task]
    records = []
    for number in SPLITS[split]:
        made = record(number, id=f"{task}-{number}", task=task, answer=answers[number % len(answers)])
        made["messages"][0]["content"][1]["text"] = question
        records.append(made)
    return write_task(folder, records, num_pictures=max(SPLITS[split]) + 1)


@pytest.fixture(scope="module")
def refined(bundles: Bundles, selector: Selector) -> Iterator[Published]:
    """Two tasks, one after the other, each published under the name "refined": the second replaces the first."""
    (first := selector.folder / "first").mkdir()
    stream = ("--base", str(selector.data["base"]["training"]), "--anchors", str(selector.folder / "anchors"))
    selector.publish("refined", "colours", *REFINED, *stream)
    previous = (selector.folder / "refined.safetensors").rename(first / "refined.safetensors")
    yield selector.publish("refined", "counts", *REFINED, *stream, "--previous", str(previous))
    bundles.unload("refined")
    bundles.wait_until_drained()


def test_eval_counts_the_same_here_and_there(selector: Selector, refined: Published) -> None:
    path, url = selector.folder / "refined.safetensors", ("--url", selector.server)
    asked = [part for task in QUESTIONS for part in ("--questions", selector.data[task]["training"])]
    arguments = ("eval", path, *asked)
    # Behind the table stand the questions nearest to the gate's threshold.
    by_model, by_server = (
        command(*arguments, *how).partition("\n\n")[0] for how in (("--model", selector.world.model), url)
    )
    assert by_model == by_server
    assert [row.split()[:2] for row in by_model.splitlines()[1:]] == [[task, "8"] for task in QUESTIONS]


@pytest.mark.parametrize("task", QUESTIONS)
def test_with_the_gate_of_the_refined_recipe(
    client: openai.OpenAI, selector: Selector, refined: Published, task: str
) -> None:
    """Open for the two tasks, each with its own entries; closed for base questions, as if there were no memory."""
    expected = {"open": task != "base", "task": None if task == "base" else task}
    for example in selector.examples(task, "training"):
        gate = check_answer(client, selector, refined, example)["gate"]
        assert {name: gate[name] for name in expected} == expected
    # The gate may decide either way for unseen ones, as long as the server and the selector agree.
    for example in selector.examples(task, "unseen"):
        check_answer(client, selector, refined, example)


def test_the_nll_is_the_one_that_the_selector_reported(
    client: openai.OpenAI, selector: Selector, refined: Published
) -> None:
    """Also under the base model's name: of the untouched model."""
    assert refined.deployed.bundle is not None
    assert refined.report["digest"] == refined.deployed.bundle.digest
    examples = selector.examples("counts", "validation")
    reported = refined.report["validation_nll"]
    for model, which in (("refined", "deployed"), ("base", "no_memory")):
        nll = mean_nll(client, model, refined, examples)
        assert nll == pytest.approx(reported[which], rel=0, abs=TOLERANCE)


def check_answer(client: openai.OpenAI, selector: Selector, published: Published, example: Example) -> dict[str, Any]:
    """Compare the server's routing, the example's answer and a free answer with the selector's; return the trace."""
    deployed, backbone = published.deployed, selector.world.backbone
    bundle, inputs = deployed.bundle, deployed.scorer.prefix(example)
    assert bundle is not None
    keys = backbone.retrieval_keys(inputs)  # [1, d]
    opened, prior = deployed.routing([example])  # [1] bool, [1, B]

    response = ask_for_the_answer(client, published.name, published, example, TRACED)
    trace = trace_of(response)
    assert trace["digest"] == bundle.digest
    assert (trace["gate"] is None) == (bundle.gate is None)
    assert trace["gate"] is None or trace["gate"]["open"] == bool(opened)
    allowed = (prior[0] == 0).nonzero()[:, 0].tolist() if opened else []  # rows of the bundle
    assert sorted(entry["index"] for entry in trace["entries"]) == allowed

    nll = -sum(tokens_and_logprobs(response)[1])
    assert nll == pytest.approx(deployed.mean_loss([example], keys), rel=0, abs=TOLERANCE)
    # Closed, it is the untouched model's; open, it is far from it.
    untouched = BundledModel(deployed.scorer, None).mean_loss([example], keys)
    assert (abs(nll - untouched) <= TOLERANCE) == (not opened)

    prompt = prompt_of(example)
    assert deviation(selector.world, ask(client, published.name, prompt), prompt, bundle) <= TOLERANCE
    return trace


def mean_nll(client: openai.OpenAI, model: str, published: Published, examples: Sequence[Example]) -> float:
    """Of the examples' answers, over HTTP."""
    answers = [ask_for_the_answer(client, model, published, example) for example in examples]
    return -sum(sum(tokens_and_logprobs(answer)[1]) for answer in answers) / len(answers)


def ask_for_the_answer(
    client: openai.OpenAI, model: str, published: Published, example: Example, extra: dict[str, Any] | None = None
) -> Any:
    """The one answer that the request can have is the example's, which must be one repeated token."""
    *words, end = published.deployed.scorer.answer_tokens(example)
    assert len(set(words)) == 1
    # The end wins as soon as it is allowed, which it is after as many words.
    held = {"allowed_token_ids": [words[0], end], "min_tokens": len(words), "ignore_eos": False}
    options = {"logit_bias": {str(end): 100}, "extra_body": held | (extra or {})}
    return ask(client, model, prompt_of(example), max_tokens=len(words) + 1, **options)


def prompt_of(example: Example) -> Prompt:
    (image,) = example.load_images()
    return Prompt(image, example.messages[0]["content"][1]["text"])
