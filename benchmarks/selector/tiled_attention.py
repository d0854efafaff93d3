"""Measures tiled memory attention, the training path's, against plain concatenation, forward and backward.

    python -m benchmarks.selector.tiled_attention

Each method runs in a process of its own: `--layers` attention layers one after the other, each layer's output being
the next one's query, with gradients where the selector asks for them (selection weights, temperature, value gates;
payloads are frozen). Time is the median of `--repeats` after one run to warm up; memory is the peak above what the
inputs take, from the kernel's own high-water mark. A third process computes the same gradients in float64 with the
reference, `selector.backbone.injection.attend`, for the relative error of each method. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time

import torch
from torch import Tensor

from benchmarks.machine import describe_machine
from selector.backbone.injection import Memory, Terms, attend
from selector.backbone.tiled_attention import attend_tiled
from selector.runtime.phases import status_bytes

VARIABLES = ("selection weights", "temperature", "value gates")


def attend_concatenated(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scaling: float, memory: Memory, terms: Terms, layer: int
) -> Tensor:
    """Every request gets scaled copies of all payloads in front of its own keys and values.

    Arguments and result as `selector.backbone.injection.attend`; tiles avoid the copies [n, H, N m, D].
    """
    n, H, T, D = query.shape
    J, S = key.shape[1:3]
    dtype = torch.promote_types(query.dtype, torch.float32)
    m = memory.payload_keys.shape[3]

    def copies(payload: Tensor, scale: Tensor) -> Tensor:
        scaled = scale.to(dtype)[:, :, None, None, None] * payload[layer].to(dtype)  # [n, N, J, m, D]
        return scaled.transpose(1, 2).flatten(2, 3)  # [n, J, N m, D]

    nothing = torch.zeros(n, J, 1, D, dtype=dtype, device=query.device)  # the remainder's key and value
    keys = torch.cat([copies(memory.payload_keys, terms.key_scale), nothing, key.to(dtype)], dim=2)
    gate = memory.value_gates[layer].to(dtype)
    values = torch.cat([gate * copies(memory.payload_values, terms.value_scale), nothing, value.to(dtype)], dim=2)
    bias = torch.cat(
        [terms.log_weight.to(dtype).repeat_interleave(m, dim=1), terms.log_remainder.to(dtype)[:, None]], 1
    )
    bias = (bias + memory.layer_bias[layer].to(dtype))[:, None].expand(n, T, -1)  # [n, T, N m + 1]
    hidden = torch.zeros(visible.shape, dtype=dtype, device=query.device).masked_fill(~visible, -math.inf)
    mask = torch.cat([bias, hidden.expand(n, T, S)], dim=-1)[:, None]  # [n, 1, T, N m + 1 + S]
    output = torch.nn.functional.scaled_dot_product_attention(
        query.to(dtype),
        keys.repeat_interleave(H // J, dim=1),  # [n, H, N m + 1 + S, D]
        values.repeat_interleave(H // J, dim=1),
        attn_mask=mask,
        scale=scaling,
    )
    return output.transpose(1, 2)


# "induced" is the name of tiled memory attention in the committed results.
METHODS = {"induced": attend_tiled, "concatenated": attend_concatenated, "reference": attend}


def main() -> int:
    options = _parser().parse_args()
    if options.method:
        print(json.dumps(measure(options)))
        return 0
    results = {method: run_apart(method) for method in METHODS}
    truth = results.pop("reference").pop("gradients")
    for result in results.values():
        result["gradient_errors"] = {
            name: _relative_error(gradient, expected)
            for name, gradient, expected in zip(VARIABLES, result.pop("gradients"), truth, strict=True)
        }
    tiled, concatenated = results["induced"], results["concatenated"]
    report = {
        "benchmark": "induced_attention",
        "settings": {name: value for name, value in vars(options).items() if name != "method"},
        "machine": describe_machine(),
        **results,
        "times_faster": round(concatenated["seconds"] / tiled["seconds"], 3),
        "memory_ratio": round(tiled["peak_bytes"] / concatenated["peak_bytes"], 4),
    }
    print(json.dumps(report))
    return 0


def run_apart(method: str) -> dict:
    command = [sys.executable, "-m", "benchmarks.selector.tiled_attention", *sys.argv[1:], "--method", method]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def measure(options: argparse.Namespace) -> dict:
    """One method's time, peak memory and gradients."""
    if options.threads:
        torch.set_num_threads(options.threads)
    attend = METHODS[options.method]
    reference = options.method == "reference"
    dtype = torch.float64 if reference else torch.float32
    n, N, L, T = options.batch, options.entries, options.layers, options.tokens
    H, J, D = options.heads, options.kv_heads, options.head_dim
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    payload_keys, payload_values = (draw(L, N, J, options.payload_tokens, D).half() for _ in range(2))
    query, key, value = draw(n, H, T, D), draw(L, n, J, T, D), draw(L, n, J, T, D)
    keys, query_keys = (torch.nn.functional.normalize(draw(rows, 256), dim=1) for rows in (N, n))
    visible = torch.ones(T, T, dtype=torch.bool).tril()[None]
    variables = [
        torch.zeros(N, dtype=dtype, requires_grad=True),
        torch.tensor(0.07, dtype=dtype, requires_grad=True),
        torch.full((L,), 0.5, dtype=dtype, requires_grad=True),
    ]

    def step() -> tuple[Tensor, ...]:
        weights, temperature, gates = variables
        memory = Memory(
            keys, payload_keys, payload_values, temperature, gates, torch.zeros(L, dtype=dtype), options.weighting
        )
        terms = memory.terms(query_keys, log_prior=weights.log_softmax(0))
        hidden = query
        for layer in range(L):
            output = attend(hidden, key[layer], value[layer], visible, D**-0.5, memory, terms, layer)
            hidden = query + output.transpose(1, 2)
        return torch.autograd.grad(hidden.square().mean(), variables)

    before = status_bytes("VmRSS")
    seconds = []
    for _ in range(1 if reference else 1 + options.repeats):
        start = time.perf_counter()
        gradients = step()
        seconds.append(time.perf_counter() - start)
    return {
        "seconds": round(statistics.median(seconds[-options.repeats :]), 4),
        "peak_bytes": status_bytes("VmHWM") - before,
        "gradients": [gradient.flatten().tolist() for gradient in gradients],
    }


def _relative_error(gradient: list[float], expected: list[float]) -> float:
    truth = torch.tensor(expected, dtype=torch.float64)
    return float((torch.tensor(gradient, dtype=torch.float64) - truth).norm() / truth.norm())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=2304, help="N; 8 B + B at the paper's budget of 256")
    parser.add_argument("--payload-tokens", type=int, default=8, help="m")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="prompt tokens of a request")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--weighting", choices=("sqrt", "prior"), default="sqrt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="torch's threads; 0 leaves them as they are")
    parser.add_argument("--method", choices=tuple(METHODS), help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
