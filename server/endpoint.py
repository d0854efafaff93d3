"""The endpoint plugin: routes for bundles, and the two-pass engine client under every OpenAI route."""

from __future__ import annotations

import asyncio
import os
import traceback
from argparse import Namespace
from collections.abc import Callable
from http import HTTPStatus
from typing import Annotated, Any

import aiohttp
from fastapi import APIRouter, Depends, FastAPI, Request, Security
from fastapi.responses import JSONResponse
from fastapi.security import APIKeyHeader
from starlette.datastructures import State
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import validate_json_request
from vllm.exceptions import VLLMValidationError
from vllm.tasks import SupportedTask

from inducekv_vllm.config import ADMIN_HEADER, ADMIN_KEY_VARIABLE, WORKER_CLS, InduceKVConfig
from inducekv_vllm.engine.owner import OWNER
from inducekv_vllm.engine.stopping import EngineStop
from inducekv_vllm.engine.two_pass import MemoryRequest, TwoPassEngine
from inducekv_vllm.errors import (
    InduceKVError,
    LoadTimeout,
    TooManyChanges,
    UnknownBundle,
    UnsupportedModel,
    VersionConflict,
)
from inducekv_vllm.fingerprint import backbone_fingerprint
from inducekv_vllm.logs import logger_of

from .access import Access, ChangeRefused, OwnerMiddleware, SagemakerMiddleware, who
from .audit import AuditLog
from .registry import BundleRegistry
from .schemas import (
    ForgetMemoryVersionsRequest,
    ForgottenVersions,
    LoadMemoryBundleRequest,
    MemoryBundleCard,
    MemoryBundleList,
    MemoryTrace,
    RollbackMemoryBundleRequest,
    UnloadMemoryBundleRequest,
    UnloadMemoryBundleResponse,
)

logger = logger_of(__name__)
router = APIRouter(tags=["Memory"])


class InduceKVEndpoint:
    """An `EndpointPlugin` of vLLM (`vllm.plugins.endpoint_plugins.interface`)."""

    name = "inducekv"
    required_tasks: tuple[SupportedTask, ...] | None = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        app.include_router(router)
        app.add_middleware(OwnerMiddleware)
        app.add_middleware(SagemakerMiddleware)
        app.add_exception_handler(InduceKVError, refused)
        for kind in (aiohttp.ClientError, OSError, RuntimeError):
            app.add_exception_handler(kind, unreadable_media)

    async def init_state(self, engine_client: EngineClient | None, state: State, args: Namespace) -> None:
        """Check the engine, load the configured bundles and install the two-pass client.

        Raises:
            InduceKVError: the server cannot serve memory. The server then does not start.
        """
        assert engine_client is not None, "required_tasks keeps this plugin off servers without an engine"
        config = InduceKVConfig.from_vllm(engine_client.vllm_config) or InduceKVConfig()
        await check_server(engine_client)
        model = engine_client.model_config
        backbone = await asyncio.to_thread(backbone_fingerprint, model.model, model.revision)
        models: OpenAIServingModels = state.openai_serving_models
        stop = EngineStop(engine_client)
        stop.install()
        audit = AuditLog.of(config, os.environ.get(ADMIN_KEY_VARIABLE))
        registry = BundleRegistry(engine_client, models, backbone, config, stop, audit)
        await registry.start()
        engine = TwoPassEngine(engine_client, registry, config, stop, audit.answer if audit.records_answers else None)
        registry.on_gone = engine.forget
        engine_client.generate = engine.generate  # type: ignore[method-assign]
        guard_adapters(models, registry)
        refuse_beam_search(state, engine)
        state.inducekv_registry, state.inducekv_engine, state.inducekv_audit = registry, engine, audit
        state.inducekv_access = Access.from_environment(config.roots, os.environ)


async def check_server(client: EngineClient) -> None:
    """Raise UnsupportedModel if this API server cannot manage the bundles of its engine."""
    parallel = client.vllm_config.parallel_config
    if parallel._api_process_count > 1:
        raise UnsupportedModel(
            f"memory bundles need one API server process, found --api-server-count {parallel._api_process_count}: "
            "each would load and release bundles without the knowledge of the others"
        )
    for size, flag in (
        (parallel.data_parallel_size, "--data-parallel-size"),
        (parallel.pipeline_parallel_size, "--pipeline-parallel-size"),
    ):
        if size > 1:
            raise UnsupportedModel(f"memory bundles cannot be served with {flag} {size}")
    multimodal = client.model_config.multimodal_config
    if multimodal is not None and multimodal.mm_processor_cache_type == "shm":
        raise UnsupportedModel(
            "memory bundles cannot be served with --mm-processor-cache-type shm: its entries are handed over once, "
            "and a request with memory runs twice"
        )
    try:
        await client.collective_rpc("inducekv_stats")
    except Exception as error:
        raise UnsupportedModel(f"the engine's workers do not support memory: add --worker-cls {WORKER_CLS}") from error


