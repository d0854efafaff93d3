"""The schema of our routes says what they do: checked by what schemathesis makes of it."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import httpx
import hypothesis
import pytest
import schemathesis
from fastapi import FastAPI
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from inducekv_vllm.errors import BundleError, CapacityError, InduceKVError, LoadTimeout, TooManyChanges
from inducekv_vllm.host.config import ADMIN_HEADER
from server.endpoint import InduceKVEndpoint
from server.openapi import API_KEY_SCHEME, TAG
from server.requests import ADMIN_SCHEME, refused
from tests.server.http import Bundles
from tests.server.launch import ADMIN_KEY

EXAMPLES = 25  # of each route and kind of client
CHANGES = [f"/v1/{change}" for change in ("load_memory_bundle", "rollback_memory_bundle", "unload_memory_bundle")]
CHANGES.append("/v1/forget_memory_versions")
WITH_INPUT = {*CHANGES, "/v1/memory_bundles/{name}", "/v1/memory_trace/{response_id}"}
ROUTES = {*WITH_INPUT, "/v1/memory_bundles", "/v1/memory_server", "/v1/models/{model}"}


def schema_of(api_key: list[str] | None = None) -> dict[str, Any]:
    """As a server that was started with this --api-key makes it."""
    app = FastAPI()
    app.state.args = Namespace(api_key=api_key)
    InduceKVEndpoint().attach_router(app)
    assert app.openapi() == app.openapi()  # corrected once
    return json.loads(json.dumps(app.openapi()))  # type: ignore[no-any-return]


def operations(schema: dict[str, Any]) -> Iterator[tuple[tuple[str, str], dict[str, Any]]]:
    for path, item in schema["paths"].items():
        for method, operation in item.items():
            if TAG in operation.get("tags", ()):
                yield (method, path), operation


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (CapacityError("full"), 507),
        (TooManyChanges("busy"), 429),
        (LoadTimeout("late"), 504),
        (BundleError("bad"), 400),
    ],
)
async def test_what_lacks_room_is_no_bad_request(error: InduceKVError, status: int) -> None:
    request: Any = None
    assert (await refused(request, error)).status_code == status


@pytest.mark.parametrize("api_key", [None, ["secret"]])
def test_the_schema_says_which_keys_a_route_takes(api_key: list[str] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    schema = schema_of(api_key)
    schemes = schema["components"]["securitySchemes"]
    assert schemes[ADMIN_SCHEME] == {
        "type": "apiKey",
        "in": "header",
        "name": ADMIN_HEADER,
        "description": schemes[ADMIN_SCHEME]["description"],
    }
    assert (API_KEY_SCHEME in schemes) == (api_key is not None)
    everyone: dict[str, list[str]] = {API_KEY_SCHEME: []} if api_key else {}
    the_admin = {**everyone, ADMIN_SCHEME: []}
    for (method, path), operation in operations(schema):
        if method == "post":
            assert operation["security"] == [the_admin]
        elif path.startswith("/v1/memory_bundles"):
            assert operation["security"] == [everyone, the_admin]
        else:
            assert operation["security"] == [everyone]
        assert ("401" in operation["responses"]) == (method == "post" or api_key is not None)


def cases(operation: Any, mode: GenerationMode) -> Any:
    """Requests that fit the schema, or that do not; None if every request fits."""
    if mode is GenerationMode.NEGATIVE and not (operation.body or operation.query):
        return None
    return operation.as_strategy(generation_mode=mode)


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("key", [ADMIN_KEY, None], ids=["admin", "stranger"])
def test_no_request_gets_a_5xx_or_an_undocumented_status(
    server: str, bundles: Bundles, key: str | None, mode: GenerationMode
) -> None:
    """What is loaded stays as it is: no path that is made up holds a bundle, and no name that is made up is loaded."""
    before = bundles.list()
    headers = {ADMIN_HEADER: key} if key is not None else {}
    tried: dict[str, set[int]] = {}
    for result in schemathesis.openapi.from_url(f"{server}/openapi.json").include(tag=TAG).get_all_operations():
        operation = result.ok()
        if (strategy := cases(operation, mode)) is None:
            continue

        @hypothesis.settings(
            max_examples=EXAMPLES,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(case=strategy)
        def answers_as_documented(case: Any, statuses: set[int]) -> None:
            response = case.call(headers=headers)
            statuses.add(response.status_code)
            # A body may fit the schema and still be refused: there is no such file, or no such bundle.
            case.validate_response(response, headers=headers, excluded_checks=[positive_data_acceptance])

        answers_as_documented(statuses=tried.setdefault(operation.path, set()))
    assert set(tried) == (ROUTES if mode is GenerationMode.POSITIVE else WITH_INPUT)
    for path in CHANGES:
        assert tried[path] <= ({400, 401} if key is None else {400, 401, 404, 409})
    assert bundles.list() == before
    assert httpx.get(f"{server}/health").status_code == 200


def test_what_fastapi_refuses_has_our_form_on_our_routes_alone(server: str) -> None:
    for method, path, status in (
        ("GET", "/v1/models/%0A", 404),
        ("DELETE", "/v1/memory_server", 405),
        ("GET", "/v1/load_memory_bundle", 405),
    ):
        answer = httpx.request(method, f"{server}{path}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, status)
        assert ("allow" in answer.headers) == (status == 405)
    assert "detail" in httpx.get(f"{server}/v1/nothing").json()
