"""SMoLoRA (Wang et al., 2025): of each layer's experts, half see and half read, and one of each half answers.

    y = W x + 2 (m_1(x) p_i B_i A_i x + m_2(x) q_j B_j A_j x),   m(x) = softmax(M x) for each token

i is the likeliest of p = softmax(V mean(x)) over the layer's tokens of the prompt, j of q = softmax(R t), t the mean
embedding of the prompt's text (published: a MiniLM embedding of the instruction). `routing="trained"` multiplies each
expert by its probability, so that V and R are trained. The published code chooses by a constant instead, so V and R
stay as they were drawn: `routing="released"`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from benchmarks.lora_adapter import linear_layers
from benchmarks.research.continual.methods.mixture import SCALE, Mixture, MoeLora, assign, put_in
from inducekv_vllm.backbone.placeholders import placeholder_ids
from selector.backbone.model import Backbone
from selector.backbone.scoring import Scorer
from selector.data.examples import Example

Routing = Literal["trained", "released"]


class WholePrompts(Scorer):
    """Runs the whole model at every step: what is chosen for a prompt does not reach the tails of examples."""

    def _has_tails(self, example: Example, first_active: int) -> bool:
        return False


@dataclass(frozen=True)
class Prompted:
    """What routers know of n prompts."""

    text: Tensor  # [n, d], the mean embedding of the text
    tokens: Tensor  # [n, T] bool, which are no padding


class PromptHook:
    """Looks at each batch of prompts as it enters the model, and keeps what routers know of it for their answers."""

    def __init__(self, backbone: Backbone) -> None:
        self.prompts: Prompted | None = None
        self.decoding = False  # a step of a generation, after its prompts
        backbone.model.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        cache = kwargs.get("past_key_values")
        self.decoding = cache is not None and cache.get_seq_length() > 0
        if self.decoding:
            return
        ids, mask = kwargs["input_ids"], kwargs.get("attention_mask")  # [n, T]
        tokens = torch.ones_like(ids).bool() if mask is None else mask.bool()  # generation leaves out one without zeros
        pictures = torch.tensor(sorted(placeholder_ids(model.config)), dtype=ids.dtype, device=ids.device)
        embeddings = model.get_input_embeddings()(ids).detach()
        self.prompts = Prompted(mean_of(embeddings, tokens & ~torch.isin(ids, pictures)), tokens)


def mean_of(values: Tensor, chosen: Tensor) -> Tensor:
    """The mean of the chosen tokens, [n, d] float32 of values [n, T, d] and chosen [n, T]; 0 of none."""
    weights = chosen.float()[:, :, None]
    return (values.float() * weights).sum(1) / weights.sum(1).clamp(min=1)


class Halves(Mixture):
    """A linear layer with E experts of rank k; the first E / 2 are chosen by the layer's tokens, the others by text."""

    parts: ClassVar = ("down", "up", "router", "reading", "mixing")

    def __init__(
        self, layer: nn.Linear, experts: int, rank: int, hidden_size: int, hook: PromptHook, routing: Routing
    ) -> None:
        super().__init__(layer, experts, rank)
        half = experts // 2
        self.router = nn.Parameter(torch.empty(half, layer.in_features))  # V
        self.reading = nn.Parameter(torch.empty(half, hidden_size))  # R
        self.mixing = nn.Parameter(torch.empty(2, layer.in_features))  # M
        for matrix in (self.router, self.reading, self.mixing):
            nn.init.kaiming_uniform_(matrix, a=5**0.5)
        self.hook, self.routing = hook, routing
        self._of_prompts: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[n, T, out] from x [n, T, in]."""
        if not self.hook.decoding or self._of_prompts is None:
            prompts = self.hook.prompts
            assert prompts is not None, "a layer ran outside of its model"
            seen = mean_of(x, prompts.tokens) @ self.router.T.float()
            self._of_prompts = self.first(seen), self.first(prompts.text @ self.reading.T.float())  # [n, E / 2] each
        mixing = (x.float() @ self.mixing.T.float()).softmax(-1)  # [n, T, 2]
        halves = [mixing[:, :, at, None] * half[:, None] for at, half in enumerate(self._of_prompts)]
        inner = torch.einsum("nti,eki->ntek", x, self.down.to(x)) * torch.cat(halves, -1)[..., None].to(x)
        y: Tensor = self.layer(x)
        return y + SCALE * torch.einsum("ntek,eok->nto", inner, self.up.to(x))

    def first(self, logits: Tensor) -> Tensor:
        """The probability of the likeliest, 1 as released, and 0 for all others: [n, E / 2]."""
        one = torch.zeros_like(logits).scatter(1, logits.argmax(1, keepdim=True), 1.0)
        return one if self.routing == "released" else one * logits.softmax(1)


@dataclass(frozen=True)
class SmoLora(MoeLora):
    """Both halves of the experts over the stream, with nothing else against forgetting."""

    attach: ClassVar[str] = f"{__name__}:attach"
    name: str = "smolora"
    routing: Routing = "trained"

    def put_in(self, backbone: Backbone, rank: int) -> tuple[Mapping[str, Mixture], Scorer]:
        hook, names = PromptHook(backbone), linear_layers(backbone, self.modules)
        sizes = self.experts, rank, backbone.hidden_size
        halves = put_in(backbone, names, lambda _, layer: Halves(layer, *sizes, hook, self.routing))
        return halves, WholePrompts(backbone)

    def router_numbers(self, layer: nn.Linear, hidden_size: int) -> int:
        return self.experts // 2 * (layer.in_features + hidden_size) + 2 * layer.in_features

    def metadata(self) -> dict[str, str]:
        return {"routing": self.routing}


def attach(backbone: Backbone, path: Path) -> None:
    with safetensors.safe_open(str(path), framework="pt") as file:
        routing: Routing = file.metadata()["routing"]
    tensors, hook = safetensors.torch.load_file(path), PromptHook(backbone)
    names = sorted({name.rpartition(".")[0] for name in tensors})
    experts, rank, _ = tensors[f"{names[0]}.down"].shape
    sizes = experts, rank, backbone.hidden_size
    assign(put_in(backbone, names, lambda _, layer: Halves(layer, *sizes, hook, routing)), tensors)
    backbone.model.eval()
