"""Damaged and foreign files are refused in one line that names what was expected and found; code in them never runs."""

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file
from torch import Tensor, nn

from inducekv_vllm.bundle import PayloadDtype
from inducekv_vllm.errors import InduceKVError
from selector.backbone.model import Backbone
from selector.imported.bundle import import_source
from selector.imported.cartridge import cartridge_source
from selector.imported.peft import peft_source
from selector.imported.source import Source
from selector.imported.text import text_source
from tests.unit.selector.cli.bundle_command import command, refuse

from .conftest import HIDDEN, KV_HEADS, LAYERS, SIZE

TOKENS = 4
WIDTH = 2 * LAYERS * KV_HEADS * SIZE
PREFIX = {
    "peft_type": "PREFIX_TUNING",
    "task_type": "CAUSAL_LM",
    "num_virtual_tokens": TOKENS,
    "num_transformer_submodules": 1,
    "num_layers": LAYERS,
    "num_attention_heads": KV_HEADS,
    "token_dim": KV_HEADS * SIZE,
}
PROMPT = PREFIX | {"peft_type": "PROMPT_TUNING", "token_dim": HIDDEN}


class Code:
    """What a pickle would run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def refusal(read: Callable[[], Source], backbone: Backbone, dtype: PayloadDtype | None = None) -> str:
    with pytest.raises(InduceKVError) as raised:
        import_source(backbone, read(), task="t", dtype=dtype)

    return str(raised.value)


# ---- adapters of PEFT -----------------------------------------------------------------------------------------------


def adapter(folder: Path, config: Any = PREFIX, weights: Any = None) -> Path:
    """A good one, but for what is given; `weights` None: of the right shape."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if weights is None:
        weights = {"prompt_embeddings": torch.zeros(TOKENS, WIDTH)}
    if isinstance(weights, bytes):
        (folder / "adapter_model.safetensors").write_bytes(weights)
    else:
        save_file(weights, folder / "adapter_model.safetensors")
    return folder


def test_the_good_ones_are_good(llama: Backbone, tmp_path: Path) -> None:
    """Otherwise each of the others might be refused for another reason."""
    assert import_source(llama, peft_source(adapter(tmp_path / "a")), task="t").payload_tokens == TOKENS
    embeddings = {"prompt_embeddings": torch.zeros(TOKENS, HIDDEN)}
    assert import_source(llama, peft_source(adapter(tmp_path / "c", PROMPT, embeddings)), task="t").payload_tokens
    good = cartridge_source(cartridge(tmp_path / "d.pt"))
    assert import_source(llama, good, task="t").payload_tokens == TOKENS


CONFIGURATIONS: list[tuple[Any, str]] = [
    ("{", "adapter_config.json: not JSON"),
    ("[" * 100000, "adapter_config.json: not JSON"),
    ("\xff", "task_type|not JSON"),
    ([PREFIX], "expected a JSON object, found list"),
    ("{" + " " * 2**20 + "}", "1048578 bytes, more than 1048576: no configuration"),
    (PREFIX | {"peft_type": "LORA"}, "found 'LORA'; load it with vLLM's --lora-modules"),
    (PREFIX | {"peft_type": "IA3"}, "expected PREFIX_TUNING, CARTRIDGE, PROMPT_TUNING, P_TUNING, found 'IA3'"),
    (PREFIX | {"peft_type": ["PREFIX_TUNING"]}, r"found \['PREFIX_TUNING'\]"),
    (PREFIX | {"task_type": "SEQ_2_SEQ_LM", "num_transformer_submodules": 2}, "found 'SEQ_2_SEQ_LM' with 2"),
    (PREFIX | {"task_type": "SEQ_CLS"}, "task_type 'CAUSAL_LM' .* found 'SEQ_CLS'"),
    (PREFIX | {"modules_to_save": ["lm_head"]}, r"expected an untouched base model, found trained modules: \['lm_head"),
    (PREFIX | {"num_virtual_tokens": 0}, "num_virtual_tokens must be a whole number from 1 to 1048576, found 0"),
    (PREFIX | {"num_virtual_tokens": True}, "from 1 to 1048576, found True"),
    (PREFIX | {"num_virtual_tokens": 2**40}, "from 1 to 1048576, found 1099511627776"),
    (PREFIX | {"num_layers": 30}, "another base model .* expected num_layers 2, .* found num_layers 30"),
    (PREFIX | {"num_attention_heads": 6}, "num_attention_heads 3, token_dim 24, found .* num_attention_heads 6"),
    (
        PREFIX | {"token_dim": 576, "base_model_name_or_path": "org/other"},
        r"base model \(org/other\): .* token_dim 576",
    ),
    (PROMPT | {"token_dim": 576}, "expected token_dim 48, found token_dim 576"),
]


