"""Teaching over HTTP: facts serve when the answer comes, and are listed, corrected and forgotten."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from inducekv_vllm.teaching import FactList, fact_of
from server.teaching import examples
from tests.drawings import drawings
from tests.engine.facts import asked_about
from tests.engine.parity import Prompt, World
from tests.server.http import TRACED, Bundles, ask, trace_of

CITIES = ("Lima", "Oslo", "Quito", "Cairo", "Seoul", "Paris", "Delhi", "Tunis", "Hanoi", "Perth")


class Teacher(Bundles):
    def __init__(self, url: str, name: str) -> None:
        super().__init__(url)
        self.name = name
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def call(self, method: str, place: str = "", **options: Any) -> httpx.Response:
        url = f"{self.url}/v1/memory_bundles/{self.name}/examples{place}"
        return httpx.request(method, url, headers=self.headers, timeout=60, **options)

    def teach(self, *examples: dict[str, Any], **options: Any) -> httpx.Response:
        return self.call("POST", json={"examples": list(examples), **options})

    def answer(self, question: str | Prompt) -> tuple[str, list[str]]:
        """What the name answers, and the facts that it follows."""
        body = {**TRACED, "ignore_eos": False}
        prompt = Prompt(None, question) if isinstance(question, str) else question
        response = ask(self.client, self.name, prompt, extra_body=body)
        return response.choices[0].message.content, [fact["id"] for fact in trace_of(response)["facts"]]


def example(city: str, **changes: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"What is the code of {city}?"}]
    return {"id": city, "messages": messages, "answer": city[::-1], **changes}


def asked(city: str) -> str:
    return f"please tell me what the code of {city.upper()} is"


@contextmanager
def taught(server: str, name: str) -> Iterator[Teacher]:
    """A bundle of facts alone, unloaded at the end."""
    teacher = Teacher(server, name)
    response = teacher.teach(*map(example, CITIES))
    assert response.status_code == 200, response.text
    yield teacher
    assert teacher.unload(name).status_code == 200
    teacher.wait_until_drained()


def test_the_first_answer_after_the_call_is_right(server: str) -> None:
    with taught(server, "team/facts") as teacher:
        assert teacher.answer(asked("Lima")) == ("amiL", ["Lima"])
        assert teacher.answer(asked("Rome"))[1] == []
        card = teacher.cards()["team/facts"]
        assert (card["facts"], card["entries"]) == (10, 0)
        first = card["digest"]

        more = teacher.teach(example("Rome"), expected_digest=first).json()
        assert (more["facts"], more["ids"], more["superseded"]) == (11, ["Rome"], [])
        assert teacher.answer(asked("Rome")) == ("emoR", ["Rome"])
        assert teacher.teach(example("Bonn"), expected_digest=first).status_code == 409

        assert teacher.call("PATCH", "/Lima", json={"answer": "new"}).status_code == 200
        assert teacher.answer(asked("Lima")) == ("new", ["Lima"])
        assert teacher.call("DELETE", "/Lima").status_code == 200
        assert teacher.answer(asked("Lima"))[1] == []
        assert teacher.call("DELETE", "/Lima").status_code == 404
        assert teacher.call("PATCH", "/Lima", json={"answer": "x"}).status_code == 404

        digest = teacher.cards()["team/facts"]["digest"]
        for nothing in ({}, {"answer": None}, {"expected_digest": digest}):
            refused = teacher.call("PATCH", "/Rome", json=nothing)
            assert (refused.status_code, "nothing to correct" in refused.text) == (400, True)
        assert teacher.cards()["team/facts"]["digest"] == digest

        url = f"{server}/v1/rollback_memory_bundle"
        assert httpx.post(url, json={"name": "team/facts"}, headers=teacher.headers).status_code == 200
        assert teacher.answer(asked("Lima")) == ("new", ["Lima"])


def test_the_list(server: str) -> None:
    with taught(server, "listed") as teacher:
        newer = example("Cairo", id="newer", answer="other", expires_at="2999-01-01T00:00:00Z")
        assert teacher.teach(newer).json()["superseded"] == ["Cairo"]
        assert teacher.teach(example("Rome")).json()["superseded"] == []  # of the facts of this call
        in_order = sorted([*CITIES, "newer", "Rome"])
        page = teacher.call("GET", params={"limit": 3}).json()
        assert ([each["id"] for each in page["data"]], page["has_more"]) == (in_order[:3], True)
        rest = teacher.call("GET", params={"after": in_order[2]}).json()
        assert [each["id"] for each in rest["data"]] == in_order[3:]
        assert not rest["has_more"]
        by_id = {each["id"]: each for each in page["data"] + rest["data"]}
        assert by_id["Cairo"]["superseded_by"] == "newer"
        assert by_id["newer"]["answer"] == "other"
        assert teacher.answer(asked("Cairo")) == ("other", ["newer"])
        corrected = teacher.call("PATCH", "/Cairo", json={"answer": "back"}).json()  # it is the newest one now
        assert corrected["superseded"] == ["newer"]
        assert teacher.answer(asked("Cairo")) == ("back", ["Cairo"])
        url = f"{server}/v1/memory_bundles/listed/examples"
        assert httpx.get(url).json()["data"][0]["answer"] is None  # not for everybody
        after = in_order[2]
        for id in in_order[3:]:  # page by page, whoever forgets them meanwhile
            page = teacher.call("GET", params={"after": after, "limit": 1}).json()
            after = page["data"][0]["id"]
            assert (after, teacher.call("DELETE", f"/{after}").status_code) == (id, 200)
        assert teacher.call("GET", params={"after": after}).json()["data"] == []
        assert [each["id"] for each in teacher.call("GET").json()["data"]] == in_order[:3]


def test_a_list_keeps_no_request_waiting() -> None:
    """It is made beside the event loop, once for a version."""
    made = list[int]()

    class Memory(SimpleNamespace):
        digest = "d"

        @property
        def fact_list(self) -> FactList:
            made.append(threading.get_ident())
            return FactList([fact_of("Who?", "a", id="b")])

    state = SimpleNamespace(
        inducekv_registry=SimpleNamespace(memory=lambda name: Memory()),
        inducekv_access=SimpleNamespace(is_admin=lambda key: False),
    )
    request: Any = SimpleNamespace(app=SimpleNamespace(state=state))
    answer = json.loads(asyncio.run(examples("n", request, None, "", 10)).body)
    assert ([each["id"] for each in answer["data"]], answer["has_more"]) == (["b"], False)
    assert made != [threading.get_ident()]


def test_wordings(server: str) -> None:
    """They are found as the question is, listed for the admin, and added to; one of them asks for one fact."""
    name = "worded"
    with taught(server, name) as teacher:
        words = ["How is Rome abbreviated?", "how is rome ABBREVIATED", "Italy's capital in three letters"]
        assert teacher.teach(example("Rome", also=words)).status_code == 200
        for question in ("How is Rome abbreviated?", "Hello! italy's capital in three letters, please"):
            assert teacher.answer(question) == ("emoR", ["Rome"])
        assert teacher.answer("How is Lima abbreviated?")[1] == []
        added = teacher.call("PATCH", "/Lima", json={"also": ["How is Lima abbreviated?"]})
        assert (added.status_code, added.json()["superseded"]) == (200, [])
        assert teacher.answer("how is Lima abbreviated") == ("amiL", ["Lima"])
        again = teacher.call("PATCH", "/Lima", json={"also": ["How is Lima abbreviated?", "Peru's capital in letters"]})
        assert again.status_code == 200
        listed = {each["id"]: each["also"] for each in teacher.call("GET").json()["data"]}
        assert listed["Lima"] == ["How is Lima abbreviated?", "Peru's capital in letters"]
        assert (listed["Rome"], listed["Oslo"]) == (words, [])
        everybody = httpx.get(f"{server}/v1/memory_bundles/{name}/examples").json()["data"]
        assert {each["also"] for each in everybody} == {None}
        digest = teacher.cards()[name]["digest"]
        for also, reason in (
            (["How is Rome abbreviated"], "its wording 'How is Rome abbreviated' asks for example 'Rome'"),
            ([f"What is code {n}?" for n in range(31)], "at most 32 items"),  # beside the two that it has
            ("How?", "valid list"),
            ([], "nothing to correct: expected messages, answer, also, without or expires_at"),
        ):
            refused = teacher.call("PATCH", "/Lima", json={"also": also})
            assert (refused.status_code, reason in refused.text) == (400, True), refused.text
        assert teacher.cards()[name]["digest"] == digest
        assert teacher.call("PATCH", "/Lima", json={"answer": "new"}).status_code == 200  # its wordings stay
        assert teacher.answer("Peru's capital in letters?") == ("new", ["Lima"])
        assert teacher.call("DELETE", "/Lima").status_code == 200
        assert teacher.answer("Peru's capital in letters?")[1] == []


def test_wordings_are_taken_away(server: str) -> None:
    with taught(server, "away") as teacher:
        words = ["How is Rome abbreviated?", "Italy's capital in letters"]
        assert teacher.teach(example("Rome", also=words)).status_code == 200
        refused = teacher.call("PATCH", "/Rome", json={"without": ["How?"]})
        assert (refused.status_code, "example 'Rome' has no wording 'How?'" in refused.text) == (400, True)
        assert teacher.answer(words[0])[1] == ["Rome"]
        assert teacher.call("PATCH", "/Rome", json={"without": words[:1]}).status_code == 200
        assert (teacher.answer(words[0])[1], teacher.answer(words[1])[1]) == ([], ["Rome"])
        assert {each["id"]: each["also"] for each in teacher.call("GET").json()["data"]}["Rome"] == words[1:]


def test_it_is_said_as_stored_whatever_the_sampling(server: str) -> None:
    """A sentence without `temperature` in the request, as clients send it; what the request forbids is not said."""
    sentence = "The code is kept in the second drawer from the left, below the atlas: 7291-B (ask Ms Okafor first)."
    with taught(server, "said") as teacher:
        assert teacher.teach(example("Rome", answer=sentence)).status_code == 200

        def answers(question: str, **options: Any) -> Any:
            messages: Any = [{"role": "user", "content": question}]
            xargs = {**TRACED, **options.pop("extra_body", {})}
            return teacher.client.chat.completions.create(
                model="said", messages=messages, max_tokens=200, extra_body=xargs, **options
            )

        several: tuple[dict[str, Any], ...] = (
            {"n": 8},
            {"n": 4, "temperature": 2.0, "presence_penalty": 2.0},
            {"top_p": 0.1},
        )
        for options in several:
            answer = answers(asked("Rome"), **options)
            assert {choice.message.content for choice in answer.choices} == {sentence}
            assert {choice.finish_reason for choice in answer.choices} == {"stop"}
        stopped = answers(asked("Rome"), stop=["drawer"])
        assert stopped.choices[0].message.content == sentence.partition("drawer")[0]
        assert trace_of(stopped)["facts"][0]["id"] == "Rome"
        schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "boolean"}}}
        for forbids, reason in (
            ({"response_format": schema}, "the request asks for structured output"),
            ({"extra_body": {"bad_words": ["second"]}}, "bad_words bans one of its words"),
        ):
            answer = answers(asked("Rome"), **forbids)
            (fact,) = trace_of(answer)["facts"]
            assert fact["id"] == "Rome"
            assert fact["withheld"].startswith(reason)
            assert sentence not in answer.choices[0].message.content
        (fact,) = trace_of(answers(asked("Rome")))["facts"]
        assert fact["withheld"] is None


def test_an_answer_that_is_begun_goes_on_in_a_chat_and_begins_anew_in_messages(server: str) -> None:
    with taught(server, "begun"):
        turns = [{"role": "user", "content": asked("Lima")}, {"role": "assistant", "content": "am"}]
        body: dict[str, Any] = {"model": "begun", "messages": turns, "max_tokens": 8}
        begun = body | {"add_generation_prompt": False, "continue_final_message": True}
        chat = httpx.post(f"{server}/v1/chat/completions", json=begun, timeout=60).json()
        assert chat["choices"][0]["message"]["content"] == "iL"
        messages = httpx.post(f"{server}/v1/messages", json=body, timeout=60).json()
        assert [part["text"] for part in messages["content"]] == ["amiL"]


def test_a_miss_explains_itself(server: str) -> None:
    """To those who ask, what their question says beyond it; to the admin, the stored question, too."""
    with taught(server, "missing") as teacher:
        response = ask(teacher.client, "missing", Prompt(None, "What is the area code of Lima?"), extra_body=TRACED)
        trace = trace_of(response)
        assert (trace["facts"], trace["missed"]) == ([], {"id": "Lima", "task": "facts", "added": ["area"]})
        url = f"{server}/v1/memory_decisions"
        latest = httpx.get(url, headers=teacher.headers).json()["data"][0]
        assert (latest["facts"], latest["missed"]["question"]) == ([], "What is the code of Lima?")
        assert (latest["missed"]["missing"], latest["missed"]["added"]) == ([], ["area"])
        assert latest["missed"]["why"]
        assert teacher.answer(asked("Lima"))[1] == ["Lima"]
        latest = httpx.get(url, headers=teacher.headers).json()["data"][0]
        assert (latest["facts"], latest["missed"]) == (["Lima"], None)


def test_a_bundle_of_the_selector_is_taught_further(server: str, world: World) -> None:
    """Its memory stays as it is."""
    teacher = Teacher(server, "further")
    with teacher.loaded("further", world.paths["second"]):
        assert teacher.teach(*map(example, CITIES)).status_code == 200
        card = teacher.cards()["further"]
        assert (card["entries"], card["facts"]) == (world.bundles["second"].num_entries, 10)
        content, facts = teacher.answer(asked("Oslo"))
        assert (content, facts) == ("olsO", ["Oslo"])


def test_a_full_bundle_forgets_what_was_used_longest_ago(server: str) -> None:
    """Unless the call says otherwise; the answer names what is gone, and the version before still has it."""
    teacher, towns = Teacher(server, "full"), [f"Town {number}" for number in range(250)]
    examples = [example(town, answer="word " * 16) for town in towns]
    assert teacher.teach(*examples[:190], budget_bytes=2**16).json()["forgotten"] == []
    assert teacher.answer("What is the code of Town 1?")[1] == ["Town 1"]
    refused = teacher.teach(*examples[190:], when_full="refuse")
    assert (refused.status_code, "its budget is 65536" in refused.text) == (507, True)
    made = teacher.teach(*examples[190:]).json()
    gone = made["forgotten"]
    assert gone == [town for town in towns if town != "Town 1"][: len(gone)]
    assert 0 < len(gone) < 100
    assert made["facts"] == 250 - len(gone)
    assert teacher.answer("What is the code of Town 1?")[1] == ["Town 1"]
    assert teacher.answer("What is the code of Town 0?")[1] == []
    url = f"{server}/v1/rollback_memory_bundle"
    assert httpx.post(url, json={"name": "full"}, headers=teacher.headers).status_code == 200
    assert teacher.answer("What is the code of Town 0?")[1] == ["Town 0"]
    assert teacher.teach(example("Lima"), when_full="never").status_code == 400
    assert teacher.unload("full").status_code == 200
    teacher.wait_until_drained()


@pytest.fixture(scope="module")
def kept(server: str) -> Iterator[Teacher]:
    with taught(server, "kept") as teacher:
        yield teacher


def test_facts_about_pictures(server: str) -> None:
    teacher, known = Teacher(server, "parts"), drawings(10, 1)

    def about(prompt: Prompt, id: str, **changes: Any) -> dict[str, Any]:
        return {"id": id, "messages": prompt.messages, "answer": f"number {id}", **changes}

    response = teacher.teach(*(about(each, str(at)) for at, each in enumerate(asked_about(known, "What is it?"))))
    assert response.status_code == 200, response.text
    questions = asked_about([*known, *drawings(4, 2)], "Please tell me: what is it?")
    assert [teacher.answer(each)[1] for each in questions] == [[str(at)] for at in range(10)] + [[]] * 4
    assert teacher.answer(questions[3])[0] == "number 3"
    (other,) = asked_about(known[3:4], "Who made the thing in the picture?")
    assert teacher.answer(other)[1] == []  # another question about it
    listed = teacher.call("GET").json()["data"]
    assert all(each["has_picture"] and each["picture"].startswith("data:image/jpeg;base64,") for each in listed)
    url = f"{server}/v1/memory_bundles/parts/examples"
    assert httpx.get(url).json()["data"][0]["picture"] is None  # not for everybody

    assert teacher.call("PATCH", "/3", json={"answer": "new"}).status_code == 200  # the picture stays
    assert teacher.answer(questions[3]) == ("new", ["3"])
    assert teacher.call("PATCH", "/3", json={"messages": questions[12].messages}).status_code == 200
    assert [teacher.answer(questions[at])[1] for at in (3, 12)] == [[], ["3"]]
    assert teacher.unload("parts").status_code == 200
    teacher.wait_until_drained()


def picture(url: str) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
    return example("Lima", messages=[{"role": "user", "content": parts}])


NOTHING = [{"type": "image_url", "uuid": "x"}]
SOUND = [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"examples": []}, "at least 1 item"),
        ({"examples": [example("Lima")] * 2}, "'Lima' occurs more than once"),
        ({"examples": [example("Lima", answer="")]}, "at least 1 character"),
        ({"examples": [example("Lima", answer="so " * 300)]}, "its answer has"),
        ({"examples": [example("Lima", messages=[{"role": "user", "content": SOUND}])]}, "types input_audio"),
        ({"examples": [example("Rome"), picture("data:image/png;base64,")]}, "example Lima: expected a picture"),
        ({"examples": [picture("data:image/png;base64,AAAA")]}, "example Lima: expected a picture"),
        ({"examples": [picture("http://127.0.0.1:1/picture.png")]}, "example Lima: its picture cannot be used"),
        ({"examples": [picture("file:///etc/passwd")]}, "example Lima: its picture cannot be used"),
        ({"examples": [example("Lima", messages=[{"role": "user", "content": NOTHING}])]}, "example Lima: its picture"),
        ({"examples": [example("Lima", messages=[{"role": "system", "content": "a"}])]}, "one user message"),
        ({"examples": [example("Lima")] * 10_001}, "at most 10000 items"),
        ({"examples": [example(f"Lima {n}") for n in range(400)], "budget_bytes": 2**16}, "its budget is 65536"),
        ({"examples": [example("Lima")], "budget_bytes": 100}, "greater than or equal to 65536"),
        ({"examples": [example("Lima", expires_at="tomorrow")]}, "expires_at"),
        ({"examples": [example("Lima<|im_end|>")]}, "has '<|im_end|>', which marks turns of a conversation"),
        ({"examples": [example("Lima", id="a\nb")]}, "an id cannot have a line break"),
        ({"examples": [example("Lima", also=["What is the code of Oslo?"])]}, "asks for example 'Oslo'"),
    ],
)
def test_what_cannot_be_taught(kept: Teacher, body: dict[str, Any], reason: str) -> None:
    """Nothing has changed then."""
    before = kept.cards()["kept"]["digest"]
    response = kept.call("POST", json=body)
    assert response.status_code == (507 if "its budget" in reason else 400), response.text
    assert reason in response.text
    assert kept.cards()["kept"]["digest"] == before


def test_the_served_model_cannot_be_taught(kept: Teacher) -> None:
    response = Teacher(kept.url, "base").teach(example("Lima"))
    assert (response.status_code, "taken by the served model" in response.text) == (400, True)


@pytest.mark.parametrize("name", ["kept/examples/b", "examples", "examples/b", "b/examples"])
def test_a_name_that_routes_would_not_tell_from_an_id(kept: Teacher, name: str) -> None:
    response = Teacher(kept.url, name).teach(example("Lima"))
    assert response.status_code in (400, 404, 405), response.text
    assert kept.cards().keys().isdisjoint({name})


def test_only_the_admin_teaches(server: str) -> None:
    url = f"{server}/v1/memory_bundles/new/examples"
    assert httpx.post(url, json={"examples": [example("Lima")]}).status_code == 401
    assert httpx.get(url).status_code == 404
    assert "new" not in Bundles(server).cards()