def guard_adapters(models: OpenAIServingModels, registry: BundleRegistry) -> None:
    """Make vLLM's LoRA routes refuse the names of bundles and the adapters that bundles need."""

    def refusal(lora_name: str) -> str | None:
        if lora_name in registry:
            return f"{lora_name!r} is a memory bundle; use /v1/load_memory_bundle and /v1/unload_memory_bundle"
        if users := registry.users_of_adapter(lora_name):
            return f"the memory bundles {', '.join(users)} need the adapter {lora_name!r} as it is; unload them first"
        return None

    def guarded(change: Callable[..., Any]) -> Callable[..., Any]:
        async def guarded_change(request: Any, *args: Any, **kwargs: Any) -> Any:
            if reason := refusal(request.lora_name):
                return error_response(reason)
            return await change(request, *args, **kwargs)

        return guarded_change

    models.load_lora_adapter = guarded(models.load_lora_adapter)  # type: ignore[method-assign]
    models.unload_lora_adapter = guarded(models.unload_lora_adapter)  # type: ignore[method-assign]


def refuse_beam_search(state: State, engine: TwoPassEngine) -> None:
    """Make beam search refuse memory: it sends a new prompt for every token, each with a different query key."""

    def guarded(search: Callable[..., Any]) -> Callable[..., Any]:
        def guarded_search(*args: Any, lora_request: Any = None, **kwargs: Any) -> Any:
            if isinstance(lora_request, MemoryRequest):
                engine.invalidate_mm_cache(kwargs.get("prompt"))
                raise VLLMValidationError(
                    "beam search cannot be used with a memory bundle", parameter="use_beam_search"
                )
            return search(*args, lora_request=lora_request, **kwargs)

        return guarded_search

    for serving in vars(state)["_state"].values():
        if isinstance(serving, BeamSearchOnlineMixin):
            serving.beam_search = guarded(serving.beam_search)  # type: ignore[method-assign]


async def unreadable_media(request: Request, error: Exception) -> JSONResponse:
    """Answer 400 for an image that cannot be fetched, for which vLLM answers 500; pass other errors on to vLLM."""
    frames = traceback.walk_tb(error.__traceback__)
    if not any(frame.f_globals.get("__name__", "").startswith("vllm.multimodal.media") for frame, _ in frames):
        raise error
    return _error(f"cannot load the image: {error}")