@pytest.mark.parametrize(("config", "problem"), CONFIGURATIONS)
def test_another_adapter(config: Any, problem: str, llama: Backbone, tmp_path: Path) -> None:
    with pytest.raises(InduceKVError, match=problem):
        import_source(llama, peft_source(adapter(tmp_path / "a", config)), task="t")


GOOD = {"prompt_embeddings": torch.zeros(TOKENS, WIDTH)}
WEIGHTS: list[tuple[Any, str]] = [
    (b"", "not a safetensors file"),
    (save(GOOD)[:-1], "not a safetensors file"),
    ({"other": torch.zeros(2)}, "expected the tensor 'prompt_embeddings' alone, found other"),
    (GOOD | {"lm_head.weight": torch.zeros(2)}, "alone, found lm_head.weight, prompt_embeddings"),
    ({"prompt_embeddings": torch.zeros(TOKENS, WIDTH - 1)}, r"expected the shape \[4, 96\], found \[4, 95\]"),
    ({"prompt_embeddings": torch.zeros(TOKENS + 1, WIDTH)}, r"expected the shape \[4, 96\], found \[5, 96\]"),
    ({"prompt_embeddings": torch.zeros(TOKENS, WIDTH, dtype=torch.int64)}, "found a tensor of torch.int64"),
    ({"prompt_embeddings": torch.full((TOKENS, WIDTH), torch.nan)}, "contains NaN or infinite values"),
]


@pytest.mark.parametrize(("weights", "problem"), WEIGHTS)
def test_damaged_weights(weights: Any, problem: str, llama: Backbone, tmp_path: Path) -> None:
    with pytest.raises(InduceKVError, match=problem):
        import_source(llama, peft_source(adapter(tmp_path / "a", weights=weights)), task="t")


def test_missing_files_of_an_adapter(tmp_path: Path) -> None:
    with pytest.raises(InduceKVError, match="cannot read the adapter: No such file or directory"):
        peft_source(tmp_path / "nowhere")
    (tmp_path / "adapter_config.json").write_text(json.dumps(PREFIX))
    with pytest.raises(InduceKVError, match=r"No such file or directory: .*adapter_model.safetensors"):
        peft_source(tmp_path)


def test_a_number_beyond_float16(llama: Backbone, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "a", weights={"prompt_embeddings": torch.full((TOKENS, WIDTH), 1e5)})
    read = partial(peft_source, folder)
    assert "the keys reach 1.41e+05, and a bundle of float16 holds numbers up to 6.55e+04" in refusal(
        read, llama, "float16"
    )


# ---- cartridges -----------------------------------------------------------------------------------------------------


def layers(tokens: int = TOKENS - 1, count: int = LAYERS, heads: int = KV_HEADS, size: int = SIZE) -> list[Tensor]:
    return [torch.zeros(1, heads, tokens, size) for _ in range(count)]


def cartridge(path: Path, **changes: Any) -> Path:
    """A good one, but for the changes; a value of None is left out."""
    content: dict[str, Any] = {}
    for part in ("keys", "values"):
        content |= {f"trainable_{part}": layers(), f"frozen_{part}": layers(1)}
    content = {name: value for name, value in {**content, **changes}.items() if value is not None}
    as_saved = {name: nn.ParameterList(v) if _are_tensors(v) else v for name, v in content.items()}
    torch.save(as_saved, path)
    return path


