"""What InduceKV takes of vLLM that no version promises, in one list by who leans on it.

On a version that was never tried all of it is looked for at start. Names that modules import say so themselves, so they
are read from their sources. `SEAMS` has the rest: of a callable that is overridden, replaced or called the parameters
that are named or counted on, of a class what is read and set on its instances; `OPEN` ones take attributes of ours.
"""

import ast
import dataclasses
import importlib
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

PACKAGES: Final = ("inducekv_vllm", "server")  # that import vLLM, side by side wherever they are installed
SEAMS: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "inducekv_vllm/scheduler.py": {
        "vllm.v1.core.sched.scheduler:Scheduler.add_request": ("request",),
        "vllm.v1.core.sched.scheduler:Scheduler.schedule": (),
        "vllm.v1.core.sched.scheduler:Scheduler.update_from_output": ("scheduler_output", "model_runner_output"),
        "vllm.v1.core.sched.scheduler:Scheduler._update_after_schedule": ("scheduler_output",),
        "vllm.v1.core.sched.scheduler:Scheduler._preempt_request": ("request", "timestamp", "drop_stale_output"),
        "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.cache_blocks": ("request", "num_computed_tokens"),
        "vllm.v1.core.block_pool:generate_block_hash_extra_keys": (
            *("request", "start_token_idx", "end_token_idx", "start_mm_idx"),
        ),
        "vllm.v1.request:Request.get_skip_reading_prefix_cache": (),
        "vllm.v1.request:Request.update_block_hashes": (),
        "vllm.v1.request:Request": (
            *("_block_hasher", "block_hashes", "drop_stale_output", "events", "is_prefill_chunk", "lora_request"),
            *("mm_features", "next_decode_eligible_step", "num_computed_tokens", "num_output_placeholders"),
            *("num_prompt_tokens", "skip_reading_prefix_cache", "spec_token_ids", "status"),
        ),
        "vllm.v1.core.sched.scheduler:Scheduler": (
            *("enable_kv_cache_events", "encoder_cache_mismatch_reqs", "hash_block_size", "kv_cache_config"),
            *("kv_cache_manager", "requests", "running", "vllm_config"),
        ),
        "vllm.v1.core.sched.output:SchedulerOutput": ("num_scheduled_tokens", "scheduled_new_reqs"),
        "vllm.v1.core.sched.output:NewRequestData": ("mm_features", "req_id"),
        "vllm.v1.outputs:ModelRunnerOutput": ("prompt_logprobs_dict", "req_id_to_index", "sampled_token_ids"),
        "vllm.v1.engine:EngineCoreOutput": ("finished", "kv_transfer_params", "request_id"),
    },
    "inducekv_vllm/workers/memory_worker.py": {
        "vllm.v1.worker.gpu_worker:Worker.load_model": (),
        "vllm.v1.worker.gpu_worker:Worker.initialize_from_config": ("kv_cache_config",),
        "vllm.v1.worker.gpu_worker:Worker.compile_or_warm_up_model": (),
        "vllm.v1.worker.gpu_worker:Worker.execute_model": ("scheduler_output",),
        "vllm.v1.worker.gpu_worker:Worker.sample_tokens": ("grammar_output",),
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner": ("attn_groups",),
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner": ("attn_groups",),
        "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin": ("lora_manager",),
        "vllm.lora.worker_manager:WorkerLoRAManager": ("_adapter_manager",),
    },
    "inducekv_vllm/workers/adapters.py": {
        "vllm.lora.model_manager:LoRAModelManager": ("model", "modules", "packed_modules"),
        "vllm.lora.utils:parse_fine_tuned_lora_name": ("name", "weights_mapper"),
        "vllm.model_executor.models.utils:WeightsMapper.get_rename_mapper": (),
    },
    "inducekv_vllm/workers/requests.py": {
        "vllm.v1.core.sched.output:SchedulerOutput": (
            *("finished_req_ids", "preempted_req_ids", "scheduled_cached_reqs", "scheduled_new_reqs"),
        ),
        "vllm.v1.core.sched.output:CachedRequestData": ("new_block_ids", "req_ids", "resumed_req_ids"),
        "vllm.v1.core.sched.output:NewRequestData": ("block_ids", "prompt_token_ids", "req_id", "sampling_params"),
    },
    "inducekv_vllm/workers/answering.py": {
        "vllm.v1.sample.logits_processor:AdapterLogitsProcessor.apply": ("logits",),
        "vllm.v1.sample.logits_processor:AdapterLogitsProcessor.new_req_logits_processor": ("params",),
        "vllm.v1.worker.gpu.sample.logits_processor.interface:LogitsProcessor.apply": ("logits", "ctx"),
    },
    "inducekv_vllm/workers/cpu_lora.py": {
        "vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU._apply_shrink": ("y", "x", "w_t_all", "scale"),
        "vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU._apply_expand": (
            *("y", "x", "w_t_all", "y_offset", "y_slice_size", "add_inputs"),
        ),
        "vllm.platforms.interface:Platform.get_punica_wrapper": (),
    },
    "inducekv_vllm/vllm_seams/runner.py": {
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.prepare_inputs": ("scheduler_output",),
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_inputs": ("scheduler_output",),
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._determine_batch_execution_and_padding": (),
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner": ("execute_model_state", "input_batch", "requests"),
        "vllm.v1.worker.gpu_model_runner:ExecuteModelState": ("hidden_states",),
        "vllm.v1.worker.gpu_input_batch:InputBatch": ("num_computed_tokens_cpu", "req_ids"),
        "vllm.v1.worker.gpu_input_batch:CachedRequestState": (
            *("generator", "lora_request", "mm_features", "sampling_params"),
        ),
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner": ("execute_model_state", "req_states", "sampler"),
        "vllm.v1.worker.gpu.model_runner:ExecuteModelState": ("hidden_states",),
        "vllm.v1.worker.gpu.states:RequestState": (
            *("apply_staged_writes", "num_computed_tokens", "prompt_len", "req_id_to_index", "total_len"),
        ),
        "vllm.v1.worker.gpu.input_batch:InputBatch": ("num_computed_tokens_np", "num_scheduled_tokens", "req_ids"),
        "vllm.v1.worker.gpu.sample.sampler:Sampler": ("needs_logits_processing", "penalties_state"),
        "vllm.v1.worker.gpu.sample.penalties:PenaltiesState": ("output_bin_counts", "use_penalty"),
    },
    "inducekv_vllm/vllm_seams/graphs.py": {
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._capture_cudagraphs": (
            *("batch_descriptors", "cudagraph_runtime_mode"),
        ),
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner": ("cudagraph_manager",),
        "vllm.v1.worker.gpu.cudagraph_utils:ModelCudaGraphManager.capture": (),
        "vllm.v1.worker.gpu.cudagraph_utils:ModelCudaGraphManager": ("_capture_descs", "graphs"),
        "vllm.compilation.cuda_graph:CUDAGraphWrapper": ("concrete_cudagraph_entries",),
    },
    "inducekv_vllm/vllm_seams/known_bugs.py": {
        "vllm.platforms.interface:Platform._align_hybrid_block_size": ("vllm_config", "backend_cls"),
        "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding.forward_cpu": (),
        "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding": ("_forward_method",),
    },
    "inducekv_vllm/attention/attach.py": {
        "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl.forward": ("layer", "query", "key", "value"),
        "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl.do_kv_cache_update": ("layer", "key", "value"),
        "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.forward": ("layer", "query", "key", "value"),
        "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.do_kv_cache_update": ("layer", "key", "value"),
        "vllm.model_executor.layers.attention:Attention": ("_q_scale",),
    },
    "inducekv_vllm/attention/merged/flash.py": {
        "vllm.model_executor.layers.attention:Attention": ("_q_scale",),
        "vllm.model_executor.layers.attention.attention:set_default_quant_scales": ("layer",),
    },
    "inducekv_vllm/workers/cached_values.py": {
        "vllm.model_executor.layers.attention.attention:set_default_quant_scales": ("layer",),
    },
    "inducekv_vllm/attention/latent.py": {
        "vllm.model_executor.layers.attention:MLAAttention.forward_impl": (
            *("q", "k_c_normed", "k_pe", "kv_cache", "attn_metadata", "output"),
        ),
        "vllm.model_executor.layers.attention:MLAAttention.update_kv_cache": ("kv_c_normed", "k_pe"),
    },
    "inducekv_vllm/plugin.py": {
        "vllm.v1.attention.backends.registry:register_backend": ("backend", "class_path"),
        "vllm.model_executor.models:ModelRegistry.register_model": (),
    },
    "inducekv_vllm/frontend/memory_engine.py": {
        "vllm.v1.engine.async_llm:AsyncLLM.generate": ("prompt", "sampling_params", "request_id", "lora_request"),
        "vllm.renderers.base:BaseRenderer.render_messages_async": ("messages", "params"),
        "vllm.renderers.base:BaseRenderer": ("mm_processor_cache",),
    },
    "inducekv_vllm/frontend/pictures.py": {
        "vllm.multimodal.media.image:ImageMediaIO.load_bytes": ("data",),
        "vllm.multimodal.media.image:ImageMediaIO._convert_image_mode": ("image",),
        "vllm.multimodal.media.image:ImageMediaIO": ("image_mode", "rgba_background_color"),
        "vllm.renderers.base:BaseRenderer._process_multimodal": ("prompt", "mm_data"),
        "vllm.renderers.base:BaseRenderer": ("_process_multimodal_async",),
    },
    "inducekv_vllm/frontend/stopping.py": {
        "vllm.v1.engine.async_llm:AsyncLLM.shutdown": ("timeout",),
        "vllm.v1.engine.async_llm:AsyncLLM.collective_rpc": ("method", "timeout", "args", "kwargs"),
        "vllm.v1.engine.async_llm:AsyncLLM": (
            *("dead_error", "engine_core", "errored", "get_num_unfinished_requests", "output_processor"),
        ),
        "vllm.v1.engine.output_processor:OutputProcessor.abort_requests": ("request_ids", "internal"),
        "vllm.v1.engine.output_processor:OutputProcessor": ("request_states",),
        "vllm.v1.engine.core_client:DPLBAsyncMPClient.call_utility_all_async": ("method",),
        "vllm.v1.engine.core_client:DPLBAsyncMPClient": ("core_engines",),
    },
    "inducekv_vllm/frontend/offline.py": {
        "vllm.entrypoints.llm:LLM._preprocess_chat_one": (),
        "vllm.entrypoints.llm:LLM._preprocess_cmpl_one": (),
        "vllm.entrypoints.llm:LLM._render_and_run_requests": (
            *("prompts", "params", "output_type", "lora_requests", "use_tqdm"),
        ),
        "vllm.renderers.base:BaseRenderer.render_messages": ("messages", "params"),
        "vllm.entrypoints.llm:LLM.collective_rpc": ("method", "args"),
        "vllm.entrypoints.llm:LLM": ("llm_engine",),
    },
    "server/endpoint.py": {
        "vllm.v1.engine.async_llm:AsyncLLM.sleep": (),
        "vllm.v1.engine.async_llm:AsyncLLM.release_kv_cache_memory": (),
        "vllm.entrypoints.generate.beam_search.online:BeamSearchOnlineMixin.beam_search": ("prompt", "lora_request"),
        "vllm.entrypoints.serve.engine.serving:BaseServing._check_model": ("request",),
        "vllm.entrypoints.openai.models.serving:OpenAIServingModels.load_lora_adapter": ("request",),
        "vllm.entrypoints.openai.models.serving:OpenAIServingModels.unload_lora_adapter": ("request",),
        "vllm.entrypoints.openai.models.serving:OpenAIServingModels.is_base_model": ("model_name",),
        "vllm.entrypoints.openai.models.serving:OpenAIServingModels": ("lora_requests",),
        "vllm.config.parallel:ParallelConfig": ("_api_process_count", "_api_process_rank"),
    },
    "server/engines.py": {
        "vllm.v1.engine.async_llm:AsyncLLM.add_lora": ("lora_request",),
    },
    "server/launcher.py": {
        "vllm.entrypoints.cli.serve:ServeSubcommand.cmd": ("args",),
        "vllm.entrypoints.cli.serve:ServeSubcommand.subparser_init": ("subparsers",),
        "vllm.entrypoints.cli.serve:ServeSubcommand.validate": ("args",),
        "vllm.engine.arg_utils:AsyncEngineArgs.from_cli_args": ("args",),
        "vllm.engine.arg_utils:AsyncEngineArgs.create_engine_config": (),
    },
    "server/names.py": {
        "vllm.entrypoints.openai.models.serving:OpenAIServingModels": ("base_model_paths", "lora_requests"),
    },
}
OPEN: Final = ("vllm.v1.core.sched.output:SchedulerOutput", "vllm.v1.outputs:ModelRunnerOutput")


