"""A running `inducekv-serve`, asked over HTTP: its bundles, their facts and versions, answers and traces.

    server = Server("http://127.0.0.1:8000", admin_key="...")
    server.load("support", "support.safetensors")
    server.teach("support", [{"messages": [{"role": "user", "content": "Who signs?"}], "answer": "Ann"}])
    print(server.ask("support", "Who signs?", trace=True).text)

Only the standard library is imported for it. Every method raises `ServerError`.
"""

from __future__ import annotations

import base64
import json
import mimetypes
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from inducekv_vllm.errors import ConfigError
from inducekv_vllm.vllm_seams.config import ADMIN_HEADER, ADMIN_KEY_VARIABLE

if TYPE_CHECKING:
    from .data.examples import Example

API_KEY_VARIABLE: Final = "INDUCEKV_API_KEY"
TIMEOUT_S: Final = 600.0
TRACED: Final = {"inducekv_trace": 1}
Message = dict[str, Any]


class ServerError(ConfigError):
    """A server refused a request, or cannot be reached; the message names the route, the status and what it said."""

    def __init__(self, message: str, status: int | None = None) -> None:
        """`status`: of the answer; None for none."""
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Answer:
    """What a model answered to one chat request."""

    id: str  # of the response, for `Server.trace`
    text: str
    trace: dict[str, Any] | None  # what it was answered with; None unless it was asked for


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """The keys are for the server that was named."""

    def redirect_request(self, *_: Any) -> None:
        """Let the answer be an error."""


_OPENER: Final = urllib.request.build_opener(_NoRedirects)