def _are_tensors(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, Tensor) and each.is_floating_point() for each in value)


def with_layer(layer: Any) -> list[Any]:
    return [layers()[0], layer]


def saying(size: Any) -> nn.ParameterList:
    """A list that says that it has so many parameters."""
    made = nn.ParameterList(layers())
    made.__dict__["_size"] = size
    return made


CARTRIDGES: list[tuple[dict[str, Any], str]] = [
    ({"trainable_keys": None}, "not a cartridge: expected 'trainable_keys' and 'trainable_values', found 'frozen_keys"),
    ({"trainable_values": None}, "trainable_values: expected a list of tensors, found NoneType"),
    ({"frozen_keys": None}, "the frozen tokens are missing: expected 'frozen_keys'"),
    ({"trainable_keys": layers(count=1)}, "one tensor for each of the model's 2 layers, found 1"),
    ({"trainable_values": layers(count=3)}, "trainable_values: .* the model's 2 layers, found more"),
    ({"trainable_keys": layers(heads=2)}, r"trainable_keys\[0\]: expected the shape \[1, 3, 3, 8\], found \[1, 2, 3"),
    ({"trainable_keys": with_layer(layers(9)[0])}, r"\[1\]: expected the shape \[1, 3, 3, 8\], found \[1, 3, 9, 8\]"),
    ({"trainable_values": layers(9)}, "expected as many keys as values, found 4 and 10 tokens"),
    ({"trainable_keys": [torch.zeros(3, SIZE)] * 2}, r"expected the shape \[1, 3, 1, 8\], found \[3, 8\]"),
    ({"trainable_keys": with_layer(torch.full((1, 3, 3, 8), torch.nan))}, r"\[1\] contains NaN or infinite"),
    ({"frozen_values": [torch.full((1, 3, 1, 8), torch.inf)] * 2}, r"frozen_values\[0\] contains NaN or infinite"),
    ({"trainable_keys": with_layer(torch.zeros(1, 3, 3, 8, dtype=torch.int8))}, "found a tensor of torch.int8"),
    ({"trainable_keys": with_layer("text")}, "expected a tensor of floating-point numbers, found str"),
    ({"trainable_keys": saying("2")}, "a damaged list of tensors: "),
    ({"trainable_keys": saying(2**62)}, "the model's 2 layers, found|a damaged list of tensors: "),
    (
        {"trainable_keys": [torch.zeros(1).expand(1, 3, 2**40, 8)] * 2},
        "claims 105553116266496 bytes, and the file has 4",
    ),
]


@pytest.mark.parametrize(("changes", "problem"), CARTRIDGES)
def test_another_cartridge(changes: dict[str, Any], problem: str, llama: Backbone, tmp_path: Path) -> None:
    with pytest.raises(InduceKVError, match=problem):
        import_source(llama, cartridge_source(cartridge(tmp_path / "c.pt", **changes)), task="t")


def test_code_is_refused_and_never_run(llama: Backbone, tmp_path: Path) -> None:
    ran, path = tmp_path / "ran", tmp_path / "code.pt"
    for content in (Code(ran), {"trainable_keys": Code(ran)}, {"trainable_keys": nn.ParameterList(), "x": [Code(ran)]}):
        torch.save(content, path)
        with pytest.raises(InduceKVError, match=r"holds something else than tensors, which is not run: .*mkdir"):
            cartridge_source(path)
    torch.save({"trainable_keys": nn.Linear(1, 1)}, path)  # a class of torch, and not one that is needed
    with pytest.raises(InduceKVError, match=r"which is not run: .*torch\.nn\.modules\.linear\.Linear"):
        cartridge_source(path)
    assert not ran.exists()


def zipped(path: Path, compression: int, **parts: bytes) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in parts.items():
            archive.writestr(f"archive/{name.replace('_', '.')}", content)
    return path