def missing_seams() -> list[str]:
    """What the installed vLLM lacks, each with the place that needs it; empty if everything is there."""
    folder = Path(__file__).parents[2]
    names = (missing for package in PACKAGES for missing in _missing_names(folder / package))
    methods = (missing for package in PACKAGES for missing in _missing_methods(folder / package))
    return [*names, *methods, *_missing_seams(SEAMS), *_closed(OPEN)]


def _missing_names(package: Path) -> Iterator[str]:
    for path in sorted(package.rglob("*.py")):
        for module, name in _imported(ast.parse(path.read_text(encoding="utf-8"))):
            if not _has(module, name):
                yield f"{module}.{name} ({path.relative_to(package.parent)})"


def _missing_methods(package: Path) -> Iterator[str]:
    """What vLLM leaves to classes like those of ours, and ours do not have: they could not be made."""
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        places = {name: f"{module}:{name}" for module, name in _imported(tree)}
        for kind in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            own = {each.name for each in kind.body if isinstance(each, ast.FunctionDef)}
            for base in (places[each.id] for each in kind.bases if isinstance(each, ast.Name) and each.id in places):
                for name in sorted(getattr(_found(base), "__abstractmethods__", frozenset()) - own):
                    yield f"{_dotted(base)}.{name}, which {kind.name} lacks ({path.relative_to(package.parent)})"