def error_response(reason: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> ErrorResponse:
    """An error in vLLM's format."""
    kind = "NotFoundError" if status == HTTPStatus.NOT_FOUND else "BadRequestError"
    return ErrorResponse(error=ErrorInfo(message=reason, type=kind, code=status.value))


def _error(reason: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> JSONResponse:
    return JSONResponse(error_response(reason, status).model_dump(), status_code=status.value)


STATUS_OF: dict[type[Exception], HTTPStatus] = {
    UnknownBundle: HTTPStatus.NOT_FOUND,
    TooManyChanges: HTTPStatus.TOO_MANY_REQUESTS,
    VersionConflict: HTTPStatus.CONFLICT,
    LoadTimeout: HTTPStatus.GATEWAY_TIMEOUT,
}


async def refused(request: Request, error: Exception) -> JSONResponse:
    """The answer to a request that one of our errors ends."""
    status = error.status if isinstance(error, ChangeRefused) else STATUS_OF.get(type(error), HTTPStatus.BAD_REQUEST)
    return _error(f"{error!s:.2000}", status)


def _errors(*statuses: HTTPStatus) -> dict[int | str, dict[str, Any]]:
    """For the OpenAPI schema."""
    return {status.value: {"model": ErrorResponse} for status in statuses}


CHANGE_ERRORS = _errors(
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.UNAUTHORIZED,
    HTTPStatus.FORBIDDEN,
    HTTPStatus.CONFLICT,
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.SERVICE_UNAVAILABLE,
)
AdminKey = Annotated[
    str | None,
    Security(APIKeyHeader(name=ADMIN_HEADER, auto_error=False, description="the server's INDUCEKV_ADMIN_KEY")),
]


def _access(request: Request) -> Access:
    access: Access = request.app.state.inducekv_access
    return access


def _registry(request: Request) -> BundleRegistry:
    registry: BundleRegistry = request.app.state.inducekv_registry
    return registry


def _host(request: Request) -> str | None:
    return request.client.host if request.client is not None else None


async def admin(request: Request, key: AdminKey) -> str:
    """Who asks for a change, for the log. Raises ChangeRefused: not the admin."""
    try:
        _access(request).require_admin(key)
    except ChangeRefused as error:
        logger.warning("%s from %s refused: %s", request.url.path, _host(request) or "a local socket", error)
        audit: AuditLog = request.app.state.inducekv_audit
        audit.refusal(request.url.path, None, f"unknown at {_host(request) or 'a local socket'}", str(error))
        raise
    return who(_host(request))


Admin = Annotated[str, Depends(admin)]


@router.post(
    "/v1/load_memory_bundle",
    dependencies=[Depends(validate_json_request)],
    responses=CHANGE_ERRORS | _errors(HTTPStatus.GATEWAY_TIMEOUT),
)
async def load_memory_bundle(body: LoadMemoryBundleRequest, request: Request, admin: Admin) -> MemoryBundleCard:
    """Load a bundle under a name; with `replace`, the name may already stand for another bundle."""
    registry = _registry(request)
    return await registry.load(
        body.name,
        body.path,
        replace=body.replace,
        expected_digest=body.expected_digest,
        who=admin,
        access=_access(request),
    )


@router.post(
    "/v1/rollback_memory_bundle",
    dependencies=[Depends(validate_json_request)],
    responses=CHANGE_ERRORS | _errors(HTTPStatus.NOT_FOUND, HTTPStatus.GATEWAY_TIMEOUT),
)
async def rollback_memory_bundle(body: RollbackMemoryBundleRequest, request: Request, admin: Admin) -> MemoryBundleCard:
    """Let a name stand for an earlier version again; running requests keep the version that they began with."""
    registry = _registry(request)
    return await registry.rollback(body.name, digest=body.digest, expected_digest=body.expected_digest, who=admin)


@router.post(
    "/v1/forget_memory_versions",
    dependencies=[Depends(validate_json_request)],
    responses=CHANGE_ERRORS | _errors(HTTPStatus.NOT_FOUND, HTTPStatus.GATEWAY_TIMEOUT),
)
async def forget_memory_versions(
    body: ForgetMemoryVersionsRequest, request: Request, admin: Admin
) -> ForgottenVersions:
    """Drop the versions of a name that are kept for a rollback, with their copies, traces and cached query keys."""
    registry = _registry(request)
    return await registry.forget(body.name, digest=body.digest, expected_digest=body.expected_digest, who=admin)


@router.post(
    "/v1/unload_memory_bundle",
    dependencies=[Depends(validate_json_request)],
    responses=CHANGE_ERRORS | _errors(HTTPStatus.NOT_FOUND),
)
async def unload_memory_bundle(
    body: UnloadMemoryBundleRequest, request: Request, admin: Admin
) -> UnloadMemoryBundleResponse:
    """Remove a bundle's name; running requests keep the bundle until they end."""
    digest = await _registry(request).unload(body.name, expected_digest=body.expected_digest, who=admin)
    return UnloadMemoryBundleResponse(name=body.name, digest=digest)


@router.get("/v1/memory_bundles")
async def memory_bundles(request: Request, key: AdminKey = None) -> MemoryBundleList:
    """List the loaded bundles; the admin also sees paths."""
    return _registry(request).list(is_admin=_access(request).is_admin(key))


@router.get("/v1/memory_trace/{response_id:path}", response_model=MemoryTrace, responses=_errors(HTTPStatus.NOT_FOUND))
async def memory_trace(response_id: str, request: Request, cache_salt: str | None = None) -> Any:
    """Return the trace of a recent response to a request with `"vllm_xargs": {"inducekv_trace": 1}`.

    It belongs to the API key that asked, and if the request had a `cache_salt`, to that salt.
    """
    engine: TwoPassEngine = request.app.state.inducekv_engine
    if not (traces := engine.traces.of_response(OWNER.get(), cache_salt, response_id)):
        return _error(
            f"no memory trace of response {response_id!r:.200}: it was not traced, is not finished, is too old, or "
            "belongs to another API key or cache salt",
            HTTPStatus.NOT_FOUND,
        )
    return MemoryTrace(id=response_id, traces=traces)
