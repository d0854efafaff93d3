"""The endpoint plugin: routes for bundles, and the engine client with memory under every OpenAI route."""

import asyncio
import atexit
import os
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from starlette.datastructures import State
from starlette.exceptions import HTTPException
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.utils.api_utils import validate_json_request
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.tasks import SupportedTask

from inducekv_vllm.backbone.fingerprint import backbone_fingerprint
from inducekv_vllm.errors import ConfigError, InduceKVError, UnsupportedModel
from inducekv_vllm.frontend.memory_engine import MemoryEngine, MemoryRequest
from inducekv_vllm.frontend.request import memory_names
from inducekv_vllm.frontend.stopping import EngineStop
from inducekv_vllm.vllm_seams.config import ADMIN_KEY_VARIABLE, RUN_VARIABLE, WORKER_CLS, InduceKVConfig
from inducekv_vllm.vllm_seams.logs import logger_of
from inducekv_vllm.vllm_seams.patches import patch, patch_some
from inducekv_vllm.vllm_seams.refused_start import end_start
from inducekv_vllm.vllm_seams.requirements import SLEEP, cannot_serve

from . import inspection, page, teaching
from .access import Access, OwnerMiddleware
from .bodies import MemoryRoute
from .engines import Engines
from .metrics import POOL_BYTES
from .pool import PoolSize
from .registry import BundleRegistry
from .requests import (
    CHANGE_ERRORS,
    NOT_LOADED,
    TAG,
    TOO_LONG,
    Admin,
    access_of,
    error_response,
    refused,
    registry_of,
    status_of,
    unrouted,
)
from .schemas import (
    ForgetMemoryVersionsRequest,
    ForgottenVersions,
    LoadMemoryBundleRequest,
    MemoryBundleCard,
    RollbackMemoryBundleRequest,
    UnloadMemoryBundleRequest,
    UnloadMemoryBundleResponse,
)
from .state import ServerState
from .versions import PIN, TurnMiddleware

logger = logger_of(__name__)
router = APIRouter(tags=[TAG], route_class=MemoryRoute)


class InduceKVEndpoint:
    """An `EndpointPlugin` of vLLM (`vllm.plugins.endpoint_plugins.interface`)."""

    name = "inducekv"
    required_tasks: tuple[SupportedTask, ...] | None = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        routes = app.router.routes
        routes[:] = [route for route in routes if getattr(route, "path", None) != inspection.MODELS]
        app.include_router(router)
        app.include_router(teaching.router)  # before a route that takes any name
        app.include_router(inspection.router)
        app.include_router(page.router)
        app.add_middleware(OwnerMiddleware)
        app.add_middleware(TurnMiddleware)
        app.add_exception_handler(InduceKVError, refused)
        app.add_exception_handler(HTTPException, unrouted)

    async def init_state(self, engine_client: EngineClient | None, state: State, args: Namespace) -> None:
        """Check the engine, load the configured bundles and install the engine client with memory.

        Raises:
            InduceKVError: the server cannot serve memory. The server then does not start.
        """
        assert engine_client is not None, "required_tasks keeps this plugin off servers without an engine"
        try:
            await self._init(engine_client, state)
        except InduceKVError as error:
            end_start(error)
            raise

    async def _init(self, engine_client: EngineClient, state: State) -> None:
        config = InduceKVConfig.from_vllm(engine_client.vllm_config) or InduceKVConfig()
        stop = EngineStop(engine_client)
        stop.install()
        pool = await check_server(engine_client)
        model = engine_client.model_config
        cache = engine_client.vllm_config.load_config.download_dir
        backbone = await asyncio.to_thread(backbone_fingerprint, model.model, model.revision, cache)
        models: OpenAIServingModels = state.openai_serving_models
        access = Access(config.roots, os.environ.get(ADMIN_KEY_VARIABLE))
        parallel = engine_client.vllm_config.parallel_config
        process, processes = parallel._api_process_rank, parallel._api_process_count
        run = run_folder(processes)
        memory_state = await asyncio.to_thread(
            lambda: ServerState(config.state or run / "state", keeps_bundles=config.state is not None, process=process)
        )
        registry = BundleRegistry(Engines(engine_client, pool), models, backbone, memory_state, config, stop)
        await registry.start(run.name, access.key_name)
        engine = MemoryEngine(engine_client, registry, config, stop, registry.journal)
        patch(engine_client, "generate", lambda _: engine.generate)
        guard_adapters(models, registry)
        refuse_sleep(engine_client)
        refuse_beam_search(state, engine)
        bring_bundles(state, models, registry, config)
        state.inducekv_registry, state.inducekv_engine, state.inducekv_access = registry, engine, access


