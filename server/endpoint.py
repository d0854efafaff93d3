"""The endpoint plugin: routes for bundles, and the two-pass engine client under every OpenAI route."""

from __future__ import annotations

import asyncio
import traceback
from argparse import Namespace
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import aiohttp
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.datastructures import State
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import validate_json_request
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.tasks import SupportedTask

from inducekv_vllm.config import WORKER_CLS, InduceKVConfig
from inducekv_vllm.engine.stopping import EngineStop
from inducekv_vllm.engine.two_pass import MemoryRequest, TwoPassEngine
from inducekv_vllm.errors import InduceKVError, UnknownBundle, UnsupportedModel
from inducekv_vllm.fingerprint import backbone_fingerprint

from .registry import BundleRegistry
from .schemas import (
    LoadMemoryBundleRequest,
    MemoryBundleCard,
    MemoryBundleList,
    MemoryTrace,
    UnloadMemoryBundleRequest,
    UnloadMemoryBundleResponse,
)

logger = init_logger(__name__)
router = APIRouter(tags=["Memory"])


class InduceKVEndpoint:
    """An `EndpointPlugin` of vLLM (`vllm.plugins.endpoint_plugins.interface`)."""

    name = "inducekv"
    required_tasks: tuple[SupportedTask, ...] | None = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        app.include_router(router)
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
        registry = BundleRegistry(engine_client, models, backbone, config, stop)
        for name, path in config.bundles.items():
            await registry.load(name, path)
        engine = TwoPassEngine(engine_client, registry, config, stop)
        engine_client.generate = engine.generate  # type: ignore[method-assign]
        guard_adapters(models, registry)
        refuse_beam_search(state, engine)
        state.inducekv_registry, state.inducekv_engine = registry, engine


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


def _error(error: InduceKVError | str, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> JSONResponse:
    return JSONResponse(error_response(str(error), status).model_dump(), status_code=status.value)


def _registry(request: Request) -> BundleRegistry:
    registry: BundleRegistry = request.app.state.inducekv_registry
    return registry


@router.post("/v1/load_memory_bundle", dependencies=[Depends(validate_json_request)], response_model=MemoryBundleCard)
async def load_memory_bundle(body: LoadMemoryBundleRequest, request: Request) -> Any:
    """Load a bundle under a name; with `replace`, the name may already stand for another bundle."""
    try:
        return await _registry(request).load(body.name, body.path, replace=body.replace)
    except InduceKVError as error:
        return _error(error)


@router.post(
    "/v1/unload_memory_bundle", dependencies=[Depends(validate_json_request)], response_model=UnloadMemoryBundleResponse
)
async def unload_memory_bundle(body: UnloadMemoryBundleRequest, request: Request) -> Any:
    """Remove a bundle's name; running requests keep the bundle until they end."""
    try:
        return UnloadMemoryBundleResponse(name=body.name, digest=await _registry(request).unload(body.name))
    except UnknownBundle as error:
        return _error(error, HTTPStatus.NOT_FOUND)


@router.get("/v1/memory_bundles")
async def memory_bundles(request: Request) -> MemoryBundleList:
    """List the loaded bundles."""
    return _registry(request).list()


@router.get("/v1/memory_trace/{response_id:path}", response_model=MemoryTrace)
async def memory_trace(response_id: str, request: Request) -> Any:
    """Return the trace of a recent response to a request with `"vllm_xargs": {"inducekv_trace": 1}`."""
    engine: TwoPassEngine = request.app.state.inducekv_engine
    if not (traces := engine.traces.of_response(response_id)):
        return _error(
            f"no memory trace of response {response_id!r}: it was not traced, is not finished, or is too old",
            HTTPStatus.NOT_FOUND,
        )
    return MemoryTrace(id=response_id, traces=traces)
