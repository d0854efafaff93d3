"""Every decoder architecture that vLLM and transformers both know, and what the product's own checks say of it.

    python -m tests.architectures            # writes the tables of docs/families.md anew
    python -m tests.architectures --check    # says where they are stale

Each model is made from its configuration class on the meta device: sizes and settings are the class's defaults, which
need not be those of the published models (`SETTINGS` has what a class cannot be made without). vLLM's configuration is
made of the same settings, without its model.

It runs in a process of its own: an engine registers configuration classes of vLLM's in the place of transformers'.
"""

from __future__ import annotations

import difflib
import itertools
import json
import logging
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import registry

from inducekv_vllm.backbone.checkpoints import kind_of, summary
from inducekv_vllm.backbone.fingerprint import fingerprint_of
from inducekv_vllm.errors import UnsupportedModel
from inducekv_vllm.models import register_configurations
from inducekv_vllm.vllm_seams.config import SCHEDULER_CLS, WORKER_CLS
from inducekv_vllm.vllm_seams.requirements import check_engine
from selector.backbone.loading import fit_memory
from selector.backbone.model import Backbone
from tests.tiny_families import TESTED
from tests.tiny_models import byte_tokenizer

PAGE: Final = Path(__file__).parent.parent / "docs" / "families.md"
RECIPES: Final = Path(__file__).parent / "recipes.json"
Status = Literal["served", "decoupled", "refused", "not judged"]
# What a class cannot be made without, or what would make it another model than any published one.
SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention"] * 10 + ["conv", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention"] * 10 + ["conv", "conv"]},
    "mistral": {"sliding_window": None},
    "nemotron": {"num_key_value_heads": 8, "head_dim": 128},
    "smolvlm": {"text_config": {"model_type": "llama", "pad_token_id": 0}},
    "idefics3": {"text_config": {"model_type": "llama", "pad_token_id": 0}},
    "granite4_vision": {"text_config": {"model_type": "granite"}},
}
# By model type, a setting that vLLM's class cannot be made without, and that transformers' does not write.
READ_BY_VLLM: Final = {"nemotron_h_omni": "norm_mean"}


@dataclass(frozen=True)
class Row:
    """One architecture: whether memory can be taught to it and served, or why not."""

    architecture: str
    status: Status
    reason: str  # of "refused" and "not judged", as the check says it

    @property
    def shown(self) -> str:
        usual = {"served": "yes", "decoupled": "decoupled memory"}
        return usual.get(self.status) or f"{self.status}: {self.reason}"

    @property
    def passes(self) -> bool:
        return self.status in ("served", "decoupled")

    @property
    def is_tested(self) -> bool:
        return self.passes and self.architecture in TESTED.values()


class NotJudged(Exception):
    """One of the libraries does not make the model, or its settings, from the class's defaults."""


@cache
def survey() -> tuple[Row, ...]:
    """A row for each architecture, by name."""
    register_configurations()
    with _quiet():
        return tuple(_judged(architecture) for architecture in sorted(_known_to_both()))


@cache
def recipes() -> tuple[tuple[dict[str, Any], Row], ...]:
    """The recipes of `RECIPES`, each with what the checks say of its model."""
    rows = {row.architecture: row for row in survey()}
    with _quiet():
        return tuple((recipe, _of_recipe(recipe, rows)) for recipe in json.loads(RECIPES.read_text())["recipes"])


def _of_recipe(recipe: Mapping[str, Any], rows: Mapping[str, Row]) -> Row:
    architecture, settings = recipe["architecture"], recipe.get("settings")
    if settings is None and architecture in rows:
        return rows[architecture]
    return _judged(architecture, settings, recipe.get("model_type"))


def _known_to_both() -> dict[str, str]:
    """The model type of each architecture."""
    known: dict[str, str] = {}
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES):
        for model_type, names in mapping.items():
            for name in (names,) if isinstance(names, str) else names:
                if name in registry._VLLM_MODELS:
                    known.setdefault(name, model_type)
    return known


