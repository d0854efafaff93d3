"""An OpenAI-compatible endpoint: its models, and how it loads and unloads bundles and adapters.

A bundle goes over InduceKV's own routes, an adapter over vLLM's (enabled by VLLM_ALLOW_RUNTIME_LORA_UPDATING=1). Both
name a path, so the endpoint must see the same files. An API key is read from OPENAI_API_KEY, as OpenAI's clients do,
and the key that loads bundles from INDUCEKV_ADMIN_KEY.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx

from benchmarks.continual.methods.method import Kind
from inducekv_vllm.errors import ConfigError
from inducekv_vllm.host.config import ADMIN_HEADER, ADMIN_KEY_VARIABLE

Loadable = Literal["bundle", "adapter"]
LOAD_ROUTES: Mapping[Loadable, str] = {"bundle": "/v1/load_memory_bundle", "adapter": "/v1/load_lora_adapter"}
# What an artifact of each kind has to have loaded before it can answer.
LOADS: Mapping[Kind, Loadable | None] = {
    "none": None,
    "exemplars": None,
    "copier": None,
    "bundle": "bundle",
    "adapter": "adapter",
    "gated_adapter": "adapter",
    "gated_adapters": "adapter",
}
SECONDS = 300.0  # for any one request
NOT_OFFERED = (404, 405)


class EndpointFailed(RuntimeError):
    """An endpoint is gone or refused a request; the message names it."""


@dataclass(frozen=True)
class Endpoint:
    """Where questions are asked."""

    url: str  # without the closing "/v1"
    model: str  # the name under which it serves the untouched model

    @classmethod
    def at(cls, url: str, model: str | None = None) -> Endpoint:
        """The endpoint at `url`, with or without "/v1"; `model` says which of several models is the untouched one.

        Raises EndpointFailed: it does not answer; ConfigError: which model is meant is not clear.
        """
        url = url.rstrip("/").removesuffix("/v1")
        names = [card["id"] for card in models_at(url) if not card.get("parent")]  # bundles and adapters have one
        if model is None and len(names) != 1:
            listed = ", ".join(names) or "no model"
            raise ConfigError(f"{url} serves {listed}: say with --endpoint-model which is meant")
        if model is not None and model not in names:
            raise ConfigError(f"{url} serves no model {model!r}, it serves: {', '.join(names) or 'none'}")
        return cls(url, model or names[0])

    def offers(self, what: Loadable) -> bool:
        """Whether it has the route that loads this; an empty request shows it."""
        return request(self.url, "POST", LOAD_ROUTES[what], {}).status_code not in NOT_OFFERED

    def load(self, what: Loadable, path: Path) -> str:
        """A new name under which what lies at `path` answers from now on. Raises EndpointFailed: it was refused."""
        name, place = f"continual-{uuid.uuid4().hex}", str(path.resolve())
        adapter, bundle = {"lora_name": name, "lora_path": place}, {"name": name, "path": place, "replace": True}
        body = adapter if what == "adapter" else bundle
        answer_of(self.url, "POST", LOAD_ROUTES[what], body)
        return name

    def unload(self, what: Loadable, name: str) -> None:
        """Raises EndpointFailed: it does not answer, or refuses."""
        field = "lora_name" if what == "adapter" else "name"
        answer_of(self.url, "POST", LOAD_ROUTES[what].replace("/load_", "/unload_"), {field: name})


def models_at(url: str) -> list[dict[str, Any]]:
    """What is served there, an object as OpenAI describes it for each name. Raises EndpointFailed."""
    listed: list[dict[str, Any]] = answer_of(url, "GET", "/v1/models").json()["data"]
    return listed


def answer_of(url: str, method: str, route: str, body: dict[str, Any] | None = None) -> httpx.Response:
    """Like `request`; raises EndpointFailed also when the answer is an error."""
    response = request(url, method, route, body)
    if response.is_error:
        raise EndpointFailed(f"{url}{route}: {refusal(response)}")
    return response


def request(url: str, method: str, route: str, body: dict[str, Any] | None = None) -> httpx.Response:
    """Raises EndpointFailed: no answer came."""
    try:
        return httpx.request(method, f"{url}{route}", json=body, headers=headers(), timeout=SECONDS)
    except httpx.HTTPError as error:
        raise EndpointFailed(unreachable(url, error)) from error


def headers() -> dict[str, str]:
    key, admin_key = os.environ.get("OPENAI_API_KEY"), os.environ.get(ADMIN_KEY_VARIABLE)
    return ({"Authorization": f"Bearer {key}"} if key else {}) | ({ADMIN_HEADER: admin_key} if admin_key else {})


def refusal(response: httpx.Response) -> str:
    """The status and the beginning of what the endpoint said."""
    return f"HTTP {response.status_code}: {' '.join(response.text.split())[:500]}"


def unreachable(url: str, error: httpx.HTTPError) -> str:
    return f"{url} does not answer ({type(error).__name__}: {error})"
