"""LoRA adapter by adapter against vLLM's own, token by token."""

import pytest
import torch
from torch import Tensor
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper.punica_base import PunicaWrapperBase
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from inducekv_vllm.vllm_seams.known_bugs import ADAPTERS
from inducekv_vllm.workers.cpu_lora import GroupedPunica

RANK, IN, SLICES = 4, 12, (10, 6)
SLOTS: list[int | None] = [7, 9]  # adapters by their place in the stacked matrices
NONE = 0  # what asks no adapter


def applied(punica: type[PunicaWrapperBase], asked: tuple[int, ...], y: Tensor, x: Tensor) -> Tensor:
    """What the two slices of one layer give for tokens [tokens], each with its adapter."""
    random = torch.Generator().manual_seed(3)
    down = tuple(torch.randn(len(SLOTS), 1, RANK, IN, generator=random) for _ in SLICES)
    up = tuple(torch.randn(len(SLOTS), 1, width, RANK, generator=random) for width in SLICES)
    wrapper = punica(64, 8, "cpu")
    wrapper.update_metadata(LoRAMapping(asked, asked, is_prefill=True), SLOTS, len(SLOTS), 100)
    out = y.clone()
    wrapper.add_lora_linear(out, x, down, up, 0.5, SLICES)
    return out


@pytest.mark.parametrize("asked", [(7,) * 5, (9, 9, 7, 7, 7, 9), (7, 9) * 4])
def test_it_is_what_vllm_computes(asked: tuple[int, ...]) -> None:
    y, x = torch.randn(len(asked), sum(SLICES)), torch.randn(len(asked), IN)
    expected = applied(PunicaWrapperCPU, asked, y, x)
    assert not torch.allclose(expected, y)
    torch.testing.assert_close(applied(GroupedPunica, asked, y, x), expected)


def test_tokens_without_an_adapter_are_left_alone() -> None:
    asked = (NONE, 7, NONE, 9)
    y, x = torch.randn(4, sum(SLICES)), torch.randn(4, IN)
    found, by_vllm = (applied(each, asked, y, x) for each in (GroupedPunica, PunicaWrapperCPU))
    assert torch.equal(found[[0, 2]], y[[0, 2]])
    assert torch.allclose(by_vllm[[0, 2]], y[[0, 2]]) == (not ADAPTERS.is_here)  # vLLM's fault
    torch.testing.assert_close(found[[1, 3]], by_vllm[[1, 3]])
    assert torch.equal(applied(GroupedPunica, (NONE,) * 4, y, x), y)