@cache
def _known_to_transformers() -> frozenset[str]:
    mappings = (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    names = (name for mapping in mappings for name in mapping.values())
    return frozenset(itertools.chain.from_iterable((each,) if isinstance(each, str) else each for each in names))


def _judged(architecture: str, settings: Mapping[str, Any] | None = None, model_type: str | None = None) -> Row:
    """By `model_type`, a published checkpoint is transformers', whatever architecture it names."""
    if (model_type := model_type or _known_to_both().get(architecture)) is None:
        unknown = ["transformers"] if architecture not in _known_to_transformers() else []
        unknown += ["vLLM"] if architecture not in registry._VLLM_MODELS else []
        return Row(architecture, "not judged", f"not known to {' and '.join(unknown)}")
    try:
        config = _config(architecture, model_type, settings or SETTINGS.get(model_type, {}))
        merged = _taught(config)
        _served(config)
    except UnsupportedModel as error:
        return Row(architecture, "refused", _reason(error, architecture, model_type))
    except NotJudged as error:
        return Row(architecture, "not judged", _reason(error, architecture, model_type))
    return Row(architecture, "served" if merged else "decoupled", "")


def _config(architecture: str, model_type: str, settings: Mapping[str, Any]) -> PretrainedConfig:
    try:
        config: PretrainedConfig = CONFIG_MAPPING[model_type](**settings)
    except Exception as error:
        raise NotJudged(f"transformers makes no configuration of defaults ({summary(error)})") from error
    config.architectures = [architecture]
    return config


def _taught(config: PretrainedConfig) -> bool:
    """Whether merged memory can be taught to the model, too.

    Raises:
        UnsupportedModel: no memory can: what `Backbone.load` would say.
        NotJudged: transformers does not make it.
    """
    architecture = str((config.architectures or [])[0])
    kind = kind_of(config, architecture)
    fingerprint_of(config, byte_tokenizer([], ""), "none")
    makes = AutoModelForCausalLM if kind == "text" else AutoModelForImageTextToText
    try:
        with torch.device("meta"):
            network = makes.from_config(config)
    except Exception as error:
        raise NotJudged(f"transformers makes no model of its defaults ({summary(error)})") from error
    fit_memory(network, architecture)
    try:
        Backbone.of(network, None).require_full_attention()
    except UnsupportedModel:
        return False
    return True


def _served(config: PretrainedConfig) -> None:
    """What the plugin's check at start says.

    Raises:
        UnsupportedModel: the engine would not start with memory, or refuse a bundle of this model.
        NotJudged: vLLM does not take the configuration.
    """
    ours: dict[str, Any] = {"worker_cls": WORKER_CLS, "scheduler_cls": SCHEDULER_CLS}
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        try:
            engine = EngineArgs(
                model=folder, skip_tokenizer_init=True, load_format="dummy", max_model_len=256, dtype="float32", **ours
            ).create_engine_config()
        except Exception as error:
            raise NotJudged(f"vLLM refuses the configuration ({summary(error).replace(folder, 'it')})") from error
    if (name := READ_BY_VLLM.get(config.model_type)) is not None and not hasattr(config, name):
        raise NotJudged(f"transformers' configuration has no {name}, which vLLM reads")
    check_engine(engine)
    model, text = engine.model_config, config.get_text_config(decoder=True)
    found = model.get_num_layers(engine.parallel_config)
    if found != text.num_hidden_layers:
        raise NotJudged(f"transformers' defaults have {text.num_hidden_layers} layers, vLLM counts {found}")


def _reason(error: Exception, architecture: str, model_type: str) -> str:
    """The error without the names that a row has already, and without what a newer library may word otherwise."""
    text = str(error).removeprefix(f"{architecture}: ").removeprefix(f"{model_type}: ")
    text = text.removeprefix("InduceKV cannot serve memory with ")
    return re.sub(r"[|\n]", " ", text)[:200]


@contextmanager
def _quiet() -> Iterator[None]:
    """vLLM looks at a model's class in a process of its own, seconds each: here in this one."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    logging.disable(logging.ERROR)
    with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        in_process = lambda model: registry._ModelInfo.from_model_cls(model.load_model_cls())  # noqa: E731
        patched.setattr(registry._LazyRegisteredModel, "inspect_model_cls", in_process)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
            transformers.logging.set_verbosity(before)


# ------------------------------------------------------------------------------------------------------ the page


def tables() -> dict[str, str]:
    """The tables of the page, by the name of their place in it."""
    return {
        "count of architectures": _count(survey(), sum(row.is_tested for row in survey())),
        "architectures": _of_architectures(),
        "count of recipes": _count([row for _, row in recipes()], sum(_tested(*each) == "yes" for each in recipes())),
        "drafts and weights": _of_drafts_and_weights(),
        "recipes": _of_recipes(),
    }


def _tested(recipe: Mapping[str, Any], row: Row) -> str:
    """What of a recipe's model was tested: "yes", unless the tiny one has not all that the published one has."""
    return str(recipe.get("tested", "yes")) if row.is_tested else ""


def _count(rows: Sequence[Row], tested: int) -> str:
    found, passes = Counter(row.status for row in rows), sum(row.passes for row in rows)
    return "\n".join(
        [
            "| | |",
            "|---|---|",
            f"| served and tested | {tested} |",
            f"| passes the checks, not tested | {passes - tested} |",
            f"| refused | {found['refused']} |",
            f"| not judged | {found['not judged']} |",
            f"| all | {len(rows)} |",
        ]
    )


def _of_architectures() -> str:
    lines = [f"| `{row.architecture}` | {row.shown} | {'yes' if row.is_tested else ''} |" for row in survey()]
    return "\n".join(["| architecture | taught and served | tested |", "|---|---|---|", *lines])


def _of_recipes() -> str:
    lines = [
        f"| {recipe['model']} | `{row.architecture}` | {row.shown} | {_tested(recipe, row)} |"
        for recipe, row in recipes()
    ]
    return "\n".join(["| model | architecture | taught and served | tested |", "|---|---|---|---|", *lines])


def _of_drafts_and_weights() -> str:
    lines = ["| of the recipes | all | of models that pass |", "|---|---|---|"]
    for key, what in (("drafts", "drafts by"), ("quantised", "weights in")):
        for name in sorted({name for recipe, _ in recipes() for name in recipe.get(key, ())}):
            having = [row for recipe, row in recipes() if name in recipe.get(key, ())]
            lines.append(f"| {what} {name} | {len(having)} | {sum(row.passes for row in having)} |")
    return "\n".join(lines)


def with_tables(page: str) -> str:
    """The page with its tables as they are now; each stands between two comments that name it."""
    for name, table in tables().items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        page = f"{before}{begin}\n{table}\n{end}{after}"
    return page


def main() -> None:
    written = PAGE.read_text()
    found = with_tables(written)
    if "--check" not in sys.argv:
        PAGE.write_text(found)
    elif found != written:
        lines = difflib.unified_diff(written.splitlines(), found.splitlines(), "written", "found", n=0, lineterm="")
        sys.exit("\n".join([f"{PAGE.name} is stale: python -m tests.architectures writes it", *lines]))
    print(tables()["count of architectures"], tables()["count of recipes"], sep="\n")


if __name__ == "__main__":
    main()
