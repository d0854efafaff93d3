"""A mixture of low-rank experts in every linear layer of the language model: MoELoRA of CoIN.

    y = W x + scale sum_e w_e(x) B_e A_e x,   w(x) = softmax(R x) over all experts, for each token

Experts and routers train on one task after the other (Chen et al., 2024, "CoIN"; nothing balances them). Together they
take the bytes of the other adapters. vLLM serves no such layers, so answers come from this process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

import safetensors.torch
import torch
from torch import Tensor, nn

from benchmarks.fit import Fit
from benchmarks.lora_adapter import FLOAT16_BYTES, Modules, linear_layers, memory_bytes
from benchmarks.research.continual.methods.method import Artifact, Kind, RunContext
from benchmarks.research.continual.suites import TaskData
from inducekv_vllm.errors import ConfigError
from selector.backbone.model import Backbone
from selector.backbone.scoring import Scorer
from selector.refined.settings import Precision
from selector.runtime.files import replace_file

FILE = "experts.safetensors"
SCALE = 2.0  # of what the experts add, as of the other adapters
Tensors = dict[str, Tensor]
Layer = TypeVar("Layer", bound=nn.Module)


class Mixture(nn.Module):
    """A linear layer with E experts of rank k beside it."""

    parts: ClassVar = ("down", "up", "router")

    def __init__(self, layer: nn.Linear, experts: int, rank: int) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Parameter(torch.empty(experts, rank, layer.in_features))  # A
        self.up = nn.Parameter(torch.zeros(experts, layer.out_features, rank))  # B
        self.router = nn.Parameter(torch.empty(experts, layer.in_features))
        for matrix in (self.down, self.router):
            nn.init.kaiming_uniform_(matrix, a=5**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """[..., out] from x [..., in]."""
        weights = (x.float() @ self.router.T.float()).softmax(dim=-1)  # [..., E]
        inner = torch.einsum("...i,eki->...ek", x, self.down.to(x)) * weights[..., None].to(x)
        y: Tensor = self.layer(x)
        return y + SCALE * torch.einsum("...ek,eok->...o", inner, self.up.to(x))


def put_in(backbone: Backbone, names: Iterable[str], make: Callable[[str, nn.Linear], Layer]) -> dict[str, Layer]:
    """Puts what `make` returns in place of each of these linear layers. The backbone runs with them from now on."""
    found = {}
    for name in names:
        layer = backbone.model.get_submodule(name)
        parent, _, own = name.rpartition(".")
        found[name] = make(name, layer).to(layer.weight.device)
        setattr(backbone.model.get_submodule(parent), own, found[name])
    return found


def tensors_of(mixtures: Mapping[str, Mixture]) -> Tensors:
    return {
        f"{name}.{part}": getattr(mixture, part).detach().half().contiguous()
        for name, mixture in mixtures.items()
        for part in mixture.parts
    }


@torch.no_grad()
def assign(mixtures: Mapping[str, Mixture], tensors: Tensors) -> None:
    for name, mixture in mixtures.items():
        for part in mixture.parts:
            getattr(mixture, part).copy_(tensors[f"{name}.{part}"])


def attach(backbone: Backbone, path: Path) -> None:
    """What a stored mixture puts on a model."""
    tensors = safetensors.torch.load_file(path)
    names = sorted({name.rpartition(".")[0] for name in tensors})
    experts, rank, _ = tensors[f"{names[0]}.down"].shape
    assign(put_in(backbone, names, lambda _, layer: Mixture(layer, experts, rank)), tensors)
    backbone.model.eval()


@dataclass(frozen=True)
class MoeLora:
    """A dense mixture over the stream, with nothing against forgetting."""

    kind: ClassVar[Kind] = "attached"
    attach: ClassVar[str] = f"{__name__}:attach"
    name: str = "moe_lora"
    experts: int = 8
    steps: int = 300
    learning_rate: float = 5e-4
    batch_size: int = 16
    precision: Precision = "bfloat16"
    modules: Modules = "all"
    payload_tokens: int = 8  # m of the memory whose bytes the method may take

    def learn(self, task: TaskData, previous: Path | None, out: Path, context: RunContext) -> Artifact:
        backbone = Backbone.load(context.model)
        allowed = memory_bytes(backbone, context.budget, self.payload_tokens, context.num_tasks)
        rank = self.rank_for(backbone, allowed)
        torch.manual_seed(context.seed)
        mixtures, scorer = self.put_in(backbone, rank)
        if previous is not None:
            assign(mixtures, safetensors.torch.load_file(previous / FILE))
        parameters = [getattr(mixture, part) for mixture in mixtures.values() for part in mixture.parts]
        began = time.monotonic()
        fit = Fit(
            *(scorer, parameters, task.train, (), self.batch_size),
            *((context.seed, context.number), self.precision == "bfloat16"),
        )
        report = {
            "rank_of_an_expert": rank,
            "bytes_allowed": allowed,
            "compute": {"steps": self.steps, "batch_size": self.batch_size},
            "history": fit.run(self.learning_rate, self.steps),
            "validation_nll": fit.mean_loss(task.validation),
            "validation_accuracy": fit.accuracy(task.validation),
        }
        tensors = tensors_of(mixtures)
        replace_file(out / FILE, safetensors.torch.save(tensors, metadata=self.metadata()))
        report["seconds"] = round(time.monotonic() - began, 1)
        return Artifact(self.kind, FILE, sum(tensor.nbytes for tensor in tensors.values()), report, attach=self.attach)

    def put_in(self, backbone: Backbone, rank: int) -> tuple[Mapping[str, Mixture], Scorer]:
        """New experts in the backbone's layers, and what scores with them."""
        names = linear_layers(backbone, self.modules)
        return put_in(backbone, names, lambda _, layer: Mixture(layer, self.experts, rank)), Scorer(backbone)

    def router_numbers(self, layer: nn.Linear, hidden_size: int) -> int:
        return self.experts * layer.in_features

    def rank_for(self, backbone: Backbone, allowed: int) -> int:
        """The largest rank of an expert. Raises ConfigError: not even rank 1 fits into the bytes."""
        layers = linear_layers(backbone, self.modules).values()
        routers = FLOAT16_BYTES * sum(self.router_numbers(layer, backbone.hidden_size) for layer in layers)
        each = self.experts * FLOAT16_BYTES * sum(layer.in_features + layer.out_features for layer in layers)
        if routers + each > allowed:
            raise ConfigError(
                f"{self.experts} experts of rank 1 take {routers + each} bytes, the budget allows {allowed}"
            )
        return (allowed - routers) // each

    def metadata(self) -> dict[str, str]:
        """Written into the file beside the tensors."""
        return {}
