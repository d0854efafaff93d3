"""`selector.Server`: what each call sends, which key goes with it, and what its errors name."""

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import selector
from inducekv_vllm.vllm_seams.config import ADMIN_HEADER
from selector.client import Server, ServerError
from tests.unit.selector.imitated import Request, imitated_server

FACTS = [{"id": f"e{number}"} for number in range(5)]


def answer(request: Request) -> tuple[int, Any]:
    if request.path.startswith("/v1/memory_bundles/team/m/examples?"):
        after = request.path.partition("after=e")[2]
        begin = int(after) + 1 if after else 0
        return 200, {"data": FACTS[begin : begin + 2], "has_more": begin + 2 < len(FACTS)}
    if request.path.startswith("/v1/memory_trace/"):
        return 200, {"traces": [{"bundle": "m"}]}
    if request.path in ("/v1/memory_bundles/m", "/v1/memory_bundles/n"):
        is_there = request.path.endswith("/m")
        return (200, {"digest": "d"}) if is_there else (404, {"error": {"message": "there is none"}})
    return 200, {"digest": "d", "data": [{"name": "m", "id": "m", "digest": "d", "parent": "base"}]}


@pytest.fixture
def sent() -> list[Request]:
    return []


@pytest.fixture
def server(sent: list[Request]) -> Iterator[Server]:
    def answered(request: Request) -> tuple[int, Any]:
        sent.append(request)
        return answer(request)

    with imitated_server(answered) as url:
        yield Server(f"{url}/", admin_key="admin", api_key="user")


EXPECTED = {"expected_digest": "d"}
CALLS: list[tuple[Callable[[Server], Any], str, str, Any]] = [
    (lambda s: s.load("m", "m.safetensors"), "POST", "load_memory_bundle", {"path": "m.safetensors", "replace": True}),
    (lambda s: s.load("m", "f", replace=False, **EXPECTED), "POST", "load_memory_bundle", {"path": "f", **EXPECTED}),
    (lambda s: s.unload("m"), "POST", "unload_memory_bundle", {}),
    (lambda s: s.rollback("m", digest="e"), "POST", "rollback_memory_bundle", {"digest": "e"}),
    (lambda s: s.forget_versions("m", **EXPECTED), "POST", "forget_memory_versions", EXPECTED),
]


@pytest.mark.parametrize(("call", "method", "route", "body"), CALLS)
def test_changes_send_what_is_given(
    server: Server, sent: list[Request], call: Callable[[Server], Any], method: str, route: str, body: dict[str, Any]
) -> None:
    call(server)
    (request,) = sent
    assert (request.method, request.path) == (method, f"/v1/{route}")
    assert {"name": "m", "replace": False, **request.body} == {"name": "m", "replace": False, **body}
    assert (request.headers[ADMIN_HEADER], request.headers["Authorization"]) == ("admin", "Bearer user")


def test_facts(server: Server, sent: list[Request]) -> None:
    example = {"messages": [{"role": "user", "content": "Who?"}], "answer": "Ann"}
    server.teach("team/m", [example], when_full="refuse")
    server.correct("team/m", "a b", answer="Bo")
    server.forget("team/m", "a?b")
    assert [(each.method, each.path, each.body) for each in sent] == [
        ("POST", "/v1/memory_bundles/team/m/examples", {"examples": [example], "when_full": "refuse"}),
        ("PATCH", "/v1/memory_bundles/team/m/examples/a%20b", {"answer": "Bo"}),
        ("DELETE", "/v1/memory_bundles/team/m/examples/a%3Fb", None),
    ]
    assert list(server.facts("team/m", page=2)) == FACTS
    assert {each.headers[ADMIN_HEADER] for each in sent} == {"admin"}  # it is shown questions and answers


def test_questions_go_without_the_admin_key(server: Server, sent: list[Request]) -> None:
    assert (server.digest("m"), server.digest("n"), server.base_model("m")) == ("d", None, "base")
    assert server.trace("chat 1", cache_salt="s") == [{"bundle": "m"}]
    assert sent[-1].path == "/v1/memory_trace/chat%201?cache_salt=s"
    assert all(ADMIN_HEADER not in each.headers for each in sent)
    with pytest.raises(ServerError, match="does not say of which model 'n' is a bundle"):
        server.base_model("n")


def test_ask() -> None:
    sent: list[Any] = []

    def answered(request: Request) -> tuple[int, Any]:
        sent.append(request)
        trace = {"kv_transfer_params": {"inducekv": {"gate": None}}} if "vllm_xargs" in request.body else {}
        return 200, {"id": "r", "choices": [{"message": {"content": "Ann"}}], **trace}

    with imitated_server(answered) as url:
        server = Server(url, admin_key="admin")
        plain, traced = server.ask("m", "Who?", max_tokens=3), server.ask("m", "Who?", trace=True, seed=1)
    assert (plain.id, plain.text, plain.trace) == ("r", "Ann", None)
    assert traced.trace == {"gate": None}
    messages = [{"role": "user", "content": "Who?"}]
    assert sent[0].body == {"model": "m", "messages": messages, "max_tokens": 3, "temperature": 0}
    assert sent[1].body["vllm_xargs"] == {"inducekv_trace": 1}
    assert sent[1].body["seed"] == 1
    assert not any(ADMIN_HEADER in each.headers for each in sent)
    with imitated_server(lambda _: (200, {"choices": []})) as url, pytest.raises(ServerError, match="none to a chat"):
        Server(url).ask("m", "Who?")


@pytest.mark.parametrize(
    ("answered", "message"),
    [
        (
            (409, {"error": {"message": "expected digest a, found b"}}),
            r"/v1/memory_bundles refused it \(409\): expected",
        ),
        ((401, {"error": "Unauthorized"}), r'refused it \(401\): {"error": "Unauthorized"}'),
        ((307, "http://127.0.0.1:9/"), r"refused it \(307\)"),
    ],
)
def test_errors_name_route_status_and_what_the_server_said(answered: tuple[int, Any], message: str) -> None:
    with imitated_server(lambda _: answered) as url, pytest.raises(ServerError, match=message) as error:
        selector.Server(url).bundles()
    assert error.value.status == answered[0]


def test_a_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INDUCEKV_ADMIN_KEY", "secret")
    server = Server.from_environment("http://127.0.0.1:9")
    assert (server.admin_key, server.api_key) == ("secret", None)
    assert "secret" not in repr(server)
    with pytest.raises(ServerError, match=r"127\.0\.0\.1:9/v1/memory_bundles cannot be reached") as error:
        server.bundles()
    assert error.value.status is None


@pytest.mark.parametrize("said", [b"", b"no HTTP\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"])
def test_an_answer_that_breaks_off(said: bytes) -> None:
    def answer() -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(said)

    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as workers:
        workers.submit(answer)
        port = listening.getsockname()[1]
        with pytest.raises(ServerError, match=r"/v1/memory_bundles cannot be reached: .") as error:
            Server(f"http://127.0.0.1:{port}").bundles()
    assert error.value.status is None
