"""`selector.Server` with a real server."""

import pytest

from selector.client import Server, ServerError
from tests.engine.parity import World
from tests.server.launch import ADMIN_KEY


def test_a_name_is_taught_asked_corrected_rolled_back_and_unloaded(server: str) -> None:
    admin, stranger = Server(server, admin_key=ADMIN_KEY), Server(server)
    towns, question = ("Lima", "Oslo", "Quito", "Cairo"), "What is the code of Lima?"
    examples = [
        {"id": town, "messages": [{"role": "user", "content": f"What is the code of {town}?"}], "answer": town[::-1]}
        for town in towns
    ]
    taught = admin.teach("client/codes", examples)
    assert taught["facts"] == len(towns)
    assert admin.digest("client/codes") == taught["digest"]
    answer = stranger.ask("client/codes", question, max_tokens=8, trace=True)
    assert answer.text == "amiL"
    assert answer.trace is not None
    assert stranger.trace(answer.id) == [answer.trace]
    assert [fact["answer"] for fact in admin.facts("client/codes", page=3)] == [town[::-1] for town in sorted(towns)]
    admin.correct("client/codes", "Lima", answer="new")
    assert stranger.ask("client/codes", question, max_tokens=8).text == "new"
    assert admin.forget("client/codes", "Oslo")["facts"] == len(towns) - 1
    assert admin.rollback("client/codes", digest=taught["digest"])["digest"] == taught["digest"]
    assert admin.forget_versions("client/codes")["digest"] == taught["digest"]
    with pytest.raises(ServerError, match=r"refused it \(401\): changes of bundles need the admin key"):
        stranger.unload("client/codes")
    with pytest.raises(ServerError, match="expected digest other") as error:
        admin.unload("client/codes", expected_digest="other")
    assert error.value.status == 409
    assert admin.unload("client/codes") == taught["digest"]


def test_the_model_beneath_a_bundle(server: str, world: World) -> None:
    assert Server(server).base_model("first") == "base"
    assert Server(server).digest("first") == world.bundles["first"].digest