@dataclass(frozen=True)
class Server:
    """See the module docstring. Threads may share it."""

    url: str  # http://127.0.0.1:8000
    admin_key: str | None = field(default=None, repr=False)  # for changes, and to be shown paths, questions and answers
    api_key: str | None = field(default=None, repr=False)  # if the server was started with one
    timeout_s: float = TIMEOUT_S

    @classmethod
    def from_environment(cls, url: str) -> Server:
        """With the keys in INDUCEKV_ADMIN_KEY and INDUCEKV_API_KEY."""
        return cls(url, os.environ.get(ADMIN_KEY_VARIABLE), os.environ.get(API_KEY_VARIABLE))

    # ---- bundles -------------------------------------------------------------------------------------------------

    def bundles(self, page: int = 1000) -> list[dict[str, Any]]:
        """The cards of all names, in alphabetical order; so many are asked for at once."""
        return list(self._pages("memory_bundles", "name", page))

    def digest(self, name: str) -> str | None:
        """What a name stands for; None for nothing."""
        try:
            return str(self.call("GET", f"memory_bundles/{_quoted(name)}")["digest"])
        except ServerError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return None
            raise

    def load(
        self, name: str, path: str | Path, *, replace: bool = True, expected_digest: str | None = None
    ) -> dict[str, Any]:
        """Let a name stand for a bundle file of the server's machine; return its card.

        Args:
            replace: the name may stand for another bundle.
            expected_digest: the name must stand for this version.
        """
        body = {"name": name, "path": str(path), "replace": replace}
        return self._change("load_memory_bundle", body, expected_digest=expected_digest)

    def unload(self, name: str, *, expected_digest: str | None = None) -> str:
        """Let a name stand for nothing; return the digest of its version."""
        return str(self._change("unload_memory_bundle", {"name": name}, expected_digest=expected_digest)["digest"])

    def rollback(self, name: str, *, digest: str | None = None, expected_digest: str | None = None) -> dict[str, Any]:
        """Let a name stand for its version before, or the kept one of `digest`; return its card."""
        return self._change("rollback_memory_bundle", {"name": name}, digest=digest, expected_digest=expected_digest)

    def forget_versions(
        self, name: str, *, digest: str | None = None, expected_digest: str | None = None
    ) -> dict[str, Any]:
        """Drop the versions that are kept of a name, or that of `digest`."""
        return self._change("forget_memory_versions", {"name": name}, digest=digest, expected_digest=expected_digest)

    # ---- facts ---------------------------------------------------------------------------------------------------

    def teach(self, name: str, examples: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
        """Teach a bundle facts; they serve when this returns.

        Args:
            examples: each with "messages" and "answer"; "id", "task", "also" and "expires_at" if they are given.
            options: `budget_bytes`, `when_full`, `expected_digest`.
        """
        return self.call("POST", _examples(name), {"examples": [dict(each) for each in examples], **options})

    def facts(self, name: str, page: int = 1000) -> Iterator[dict[str, Any]]:
        """All facts of a bundle, in the order of their ids; so many are asked for at once."""
        yield from self._pages(_examples(name), "id", page, as_admin=True)

    def correct(self, name: str, fact: str, **changes: Any) -> dict[str, Any]:
        """Give a fact another answer, question or date, or other wordings: `answer`, `messages`, `expires_at`, `also`
        to add wordings, `without` to take some away.

        With `expected_digest`, only while the name stands for this version.
        """
        return self.call("PATCH", f"{_examples(name)}/{_quoted(fact)}", changes)

    def forget(self, name: str, fact: str) -> dict[str, Any]:
        """Forget a fact; earlier versions keep it."""
        return self.call("DELETE", f"{_examples(name)}/{_quoted(fact)}", as_admin=True)

    # ---- answers -------------------------------------------------------------------------------------------------

    def base_model(self, name: str) -> str:
        """What the untouched model beneath a bundle is called."""
        cards = self._pages("models", "id", 1000)
        parent = next((card.get("parent") for card in cards if card["id"] == name), None)
        if not isinstance(parent, str):
            raise ServerError(f"{self.url} does not say of which model {name!r} is a bundle")
        return parent

    def ask(
        self,
        model: str,
        question: str | Sequence[Message],
        *,
        max_tokens: int = 64,
        trace: bool = False,
        **options: Any,
    ) -> Answer:
        """A greedy answer to one chat request.

        Args:
            model: a bundle's name, or the untouched model's.
            question: a text, or messages as in OpenAI's API.
            trace: with what a bundle was answered with.
            options: further fields of the request.
        """
        messages = [{"role": "user", "content": question}] if isinstance(question, str) else list(question)
        body = {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0, **options}
        if trace:
            body["vllm_xargs"] = {**TRACED, **options.get("vllm_xargs", {})}
        found = self.call("POST", "chat/completions", body, as_admin=False)
        try:
            found_trace = (found.get("kv_transfer_params") or {}).get("inducekv")
            return Answer(str(found.get("id", "")), str(found["choices"][0]["message"]["content"] or ""), found_trace)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise ServerError(f"the answer of {self.url} is none to a chat request: {found!r:.200}") from error

    def trace(self, response_id: str, *, cache_salt: str | None = None) -> list[dict[str, Any]]:
        """What a traced response was answered with, also a streamed one: one trace for each prompt or turn."""
        query = "" if cache_salt is None else f"?{urllib.parse.urlencode({'cache_salt': cache_salt})}"
        found: list[dict[str, Any]] = self.call("GET", f"memory_trace/{_quoted(response_id)}{query}")["traces"]
        return found

    # ---- any route -----------------------------------------------------------------------------------------------

    def call(
        self, method: str, route: str, body: Mapping[str, Any] | None = None, *, as_admin: bool | None = None
    ) -> dict[str, Any]:
        """The answer of a route beneath /v1.

        Args:
            as_admin: send the admin's key; None for where there is a body.

        Raises:
            ServerError: the server cannot be reached or refuses.
        """
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        if self.admin_key and (body is not None if as_admin is None else as_admin):
            headers[ADMIN_HEADER] = self.admin_key
        address = f"{self.url.rstrip('/')}/v1/{route}"
        shown = address.partition("?")[0]
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(address, data=data, headers=headers, method=method)
            with _OPENER.open(request, timeout=self.timeout_s) as answer:
                found: dict[str, Any] = json.loads(answer.read())
                return found
        except urllib.error.HTTPError as error:
            raise ServerError(f"{shown} refused it ({error.code}): {_reason(error.read(2000))}", error.code) from error
        except (OSError, ValueError, HTTPException) as error:
            raise ServerError(f"{shown} cannot be reached: {error}") from error

    def _pages(self, route: str, key: str, page: int, *, as_admin: bool = False) -> Iterator[dict[str, Any]]:
        """What a route lists, page by page; an item of a list has its name under `key`."""
        after: dict[str, str] = {}
        has_more = True
        while has_more:
            query = urllib.parse.urlencode({"limit": page, **after})
            found = self.call("GET", f"{route}?{query}", as_admin=as_admin)
            yield from found["data"]
            has_more = found.get("has_more", False)  # vLLM's own list has no pages
            after = {"after": found["data"][-1][key]} if has_more else {}

    def _change(self, route: str, body: Mapping[str, Any], **more: str | None) -> dict[str, Any]:
        given = {name: value for name, value in more.items() if value is not None}
        return self.call("POST", route, {**body, **given})


def messages_of(example: Example) -> list[Message]:
    """The question of an example as a client sends it: its pictures' files inside the request, in their places."""
    paths = iter(example.images)

    def sent(part: dict[str, Any]) -> dict[str, Any]:
        if part["type"] != "image":
            return part
        path = next(paths)
        return picture_part(mimetypes.guess_type(path.name)[0] or "image/png", path.read_bytes())

    return [{**message, "content": [sent(part) for part in message["content"]]} for message in example.messages]


def picture_part(media_type: str, data: bytes) -> dict[str, Any]:
    """A part of a message that holds the picture itself."""
    return {"type": "image_url", "image_url": {"url": f"data:{media_type};base64,{base64.b64encode(data).decode()}"}}


def _examples(name: str) -> str:
    return f"memory_bundles/{_quoted(name)}/examples"


def _quoted(part: str) -> str:
    return urllib.parse.quote(part, safe="/")


def _reason(answer: bytes) -> str:
    """What the server says of an error, which is its message in vLLM's form."""
    text = answer.decode(errors="replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text
