"""What our routes share: who asks, what they ask, and how an error is answered."""

from http import HTTPStatus
from typing import Annotated, Any, Final

from fastapi import Depends, Header, Request, Security
from fastapi.exception_handlers import http_exception_handler
from fastapi.responses import JSONResponse, Response
from fastapi.security import APIKeyHeader
from starlette.exceptions import HTTPException
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse

from inducekv_vllm.errors import CapacityError, LoadTimeout, TooManyChanges, UnknownBundle, UnknownFact, VersionConflict
from inducekv_vllm.vllm_seams.config import ADMIN_HEADER
from inducekv_vllm.vllm_seams.logs import logger_of

from .access import Access, ChangeRefused, who
from .registry import BundleRegistry
from .state import StateError

logger = logger_of(__name__)

OUR_ROUTES: Final = (
    *("/v1/memory_", "/v1/models/"),
    *("/v1/load_memory_bundle", "/v1/rollback_memory_bundle", "/v1/unload_memory_bundle"),
    "/v1/forget_memory_versions",
)
TAG: Final = "Memory"  # of our routes in the schema
ADMIN_SCHEME: Final = "AdminKey"
KEY: Final = "The server's admin key (`INDUCEKV_ADMIN_KEY` or `--memory-admin-key`)."
AdminKey = Annotated[
    str | None,
    Security(APIKeyHeader(name=ADMIN_HEADER, scheme_name=ADMIN_SCHEME, auto_error=False, description=KEY)),
]
KeyToSeeMore = Annotated[str | None, Header(alias=ADMIN_HEADER, description=KEY)]


def access_of(request: Request) -> Access:
    access: Access = request.app.state.inducekv_access
    return access


def registry_of(request: Request) -> BundleRegistry:
    registry: BundleRegistry = request.app.state.inducekv_registry
    return registry


async def admin(request: Request, key: AdminKey) -> str:
    """Who asks for a change, for the log. Raises ChangeRefused: not the admin."""
    host = request.client.host if request.client is not None else None
    try:
        access_of(request).require_admin(key)
    except ChangeRefused as error:
        where = host or "a local socket"
        logger.warning("%s from %s refused: %s", request.url.path, where, error)
        await registry_of(request).journal.note_stranger(request.url.path, where, str(error))
        raise
    return who(host)


Admin = Annotated[str, Depends(admin)]

STATUS_OF: Final[dict[type, HTTPStatus]] = {  # and of their subclasses
    UnknownBundle: HTTPStatus.NOT_FOUND,
    UnknownFact: HTTPStatus.NOT_FOUND,
    TooManyChanges: HTTPStatus.TOO_MANY_REQUESTS,
    VersionConflict: HTTPStatus.CONFLICT,
    CapacityError: HTTPStatus.INSUFFICIENT_STORAGE,
    LoadTimeout: HTTPStatus.GATEWAY_TIMEOUT,
    StateError: HTTPStatus.SERVICE_UNAVAILABLE,
}

KINDS: Final = {HTTPStatus.BAD_REQUEST: "BadRequestError", HTTPStatus.NOT_FOUND: "NotFoundError"}  # as vLLM has them


def error_response(reason: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> ErrorResponse:
    """An error in vLLM's format."""
    return ErrorResponse(error=ErrorInfo(message=reason, type=KINDS.get(status, status.phrase), code=status.value))


def error_answer(reason: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> JSONResponse:
    return JSONResponse(error_response(reason, status).model_dump(), status_code=status.value)


def status_of(error: Exception) -> HTTPStatus:
    """That of its class, or of the nearest base class that has one."""
    if isinstance(error, ChangeRefused):
        return error.status
    return next((STATUS_OF[kind] for kind in type(error).__mro__ if kind in STATUS_OF), HTTPStatus.BAD_REQUEST)


async def refused(request: Request, error: Exception) -> JSONResponse:
    """The answer to a request that one of our errors ends."""
    return error_answer(f"{error!s:.2000}", status_of(error))


async def unrouted(request: Request, error: Exception) -> Response:
    """The answer to what FastAPI refuses by itself: vLLM's format on our routes, as it was elsewhere."""
    assert isinstance(error, HTTPException)
    if not request.url.path.startswith(OUR_ROUTES):
        return await http_exception_handler(request, error)
    answer = error_answer(error.detail, HTTPStatus(error.status_code))
    answer.headers.update(error.headers or {})
    return answer


def errors(**reasons: str) -> dict[int | str, dict[str, Any]]:
    """Error statuses for the OpenAPI schema, by the names of `http.HTTPStatus`."""
    return {HTTPStatus[name].value: {"model": ErrorResponse, "description": why} for name, why in reasons.items()}


CHANGE_ERRORS = errors(
    BAD_REQUEST="The body is invalid, or the change is refused; the message says why.",
    UNAUTHORIZED="The admin key is missing or wrong.",
    FORBIDDEN="The server takes no changes: it was started without an admin key, or without a folder to load from.",
    REQUEST_ENTITY_TOO_LARGE="The body has more bytes than the server takes: 64 MiB.",
    CONFLICT="The name does not stand for `expected_digest`; the message has the digest found.",
    TOO_MANY_REQUESTS="Too many changes are waiting; try again later.",
    SERVICE_UNAVAILABLE="The server is shutting down.",
    INSUFFICIENT_STORAGE="The pool or the disk has no room, or there are 100,000 names; nothing has changed.",
)
NO_PATH = errors(NOT_FOUND="The name is part of no path: it has a line break.")
NOT_LOADED = errors(NOT_FOUND="No bundle of this name is loaded.")
TOO_LONG = errors(GATEWAY_TIMEOUT="It took longer than 10 minutes; nothing has changed.")
