"""What is continued from a few layers: the line, the weights' bytes, and what autograd keeps."""

import pytest
import torch

from benchmarks.geometries import GEOMETRIES
from benchmarks.research.selector_sizes import MIB, continued, kept_bytes, weights_mib


def test_the_line() -> None:
    assert continued([2, 4, 6], [5.0, 9.0, 100.0], 36) == pytest.approx(5 + 34 * 2)


def test_the_weights() -> None:
    """Of a layer: queries and output, keys and values, three matrices of the MLP."""
    g = GEOMETRIES["tiny"]
    layer = 2 * 48 * 6 * 64 + 2 * 48 * 2 * 64 + 3 * 48 * 64
    assert weights_mib(g, 100) == pytest.approx(2 * (2 * layer + 100 * 48) / MIB)


def test_what_autograd_keeps() -> None:
    """The input of each square, once however often it is kept; not the weight."""
    weight = torch.nn.Parameter(torch.ones(8, 8))
    inputs = torch.ones(4, 8, requires_grad=True)

    def step() -> None:
        hidden = inputs @ weight
        (hidden.square() * hidden).sum().backward()

    assert kept_bytes(step, [weight]) == 3 * inputs.nbytes  # the input, the product, its square
