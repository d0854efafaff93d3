"""The routes that change nothing: what is loaded, what a request was answered with, and what serves here."""

import asyncio
from http import HTTPStatus
from typing import Annotated, Any, Final

import vllm
from fastapi import APIRouter, Path, Query, Request
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.engine.protocol import ModelCard, ModelList, ModelPermission

import inducekv_vllm
from inducekv_vllm.backbone.judged import Judged
from inducekv_vllm.bundle import FORMAT_VERSION
from inducekv_vllm.frontend.owner import OWNER

from .registry import PAGE
from .requests import NOT_LOADED, TAG, KeyToSeeMore, access_of, error_answer, errors, registry_of
from .schemas import JudgeState, MemoryBundleCard, MemoryBundleList, MemoryServer, MemoryTrace

router = APIRouter(tags=[TAG])
MODELS: Final = "/v1/models"
After = Annotated[str, Query(description="The last name that was listed before.")]
Limit = Annotated[int, Query(ge=1, le=PAGE, description="At most so many are listed.")]
Name = Annotated[str, Path(description="The name of a bundle.", examples=["guild"])]


class ModelPage(ModelList):
    """Response of GET /v1/models."""

    has_more: bool


@router.get(
    "/v1/memory_bundles",
    summary="List the bundles",
    responses=errors(BAD_REQUEST="`limit` is no number from 1 to 1000."),
)
async def memory_bundles(
    request: Request, key: KeyToSeeMore = None, after: After = "", limit: Limit = PAGE
) -> MemoryBundleList:
    """Names with their bundles and versions, and the versions that still drain. The admin also sees paths."""
    shown = registry_of(request).shown
    return await asyncio.to_thread(shown, is_admin=access_of(request).is_admin(key), after=after, limit=limit)


@router.get("/v1/memory_bundles/{name:path}", summary="Show one bundle", responses=NOT_LOADED)
async def memory_bundle(name: Name, request: Request, key: KeyToSeeMore = None) -> MemoryBundleCard:
    """The bundle behind a name. The admin also sees paths."""
    return await asyncio.to_thread(registry_of(request).card, name, is_admin=access_of(request).is_admin(key))


@router.get(
    "/v1/memory_trace/{response_id:path}",
    summary="Show what a response was answered with",
    response_model=MemoryTrace,
    responses=errors(
        NOT_FOUND="It was not traced, is not finished, is too old, or belongs to another API key or cache salt."
    ),
)
async def memory_trace(
    response_id: Annotated[str, Path(description="The `id` of the response.", examples=["chatcmpl-8f0c"])],
    request: Request,
    cache_salt: Annotated[str | None, Query(description="The `cache_salt` of the request, if it had one.")] = None,
) -> Any:
    """The gate's decision and the entries of a recent response, also of a streamed one.

    The request must have had `"vllm_xargs": {"inducekv_trace": 1}`. A trace belongs to the API key that asked, and if
    the request had a `cache_salt`, to that salt.
    """
    if not (traces := await registry_of(request).journal.traces(OWNER.get(), cache_salt, response_id)):
        return error_answer(
            f"no memory trace of response {response_id!r:.200}: it was not traced, is not finished, is too old, or "
            "belongs to another API key or cache salt",
            HTTPStatus.NOT_FOUND,
        )
    return MemoryTrace(id=response_id, traces=traces)


@router.get("/v1/memory_server", summary="Show the versions of this server")
async def memory_server(request: Request) -> MemoryServer:
    """The versions of InduceKV and vLLM, which bundles they can load, and what the judge of facts is worth."""
    return MemoryServer(
        version=inducekv_vllm.__version__,
        vllm_version=vllm.__version__,
        bundle_formats=[FORMAT_VERSION],
        judge=_judge(request.app.state.inducekv_engine.facts.judged),
    )


def _judge(judged: Judged | None) -> JudgeState | None:
    if judged is None or not judged.is_asked:
        return None
    if (ability := judged.ability) is None:
        return JudgeState(is_able=None, threshold=None, auroc=None, found=None, passed=None)
    found, passed = judged.prices
    return JudgeState(
        is_able=judged.may_judge, threshold=judged.threshold, auroc=ability.auroc, found=found, passed=passed
    )


@router.get(MODELS, summary="List the models", responses=errors(BAD_REQUEST="`limit` is no number from 1 to 1000."))
async def models(request: Request, after: After = "", limit: Limit = PAGE) -> ModelPage:
    """OpenAI's list, in place of vLLM's: the served model and its adapters, then bundles in alphabetical order."""
    served: OpenAIServingModels = request.app.state.openai_serving_models
    first = (await served.show_available_models()).data
    ids = [card.id for card in first]
    if after:
        first = first[ids.index(after) + 1 :] if after in ids else []
    bundles = await asyncio.to_thread(registry_of(request).state.page, "" if after in ids else after, limit + 1)
    cards = [*first, *(_card(served, name, digest) for name, digest in bundles)]
    return ModelPage(data=cards[:limit], has_more=len(cards) > limit)


def _card(served: OpenAIServingModels, name: str, digest: str) -> ModelCard:
    return ModelCard(id=name, root=digest, parent=served.base_model_paths[0].name, permission=[ModelPermission()])


@router.get(
    "/v1/models/{model:path}",
    summary="Show one model",
    response_model=ModelCard,
    responses=errors(NOT_FOUND="No model, adapter or bundle of this name is served."),
)
async def model_card(
    model: Annotated[str, Path(description="The name of a model, an adapter or a bundle.", examples=["guild"])],
    request: Request,
) -> Any:
    """OpenAI's route for one model, which vLLM does not have: what `GET /v1/models` lists under this name.

    `NAME@DIGEST` is the bundle NAME while it stands for that version.
    """
    served: OpenAIServingModels = request.app.state.openai_serving_models
    for card in (await served.show_available_models()).data:
        if card.id == model:
            return card
    if (found := served.lora_requests.get(model)) is not None:
        return _card(served, model, found.lora_path)
    return error_answer(f"The model `{model:.200}` does not exist.", HTTPStatus.NOT_FOUND)