def run_folder(processes: int) -> Path:
    """A folder for this run of the server, which all of its API processes know.

    Raises:
        ConfigError: there are several, and none of them was started by `inducekv-serve`.
    """
    if (folder := os.environ.get(RUN_VARIABLE)) is not None:
        return Path(folder)
    if processes > 1:
        raise ConfigError(f"--api-server-count {processes} needs inducekv-serve, which makes a folder for them")
    folder = tempfile.mkdtemp(prefix="inducekv-run-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


async def check_server(client: EngineClient) -> PoolSize:
    """The size of a rank's pool, which is exported. Raises UnsupportedModel: bundles cannot be managed here."""
    try:
        stats, *_ = await client.collective_rpc("inducekv_stats")
    except Exception as error:
        raise UnsupportedModel(f"the engine's workers do not support memory: add --worker-cls {WORKER_CLS}") from error
    POOL_BYTES.set(stats["pool_bytes"])
    return PoolSize.of(stats)


def guard_adapters(models: OpenAIServingModels, registry: BundleRegistry) -> None:
    """Make vLLM's LoRA routes refuse the names of bundles."""

    def refusal(lora_name: str) -> str | None:
        if PIN.fullmatch(lora_name):
            return f"{lora_name!r} cannot name an adapter: names that end so are pinned to a version of a bundle"
        if lora_name in registry:
            return f"{lora_name!r} is a memory bundle; use /v1/load_memory_bundle and /v1/unload_memory_bundle"
        return None

    def guarded(change: Callable[..., Any]) -> Callable[..., Any]:
        async def guarded_change(request: Any, *args: Any, **kwargs: Any) -> Any:
            if reason := refusal(request.lora_name):
                return error_response(reason)
            return await change(request, *args, **kwargs)

        return guarded_change

    patch(models, "load_lora_adapter", guarded)
    patch(models, "unload_lora_adapter", guarded)


def refuse_sleep(client: EngineClient) -> None:
    """Make vLLM's routes for developers refuse what the flag for it is refused for at start."""

    async def refused(*args: Any, **kwargs: Any) -> None:
        raise UnsupportedModel(cannot_serve(SLEEP))

    for name in ("sleep", "release_kv_cache_memory"):
        patch(client, name, lambda _: refused)


def refuse_beam_search(state: State, engine: MemoryEngine) -> None:
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

    patch_some(vars(state)["_state"].values(), "beam_search", guarded, of="routes")


def bring_bundles(state: State, models: OpenAIServingModels, registry: BundleRegistry, config: InduceKVConfig) -> None:
    """Make every OpenAI route load the bundles of a request, where vLLM looks whether its model is served."""

    def guarded(check: Callable[..., Any]) -> Callable[..., Any]:
        async def guarded_check(request: Any) -> Any:
            model = request.model
            if model and not models.is_base_model(model) and not dict.__contains__(models.lora_requests, model):
                try:
                    await registry.bring(*memory_names(model, getattr(request, "vllm_xargs", None), config))
                except InduceKVError as error:  # to some of vLLM's routes it would be a bad request
                    raise GracefulHTTPError(str(error), status_of(error)) from error
            return await check(request)

        return guarded_check

    patch_some(vars(state)["_state"].values(), "_check_model", guarded, of="routes")


@router.post(
    "/v1/load_memory_bundle",
    summary="Load or replace a bundle",
    dependencies=[Depends(validate_json_request)],
    responses=CHANGE_ERRORS | TOO_LONG,
)
async def load_memory_bundle(body: LoadMemoryBundleRequest, request: Request, admin: Admin) -> MemoryBundleCard:
    """Check a file, make it resident on every rank, then let the name stand for it.

    With `replace`, the name may already stand for another bundle; requests that run end on the version that they began
    with.
    """
    return await registry_of(request).load(
        body.name,
        body.path,
        replace=body.replace,
        expected_digest=body.expected_digest,
        who=admin,
        access=access_of(request),
        pin=body.pin,
    )


@router.post(
    "/v1/rollback_memory_bundle",
    summary="Go back to an earlier version",
    dependencies=[Depends(validate_json_request)],
    responses=CHANGE_ERRORS | NOT_LOADED | TOO_LONG,
)
async def rollback_memory_bundle(body: RollbackMemoryBundleRequest, request: Request, admin: Admin) -> MemoryBundleCard:
    """Let a name stand for an earlier version again; running requests keep the version that they began with."""
    registry = registry_of(request)
    return await registry.rollback(body.name, digest=body.digest, expected_digest=body.expected_digest, who=admin)


@router.post(
    "/v1/forget_memory_versions",
    summary="Forget the versions that are kept",
    dependencies=[Depends(validate_json_request)],
    responses=CHANGE_ERRORS | NOT_LOADED | TOO_LONG,
)
async def forget_memory_versions(
    body: ForgetMemoryVersionsRequest, request: Request, admin: Admin
) -> ForgottenVersions:
    """Drop the versions of a name that are kept for a rollback, with their copies and traces."""
    registry = registry_of(request)
    return await registry.forget(body.name, digest=body.digest, expected_digest=body.expected_digest, who=admin)


@router.post(
    "/v1/unload_memory_bundle",
    summary="Unload a bundle",
    dependencies=[Depends(validate_json_request)],
    responses=CHANGE_ERRORS | NOT_LOADED | TOO_LONG,
)
async def unload_memory_bundle(
    body: UnloadMemoryBundleRequest, request: Request, admin: Admin
) -> UnloadMemoryBundleResponse:
    """Take a bundle's name away, with its versions; running requests keep the bundle until they end."""
    digest = await registry_of(request).unload(body.name, expected_digest=body.expected_digest, who=admin)
    return UnloadMemoryBundleResponse(name=body.name, digest=digest)