def _imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """What a module imports from vLLM, but for imports that it is ready to do without."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
            yield from ((str(node.module), each.name) for each in node.names)
        elif not isinstance(node, ast.Try):
            yield from _imported(node)


def _has(module: str, name: str) -> bool:
    try:
        found = importlib.import_module(module)
    except ImportError:
        return False
    if hasattr(found, name):
        return True
    try:
        importlib.import_module(f"{module}.{name}")
    except ImportError:
        return False
    return True


def _missing_seams(seams: Mapping[str, Mapping[str, tuple[str, ...]]]) -> Iterator[str]:
    for user, places in seams.items():
        for place, names in places.items():
            for missing in _missing_of(place, names):
                yield f"{missing} ({user})"


def _missing_of(place: str, names: tuple[str, ...]) -> Iterator[str]:
    """A place that is not there, or what it lacks of these: parameters of a callable, attributes of a class."""
    if (found := _found(place)) is None:
        yield _dotted(place)
    elif isinstance(found, type):
        known = _attributes_of(found)
        yield from (f"{_dotted(place)}.{name}" for name in names if name not in known)
    else:
        parameters = inspect.signature(found).parameters
        takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        if not takes_all and (others := [name for name in names if name not in parameters]):
            yield f"{_dotted(place)}: the parameter {others[0]}"


def _attributes_of(kind: type) -> set[str]:
    """What a class and its bases define, declare, or set and read on their own instances."""
    found = set(dir(kind))
    for base in kind.__mro__:
        found |= set(vars(base).get("__annotations__", ()))
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError):  # a class without a source in Python
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
                found.add(node.attr)
    return found


def _closed(places: Sequence[str]) -> Iterator[str]:
    """Those whose instances take no attributes of ours."""
    for place in places:
        if (kind := _found(place)) is None:
            yield _dotted(place)
        elif not kind.__dictoffset__ or _is_frozen(kind):
            yield f"{_dotted(place)}: it takes no attribute of another name"


def _is_frozen(kind: Any) -> bool:
    return dataclasses.is_dataclass(kind) and bool(vars(kind)["__dataclass_params__"].frozen)


def _found(place: str) -> Any:
    """What lies at "module:path"; None if nothing does."""
    module, _, path = place.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return None
    return found


def _dotted(place: str) -> str:
    return place.replace(":", ".")
