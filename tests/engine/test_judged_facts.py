"""Facts that the served model judges, through a real engine. The tiny model cannot: thresholds say what it says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from transformers import BertModel
from vllm.renderers.params import ChatParams
from vllm.sampling_params import SamplingParams

from inducekv_vllm.backbone import meaning
from inducekv_vllm.backbone.fact_reader import FactReader
from inducekv_vllm.backbone.judged import weighed
from inducekv_vllm.backbone.pair_classifier import PairClassifier
from inducekv_vllm.bundle import read_bundle, write_bundle
from inducekv_vllm.frontend import asking, meant
from inducekv_vllm.frontend.loading import load_async
from inducekv_vllm.frontend.memory_engine import MemoryEngine
from inducekv_vllm.frontend.served_bundle import ServedBundle
from inducekv_vllm.judge import Pair
from inducekv_vllm.judge.ability import known_pairs
from inducekv_vllm.protocol import Decision
from inducekv_vllm.teaching import fact_of, taught
from inducekv_vllm.vllm_seams.config import InduceKVConfig
from selector.backbone.judging import BackboneJudge
from tests.engine.parity import TOLERANCE, World, make_world, text_prompts
from tests.engine.served import Served, handle, serve_world
from tests.tiny_encoders import save_classifier
from tests.tiny_families import FAMILIES

pytestmark = pytest.mark.anyio
CODE = "What is the code of Lima?"
REQUEST = "Which code does Lima have?"
TWO = ("Which is not the code of Lima?", "What is the code of Lima 2?", "What was the code of Lima?")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("world")
    return make_world(FAMILIES["llama"](folder / "model"), folder, make_prompts=text_prompts)


@pytest.fixture(scope="module")
async def served(anyio_backend: str, world: World) -> AsyncIterator[Served]:
    async with serve_world(world, max_model_len=4096) as served:
        yield served


@pytest.fixture
async def memory(served: Served, world: World, tmp_path: Path) -> ServedBundle:
    return await loaded(served, world, tmp_path, {CODE: "Lima", "What is the code of Oslo?": "Oslo"})


async def loaded(served: Served, world: World, tmp_path: Path, ids: dict[str, str]) -> ServedBundle:
    """Facts by their questions."""
    facts = [fact_of(question, id[:3].upper(), id=id) for question, id in ids.items()]
    path = tmp_path / "facts.safetensors"
    write_bundle(taught(None, facts, FactReader.of(world.model)).bundle, path)
    made = ServedBundle.from_bundle(read_bundle(path), str(path))
    await load_async(served.llm.collective_rpc, str(path), made.digest)
    served.memories.memories["facts"] = made
    return made


@pytest.fixture(autouse=True)
async def nobody_measures(served: Served) -> AsyncIterator[None]:
    """Whatever a test has begun in the background ends with it."""
    yield
    for judging in Judging.made:
        await judging.end()
    Judging.made.clear()


class Judging:
    """An engine client whose model is a judge with a threshold."""

    made: ClassVar[list[Judging]] = []

    def __init__(self, served: Served, threshold: float | None, **settings: Any) -> None:
        self.made.append(self)
        self.served = served
        self.engine = MemoryEngine(served.llm, served.memories, InduceKVConfig(judge_threshold=threshold, **settings))
        self._count = 0

    async def end(self) -> None:
        if (started := self.engine.facts._started) is None:
            return
        _, judge = await started
        if (measuring := judge._measuring) is not None:
            measuring.cancel()
            await asyncio.wait([measuring])

    async def facts(self, text: str) -> list[dict[str, Any]]:
        """Those in the trace of a request."""
        outputs = await self.outputs(text, extra_args={"inducekv_trace": 1})
        facts: list[dict[str, Any]] = outputs[-1].kv_transfer_params["inducekv"]["facts"]
        return facts

    async def outputs(self, text: str, model: str | None = "facts", **options: Any) -> list[Any]:
        self._count += 1
        params = SamplingParams(max_tokens=4, **{"temperature": 0, **options})
        _, (prompt,) = await self.served.llm.renderer.render_chat_async(
            [[{"role": "user", "content": text}]], ChatParams()
        )
        lora = None if model is None else handle(model)
        return [each async for each in self.engine.generate(prompt, params, f"judged-{self._count}", lora_request=lora)]


async def test_the_judge_decides(served: Served, memory: ServedBundle) -> None:
    """Only where words leave it open."""
    generous, strict, measured = (Judging(served, threshold) for threshold in (-99.0, 99.0, None))
    for judging in (generous, strict, measured):
        (stored,) = await judging.facts(CODE)
        assert (stored["id"], stored["odds"]) == ("Lima", None)
    for _ in range(2):  # the second time, the pair is known
        (found,) = await generous.facts(REQUEST)
        assert (found["id"], found["withheld"]) == ("Lima", None)
        assert found["odds"] is not None
    for judging in (strict, measured):
        assert await judging.facts(REQUEST) == []
    assert measured.engine.facts.judged is not None
    while measured.engine.facts.judged.ability is None:  # in the background
        await asyncio.sleep(0.05)
    assert await measured.facts(REQUEST) == []
    for text in TWO:
        assert await generous.facts(text) == []
    assert not measured.engine.facts.judged.may_judge


async def test_it_says_what_transformers_says(served: Served, memory: ServedBundle, world: World) -> None:
    """Beside other requests, and with the instruction in the prefix cache."""
    judging = Judging(served, -99.0)
    pairs = [Pair(CODE, f"Which code does the town of Lima have in {number} words?") for number in range(3)]
    pairs += [each.pair for each in known_pairs()[:3]]
    _, judge = await judging.engine.facts.started(memory)
    found, expected = await judge.odds(pairs), BackboneJudge(world.backbone)
    said = expected.said(expected.judged.both_ways(pairs))
    for number, pair in enumerate(pairs):
        assert found[pair] == pytest.approx(weighed(*said[2 * number : 2 * number + 2]), abs=10 * TOLERANCE)


async def test_a_request_goes_on_if_the_judge_is_late(
    served: Served, memory: ServedBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    judging = Judging(served, -99.0)
    with monkeypatch.context() as patch:
        patch.setattr(asking, "LONGEST_S", 0)
        assert await judging.facts(REQUEST) == []
    assert len(await judging.facts(REQUEST)) == 1


class Noted:
    """Why facts were missed."""

    def __init__(self) -> None:
        self.whys: list[str | None] = []

    def note_decision(self, name: str, memory: ServedBundle, decision: Decision) -> None:
        self.whys.append(None if decision.missed is None else decision.missed.why)

    def note_fact(self, name: str, id: str) -> None:
        pass


@pytest.mark.parametrize("threshold", [-99.0, 99.0])
async def test_a_request_runs_beside_its_judge(
    served: Served, memory: ServedBundle, monkeypatch: pytest.MonkeyPatch, threshold: float
) -> None:
    """It is answered as if the judge had spoken first: with the fact, or as without memory."""
    judging, journal = Judging(served, threshold), Noted()
    judging.engine._journal = journal  # type: ignore[assignment]
    _, judge = await judging.engine.facts.started(memory)
    said, generate, begun = judge._judge.said, judging.engine._plain_generate, asyncio.Event()

    async def late(pairs: Sequence[Pair], *, goes_first: bool = True) -> list[float]:
        await asyncio.wait_for(begun.wait(), 60)
        return await said(pairs, goes_first=goes_first)

    async def noted(*args: Any, **options: Any) -> AsyncIterator[Any]:
        async with contextlib.aclosing(generate(*args, **options)) as outputs:
            async for output in outputs:
                begun.set()
                yield output

    monkeypatch.setattr(judge._judge, "said", late)
    monkeypatch.setattr(judging.engine, "_plain_generate", noted)
    two: dict[str, Any] = {"n": 2, "temperature": 1, "seed": 3}
    plain = await judging.outputs(REQUEST, model=None, **two)
    begun.clear()
    beside = await judging.outputs(REQUEST, **two)
    assert begun.is_set()
    after = await judging.outputs(REQUEST, **two)  # the pair is known
    texts = [
        {each.index: each.text for output in outputs for each in output.outputs} for outputs in (plain, beside, after)
    ]
    assert texts[1] == texts[2]
    if threshold < 0:
        assert texts[1] == {0: "LIM", 1: "LIM"}
        assert journal.whys == [None, None]
    else:
        assert texts[1] == texts[0]
        assert journal.whys == ["the judge says that it asks something else"] * 2
    await served.nothing_is_left()


async def test_a_client_that_hangs_up_while_it_is_judged(served: Served, memory: ServedBundle) -> None:
    judging = Judging(served, -99.0)
    for wait in (0, 0.001, 0.01):
        task = asyncio.create_task(judging.facts(f"{REQUEST} {wait:g} times"))
        await asyncio.sleep(wait)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    await served.nothing_is_left()


async def test_a_new_fact_that_resembles_one_with_another_answer(served: Served, memory: ServedBundle) -> None:
    judging = Judging(served, -99.0)
    new = [fact_of(REQUEST, "XXX", id="new"), fact_of("How tall is Ana Ruiz?", "2 m", id="other")]
    new.append(fact_of(REQUEST.replace("code", "codes"), "LIM", id="agrees"))
    assert await judging.engine.facts.resembled(memory, new) == {"new": ["Lima"]}


@pytest.mark.parametrize("outputs", [1, 2])
async def test_a_classifier_judges(served: Served, memory: ServedBundle, tmp_path: Path, outputs: int) -> None:
    """In place of the model, in both directions."""
    folder = save_classifier(tmp_path / "judge", outputs)
    both = PairClassifier(str(folder)).said([Pair(CODE, REQUEST), Pair(REQUEST, CODE)])
    generous, measured = Judging(served, -99.0, judge=str(folder)), Judging(served, None, judge=str(folder))
    (found,) = await generous.facts(REQUEST)
    assert (found["id"], found["odds"]) == ("Lima", pytest.approx(weighed(*both), abs=1e-5))
    assert await measured.facts(REQUEST) == []
    assert measured.engine.facts.judged is not None
    while measured.engine.facts.judged.ability is None:
        await asyncio.sleep(0.05)
    assert not measured.engine.facts.judged.may_judge


async def test_a_request_goes_on_if_the_classifier_is_gone(
    served: Served, memory: ServedBundle, tmp_path: Path
) -> None:
    judging = Judging(served, -99.0, judge=str(save_classifier(tmp_path / "judge", 1)))
    (tmp_path / "judge").rename(tmp_path / "elsewhere")
    assert await judging.facts(REQUEST) == []
    (tmp_path / "elsewhere").rename(tmp_path / "judge")
    assert len(await judging.facts(REQUEST)) == 1


async def test_a_wording_without_a_common_word(
    served: Served, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By meaning it reaches the judge. Without an able one, or without an encoder, it does not."""
    await loaded(served, world, tmp_path, {"What is the wifi password?": "wifi", "How tall is Ana Ruiz?": "Ana"})
    request, encoder = "how can guests get online?", str(save_classifier(tmp_path / "encoder", 1, BertModel))
    monkeypatch.setattr(meaning, "LIKE", -1.0)
    monkeypatch.setattr(meant, "LONGEST_S", 60.0)  # a busy machine needs more than a request waits for
    (found,) = await Judging(served, -99.0, encoder=encoder).facts(request)
    assert (found["id"], found["closeness"]) == ("wifi", 0)
    assert found["odds"] is not None
    assert await Judging(served, -99.0).facts(request) == []
    assert await Judging(served, None, encoder=encoder).facts(request) == []
    gone = Judging(served, -99.0, encoder=encoder)
    (tmp_path / "encoder").rename(tmp_path / "elsewhere")
    assert await gone.facts(request) == []
    (tmp_path / "elsewhere").rename(tmp_path / "encoder")
    assert len(await gone.facts(request)) == 1
