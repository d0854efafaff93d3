"""What InduceKV takes of vLLM that no version promises: looked for at start, on a version that was never tried.

Names that modules import say so themselves, so they are read from the sources. The others are methods that we override
or call; `SEAMS` has them with the parameters that we name or count on.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

SEAMS: Final[Mapping[str, tuple[str, ...]]] = {
    "vllm.v1.core.sched.scheduler:Scheduler.add_request": ("request",),
    "vllm.v1.core.sched.scheduler:Scheduler.schedule": (),
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output": ("scheduler_output", "model_runner_output"),
    "vllm.v1.core.sched.scheduler:Scheduler._update_after_schedule": ("scheduler_output",),
    "vllm.v1.core.sched.scheduler:Scheduler._preempt_request": ("request", "timestamp", "drop_stale_output"),
    "vllm.v1.request:Request.get_skip_reading_prefix_cache": (),
    "vllm.v1.request:Request.update_block_hashes": (),
    "vllm.v1.worker.gpu_worker:Worker.load_model": (),
    "vllm.v1.worker.gpu_worker:Worker.initialize_from_config": ("kv_cache_config",),
    "vllm.v1.worker.gpu_worker:Worker.compile_or_warm_up_model": (),
    "vllm.v1.worker.gpu_worker:Worker.execute_model": ("scheduler_output",),
    "vllm.v1.worker.gpu_worker:Worker.sample_tokens": ("grammar_output",),
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.prepare_inputs": ("scheduler_output",),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_inputs": ("scheduler_output",),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._determine_batch_execution_and_padding": (),
    "vllm.v1.sample.logits_processor:AdapterLogitsProcessor.new_req_logits_processor": ("params",),
    "vllm.v1.worker.gpu.sample.logits_processor.interface:LogitsProcessor.apply": ("logits", "ctx"),
    "vllm.v1.attention.backends.registry:register_backend": ("backend", "class_path"),
    "vllm.model_executor.models:ModelRegistry.register_model": (),
    "vllm.renderers.base:BaseRenderer.render_chat_async": ("conversations", "chat_params"),
}


def missing_seams() -> list[str]:
    """What the installed vLLM lacks, each with the place that needs it; empty if everything is there."""
    return [*_missing_names(Path(__file__).parents[1]), *_missing_methods(SEAMS)]


def _missing_names(package: Path) -> Iterator[str]:
    for path in sorted(package.rglob("*.py")):
        for module, name in _imported(ast.parse(path.read_text(encoding="utf-8"))):
            if not _has(module, name):
                yield f"{module}.{name} ({path.relative_to(package.parent)})"


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


def _missing_methods(seams: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    for place, parameters in seams.items():
        module, _, path = place.partition(":")
        try:
            found: Any = importlib.import_module(module)
            for part in path.split("."):
                found = getattr(found, part)
            known = inspect.signature(found).parameters
        except (ImportError, AttributeError):
            yield f"{module}.{path}"
            continue
        takes_all = any(each.kind is each.VAR_KEYWORD for each in known.values())
        if not takes_all and (others := [name for name in parameters if name not in known]):
            yield f"{module}.{path}: the parameter {others[0]}"
