"""What teaching a model of real size takes: memory and time, measured at a few layers and continued to all of them.

    python -m benchmarks.research.selector_sizes [--model qwen3-vl-4b] [--depths 2 4 6] [--tokens 256] [--output FILE]

Each depth is a process of its own, with random weights in bfloat16 and one thread. A line through the first two depths
predicts the last one, which says how far to trust it for the whole model. *Activations* are what autograd keeps of one
example for the backward pass of memory that acts on the whole prompt; nothing depends on the device there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.geometries import GEOMETRIES, Geometry
from benchmarks.machine import describe_machine

if TYPE_CHECKING:
    from inducekv_vllm.bundle.activation import Activation
    from selector.backbone.model import Backbone
    from selector.backbone.scoring import Scorer
    from selector.data.examples import Example
    from selector.refined.training import TrainingProblem

RESULTS: Final = Path(__file__).parents[1] / "results" / "selector_sizes.json"
MEASURED: Final = ("load, s", "extract, s", "step of the prompt, s", "step of the answer, s", "activations, MiB")
MIB: Final = 2**20


def measure(geometry: Geometry, tokens: int, folder: Path) -> dict[str, float]:
    """Times for one example, and the bytes that autograd keeps of it."""
    import torch

    from benchmarks.serving.model import make_model
    from selector.backbone.extraction import extract
    from selector.backbone.model import Backbone
    from selector.backbone.scoring import Scorer
    from selector.refined.settings import RefinedSettings
    from selector.refined.training import Training

    torch.set_num_threads(1)
    path = make_model(geometry, "bfloat16", folder)
    loading, backbone = timed(lambda: Backbone.load(path, torch.bfloat16))
    example = example_of(backbone, tokens)
    extracting, _ = timed(lambda: extract(backbone, [example], 16))
    scorer, settings = Scorer(backbone), RefinedSettings(batch_size=1, precision="bfloat16")
    steps, kept = dict[str, float](), 0
    activations: tuple[Activation, ...] = "prompt", "generation"
    for activation in activations:
        training = Training(problem_of(scorer, [example], activation), settings, 0.1)
        training.take_step()  # the untouched model's part is kept from here on
        steps[activation], _ = timed(training.take_step)
        if activation == "prompt":
            kept = kept_bytes(training.take_step, backbone.model.parameters())
    return dict(zip(MEASURED, (loading, extracting, steps["prompt"], steps["generation"], kept / MIB), strict=True))


def problem_of(scorer: Scorer, examples: Sequence[Example], activation: Activation) -> TrainingProblem:
    """One entry of decoupled memory, made of the first example, which all of them retrieve."""
    import torch

    from selector.backbone.extraction import extract, extract_keys
    from selector.backbone.injection import TensorMemory
    from selector.backbone.scoring import Questions
    from selector.refined.training import TrainingProblem

    backbone = scorer.backbone
    entries = extract(backbone, examples[:1], 16)
    gates, bias = torch.full((backbone.num_layers,), 0.5), torch.zeros(backbone.num_layers)
    payloads = entries.payload_keys, entries.payload_values
    memory = TensorMemory(entries.keys, *payloads, torch.tensor(0.07), gates, bias, "uniform", "decoupled")
    first_active = scorer.first_active(examples, [activation] * len(examples))
    questions = Questions(examples, extract_keys(backbone, examples), first_active)
    return TrainingProblem(scorer, memory, questions, torch.zeros(len(examples), 1), questions, False)


def kept_bytes(step: Callable[[], Any], parameters: Iterable[Any]) -> int:
    """What autograd keeps in a step's forward pass, without the model's weights."""
    import torch

    weights = {each.untyped_storage().data_ptr() for each in parameters}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step()
    return sum(kept.values())


def example_of(backbone: Backbone, tokens: int) -> Example:
    """A question of about so many tokens."""
    from selector.data.examples import Example

    text = "How many red circles are there?"
    while True:
        example = Example("a", "a", ({"role": "user", "content": [{"type": "text", "text": text}]},), (), "two", "a")
        if backbone.encode_example(example)["input_ids"].shape[1] >= tokens:
            return example
        text += " How many?"


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def continued(depths: Sequence[int], values: Sequence[float], depth: int) -> float:
    """The line through the first two depths, at another one."""
    slope = (values[1] - values[0]) / (depths[1] - depths[0])
    return values[0] + slope * (depth - depths[0])


def weights_mib(geometry: Geometry, vocabulary: int) -> float:
    """The language model's weights in 16 bits, with one matrix for embeddings and output."""
    g = geometry
    attention = g.hidden_size * g.head_size * (2 * g.heads + 2 * g.kv_heads)
    layer = attention + 3 * g.hidden_size * g.intermediate_size
    return 2 * (g.layers * layer + vocabulary * g.hidden_size) / MIB


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=GEOMETRIES, default="qwen3-vl-4b")
    parser.add_argument("--depths", type=int, nargs="+", default=[2, 4, 6], help="three or more, ascending")
    parser.add_argument("--tokens", type=int, default=256, help="of a prompt")
    parser.add_argument("--vocabulary", type=int, default=151_936, help="of the whole model, for its weights")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    whole = GEOMETRIES[args.model]
    if args.child is not None:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(replace(whole, layers=args.child), args.tokens, Path(folder, "model"))))
        return 0
    command = [
        sys.executable,
        "-m",
        "benchmarks.research.selector_sizes",
        "--model",
        args.model,
        "--tokens",
        str(args.tokens),
    ]
    rows: list[dict[str, float]] = []
    for depth in args.depths:
        done = subprocess.run([*command, "--child", str(depth)], capture_output=True, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    print(f"| layers | {' | '.join(MEASURED)} |\n|{'---|' * (len(MEASURED) + 1)}")
    for depth, row in zip(args.depths, rows, strict=True):
        print(f"| {depth} | {' | '.join(f'{row[name]:.2f}' for name in MEASURED)} |")
    predicted = {name: continued(args.depths, [row[name] for row in rows], args.depths[-1]) for name in MEASURED}
    all_layers = {name: continued(args.depths, [row[name] for row in rows], whole.layers) for name in MEASURED}
    print(f"| {args.depths[-1]}, predicted | {' | '.join(f'{predicted[name]:.2f}' for name in MEASURED)} |")
    print(f"| {whole.layers}, continued | {' | '.join(f'{all_layers[name]:.2f}' for name in MEASURED)} |")
    weights = weights_mib(whole, args.vocabulary)
    print(
        f"\n{args.model}: weights in bfloat16 {weights:.0f} MiB, activations of one example of {args.tokens} tokens "
        f"{all_layers['activations, MiB']:.0f} MiB"
    )
    details = {"model": args.model, "tokens": args.tokens, "weights_mib": weights, "machine": describe_machine()}
    measured = dict(zip(map(str, args.depths), rows, strict=True))
    args.output.write_text(
        json.dumps({**details, "measured": measured, "predicted": predicted, "all_layers": all_layers}, indent=1) + "\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
