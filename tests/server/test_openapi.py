"""No route of ours answers 5xx, or with a status that its schema lacks: checked by what schemathesis makes of it."""

from typing import Any

import httpx
import hypothesis
import pytest
import schemathesis
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from inducekv_vllm.errors import BundleError, CapacityError, InduceKVError, LoadTimeout, TooManyChanges, UnknownFact
from inducekv_vllm.vllm_seams.config import ADMIN_HEADER
from server.requests import TAG, refused
from tests.server.http import Bundles
from tests.server.launch import ADMIN_KEY

# Of each route and kind of client.
EXAMPLES = (3, pytest.param(50, marks=pytest.mark.slow))
CHANGES = [f"/v1/{change}" for change in ("load_memory_bundle", "rollback_memory_bundle", "unload_memory_bundle")]
CHANGES.append("/v1/forget_memory_versions")
FACTS = ["/v1/memory_bundles/{name}/examples", "/v1/memory_bundles/{name}/examples/{example_id}"]
LISTS = ["/v1/memory_bundles", "/v1/models"]
WITH_INPUT = {*CHANGES, *FACTS, *LISTS, "/v1/memory_trace/{response_id}"}
ROUTES = {*WITH_INPUT, "/v1/memory_bundles/{name}", "/v1/memory_decisions", "/v1/memory_server", "/v1/models/{model}"}


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (CapacityError("full"), 507),
        (TooManyChanges("busy"), 429),
        (LoadTimeout("late"), 504),
        (BundleError("bad"), 400),
        (type("NoRoomOnOneRank", (CapacityError,), {})("full"), 507),
        (type("UnknownEntry", (UnknownFact,), {})("gone"), 404),
    ],
)
async def test_what_lacks_room_is_no_bad_request(error: InduceKVError, status: int) -> None:
    """A subclass has the status of its base class, unless it has one of its own."""
    request: Any = None
    assert (await refused(request, error)).status_code == status


def cases(operation: Any, mode: GenerationMode) -> Any:
    """Requests that fit the schema, or that do not; None if every request fits."""
    if mode is GenerationMode.NEGATIVE and not (operation.body or operation.query):
        return None
    return operation.as_strategy(generation_mode=mode)


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("key", [ADMIN_KEY, None], ids=["admin", "stranger"])
def test_no_request_gets_a_5xx_or_an_undocumented_status(
    server: str, bundles: Bundles, key: str | None, mode: GenerationMode, examples: int
) -> None:
    """What is loaded stays as it is: no path that is made up holds a bundle, and no name that is made up is loaded.

    The admin's examples make bundles of their own.
    """
    before, names = bundles.list(), bundles.cards().keys()
    headers = {ADMIN_HEADER: key} if key is not None else {}
    tried: dict[str, set[int]] = {}
    for result in schemathesis.openapi.from_url(f"{server}/openapi.json").include(tag=TAG).get_all_operations():
        operation = result.ok()
        if (strategy := cases(operation, mode)) is None:
            continue

        @hypothesis.settings(
            max_examples=examples,
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
    for taught in bundles.cards().keys() - names:
        assert key is not None
        assert bundles.unload(taught).status_code == 200
    bundles.wait_until_drained()
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