def test_files_that_are_no_cartridges(llama: Backbone, tmp_path: Path) -> None:
    path = tmp_path / "c.pt"

    def problem() -> str:
        return refusal(partial(cartridge_source, path), llama)

    assert "cannot read the file: No such file or directory" in problem()
    path.write_bytes(b"")
    assert "not a file of torch.save: File is not a zip file" in problem()
    path.write_bytes(save(GOOD))
    assert "not a file of torch.save" in problem()
    path.write_bytes(pickle.dumps(Code(tmp_path / "ran")))
    assert "not a file of torch.save" in problem()
    zipped(path, zipfile.ZIP_STORED, version=b"3")
    assert "damaged: " in problem()
    zipped(path, zipfile.ZIP_STORED, data_pkl=b"\x80\x02}q\x00.", version=b"3")
    assert "not a cartridge: expected 'trainable_keys' and 'trainable_values', found" in problem()
    zipped(path, zipfile.ZIP_DEFLATED, data_pkl=b"0" * 2**20)
    assert "'archive/data.pkl' is compressed, which torch.save never does" in problem()
    zipped(path, zipfile.ZIP_STORED, data_pkl=bytes(2**24 + 1))
    assert "'archive/data.pkl' has 16777217 bytes, at most 16777216 are read" in problem()
    torch.save(torch.zeros(2), path)
    assert "found Tensor" in problem()
    whole = cartridge(path).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert "not a file of torch.save" in problem()
    path.write_bytes(whole.replace(b"PK\x01\x02", b"PK\x01\x03", 1))
    assert "not a file of torch.save" in problem()
    path.unlink()
    path.mkdir()
    assert "Is a directory" in problem()
    assert not (tmp_path / "ran").exists()


def test_a_storage_shorter_than_it_says(llama: Backbone, tmp_path: Path) -> None:
    path, written = cartridge(tmp_path / "c.pt"), io.BytesIO()
    with zipfile.ZipFile(path) as whole, zipfile.ZipFile(written, "w") as cut:
        for part in whole.infolist():
            content = whole.read(part)
            cut.writestr(part.filename, content[:8] if "/data/" in part.filename else content)
    path.write_bytes(written.getvalue())
    assert "damaged: " in refusal(partial(cartridge_source, path), llama)


# ---- texts and the command ------------------------------------------------------------------------------------------


def test_texts(llama: Backbone, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"

    def problem(role: str | None = None) -> str:
        return refusal(lambda: text_source(path, role), llama)

    assert "cannot read the text: No such file or directory" in problem()
    path.write_bytes(b"")
    assert "the text is empty" in problem()
    path.write_text(" \n")
    assert "the text is empty" in problem()
    path.write_bytes(b"abc\xff")
    assert "line 1: not UTF-8 text (b'\\xff'): save it in UTF-8" in problem()
    path.write_text("yes no " * 300)
    assert "the text has 602 tokens, and the model reads 256, a request included" in problem()


def test_the_command_writes_nothing_if_it_fails(llama_folder: Path, tmp_path: Path) -> None:
    output, text = tmp_path / "out.safetensors", tmp_path / "text.txt"
    text.write_text("Answer with one word.")
    known = ("--model", llama_folder, "--output", output)
    assert "No such file" in refuse("import", "cartridge", tmp_path / "nowhere", *known)
    assert "--role is for a text, found peft" in refuse("import", "peft", tmp_path, *known, "--role", "user")
    assert "--task must be Unicode of at most 256" in refuse("import", "text", text, *known, "--task", "x" * 257)
    assert "found 4: 'caf" in refuse("import", "text", text.rename(tmp_path / "caf\udce9.txt"), *known)
    (tmp_path / "caf\udce9.txt").rename(text)
    assert "which stays as it is" in refuse("import", "text", text, "--model", llama_folder, "--output", text)
    assert "the folder" in refuse("import", "text", text, "--model", llama_folder, "--output", tmp_path / "no" / "b")
    assert not output.exists()
    assert "tokens, digest" in command("import", "text", text, *known)
    assert "recipe          imported" in command("inspect", output)
