"""What FastAPI cannot say of our routes by itself, in the schema that `/openapi.json` serves.

- Invalid bodies and parameters get 400: vLLM answers so, not with FastAPI's 422.
- With `--api-key`, vLLM wants one of its keys on every route under `/v1`, and answers 401 in a form of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, Final

from fastapi import FastAPI

TAG: Final = "Memory"
API_KEY_SCHEME: Final = "ApiKey"
UNPROCESSABLE: Final = "422"
UNAUTHORIZED: Final = "401"
NO_API_KEY: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "string", "const": "Unauthorized"}},
}


def describe_routes(app: FastAPI) -> None:
    """Correct the schema that an app has of our routes whenever it is asked for."""
    generate: Callable[[], dict[str, Any]] = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            _correct(generate(), with_api_key=_has_api_key(app))
        assert app.openapi_schema is not None  # FastAPI keeps what it has generated
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to change a schema


def _has_api_key(app: FastAPI) -> bool:
    """Whether vLLM asks for an API key."""
    keys = getattr(app.state.args, "api_key", None) or [os.environ.get("VLLM_API_KEY")]
    return any(keys)


def _correct(schema: dict[str, Any], *, with_api_key: bool) -> None:
    if with_api_key:
        schemes = schema.setdefault("components", {}).setdefault("securitySchemes", {})
        schemes[API_KEY_SCHEME] = {
            "type": "http",
            "scheme": "bearer",
            "description": "One of the server's API keys (`--api-key` or `VLLM_API_KEY`).",
        }
    for operation in _our_operations(schema):
        operation["responses"].pop(UNPROCESSABLE, None)
        takes_admin = operation.get("security", [])
        # A change needs the admin's key; elsewhere it shows more.
        ways = takes_admin if UNAUTHORIZED in operation["responses"] else [{}, *takes_admin]
        if with_api_key:
            ways = [{API_KEY_SCHEME: [], **way} for way in ways]
            _add_unauthorized(operation["responses"])
        operation["security"] = ways


def _our_operations(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for path in schema["paths"].values():
        for operation in path.values():
            if TAG in operation.get("tags", ()):
                yield operation


def _add_unauthorized(responses: dict[str, Any]) -> None:
    """vLLM's answer to a missing API key, beside ours to a missing admin key."""
    ours = responses.get(UNAUTHORIZED)
    if ours is None:
        responses[UNAUTHORIZED] = {
            "description": "The API key is missing or wrong.",
            "content": {"application/json": {"schema": NO_API_KEY}},
        }
        return
    ours["description"] = "The API key or the admin key is missing or wrong."
    json = ours["content"]["application/json"]
    json["schema"] = {"anyOf": [NO_API_KEY, json["schema"]]}
