"""One low-rank expert for each task, frozen afterwards, mixed for each request: HiDe-LLaVA, and a stand-in for SMoE.

    y = W x + 2 sum_e w_e B_e A_e x,   w [E] of the request

Each task has an equal share of the bytes of the other adapters. There is no relevance gate.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import safetensors.torch
import torch
from torch import Tensor, nn

from benchmarks.fit import Penalty
from benchmarks.lora_adapter import FLOAT16_BYTES, memory_bytes
from benchmarks.research.continual.methods.lora import ADAPTER, AdapterTraining, Lora
from benchmarks.research.continual.methods.method import Artifact, Kind, RunContext
from benchmarks.research.continual.methods.mixture import put_in
from benchmarks.research.continual.methods.prompts import PromptHook, embedded, mean_of, picture_tokens, text_tokens
from benchmarks.research.continual.suites import TaskData
from selector.backbone.loading import decoder
from selector.backbone.model import Backbone, Inputs
from selector.data.examples import Example
from selector.runtime.files import replace_file

EXPERTS = "experts"
ORDER = "order.txt"  # the tasks, one a line
MEANS = "means.safetensors"
SCALE = 2.0  # alpha / rank of the other adapters
TEMPERATURE = 0.1  # of HiDe's softmax
PEFT_PREFIX = "base_model.model."
Pair = tuple[Tensor, Tensor]  # A [E, rank, in], B [E, out, rank]
Experts = dict[str, Pair]  # by the layer's name


class Mixed(nn.Module):
    """A linear layer with E experts beside it; `weights` gives those of the running batch, [n, E]."""

    def __init__(self, layer: nn.Linear, experts: Pair, weights: Callable[[], Tensor]) -> None:
        super().__init__()
        self.layer, self.weights = layer, weights
        self.down, self.up = experts

    def forward(self, x: Tensor) -> Tensor:
        """[n, T, out] from x [n, T, in]."""
        inner = torch.einsum("nti,eki->ntek", x, self.down.to(x)) * self.weights()[:, None, :, None].to(x)
        y: Tensor = self.layer(x)
        return y + SCALE * torch.einsum("ntek,eok->nto", inner, self.up.to(x))


@dataclass(frozen=True)
class TaskExperts(Lora):
    """A stream of experts; a subclass says how they are mixed."""

    kind: ClassVar[Kind] = "attached"
    attach: ClassVar[str] = ""

    def bytes_allowed(self, backbone: Backbone, context: RunContext) -> int:
        together = memory_bytes(backbone, context.budget, self.payload_tokens, gated_tasks=0)
        return together // context.num_tasks - self.bytes_beside(backbone)

    def bytes_beside(self, backbone: Backbone) -> int:
        """Of what `remember` writes for a task."""
        return 0

    def learn(self, task: TaskData, previous: Path | None, out: Path, context: RunContext) -> Artifact:
        drawn = replace(context, seed=context.seed * context.num_tasks + context.number)  # each expert by itself
        learnt = super().learn(task, None, out, drawn)
        folder, names = out / EXPERTS, [task.name]
        if previous is None:
            folder.mkdir()
        else:
            shutil.copytree(previous / EXPERTS, folder)
            names = [*(folder / ORDER).read_text().split("\n"), task.name]
        (out / ADAPTER).rename(folder / task.name)
        replace_file(folder / ORDER, "\n".join(names).encode())
        size = learnt.stored_bytes * len(names) + self.remember(task, folder, context)
        return replace(learnt, kind=self.kind, path=EXPERTS, stored_bytes=size, attach=self.attach)

    def remember(self, task: TaskData, folder: Path, context: RunContext) -> int:
        """Writes what mixes the experts beside them; returns its bytes."""
        return 0


def read_experts(folder: Path) -> Experts:
    """The experts of all tasks, in the order of the stream."""
    names = (folder / ORDER).read_text().split("\n")
    files = [safetensors.torch.load_file(folder / name / "adapter_model.safetensors") for name in names]
    layers = [name.removesuffix(".lora_A.weight") for name in files[0] if name.endswith(".lora_A.weight")]

    def stacked(layer: str, part: str) -> Tensor:
        return torch.stack([file[f"{layer}.{part}.weight"].float() for file in files])

    return {layer.removeprefix(PEFT_PREFIX): (stacked(layer, "lora_A"), stacked(layer, "lora_B")) for layer in layers}


@dataclass(frozen=True)
class Hide(TaskExperts):
    """HiDe-LLaVA (Guo et al., 2025): experts are fused in all layers but the last, which mixes them by similarity.

    Below the last layer the sum of all A meets the sum of all B, cross terms included, as published. The last layer's
    weights are softmax(s / 0.1), s the mean cosine of the prompt's picture and text with their means over each task's
    training examples. Published features are CLIP's; these are the model's own first-layer inputs. `released` starts
    the means as the published code does: a hundredth sample of noise, and counts in bfloat16.
    """

    attach: ClassVar[str] = f"{__name__}:attach_hide"
    name: str = "hide"
    means: Literal["exact", "released"] = "exact"

    def bytes_beside(self, backbone: Backbone) -> int:
        return 2 * backbone.hidden_size * FLOAT16_BYTES

    def remember(self, task: TaskData, folder: Path, context: RunContext) -> int:
        """Means of pictures and texts, [tasks, 2, d] float16."""
        features = features_of(Backbone.load(context.model), task.train)  # [examples, 2, d]
        own = features.mean(0) if self.means == "exact" else released_mean(features, context.seed)
        means = own[None].half()
        if (folder / MEANS).exists():
            means = torch.cat([safetensors.torch.load_file(folder / MEANS)["means"], means])
        replace_file(folder / MEANS, safetensors.torch.save({"means": means}))
        return means.nbytes


def released_mean(features: Tensor, seed: int, batch: int = 24) -> Tensor:
    """A running mean as the published code keeps it: [2, d] of [examples, 2, d]. Its count stops growing at 8192."""
    generator = torch.Generator().manual_seed(seed)
    mean, count = 0.1 * torch.randn(features.shape[1:], generator=generator), torch.tensor(1.0, dtype=torch.bfloat16)
    for part in features.split(batch):
        total = mean * count.float() + part.sum(0)
        count = count + len(part)
        mean = total / count.float()
    return mean


def features_of(backbone: Backbone, examples: Sequence[Example]) -> Tensor:
    """Mean first-layer inputs of each example's pictures and of its text: [examples, 2, d] float32."""
    return torch.cat([features(backbone, backbone.encode_example(example)) for example in examples])


def features(backbone: Backbone, inputs: Inputs) -> Tensor:
    """[n, 2, d] float32; 0 for a prompt without pictures."""
    hidden, mask = embedded(backbone, inputs), inputs["attention_mask"].bool()
    pictures = mask & picture_tokens(backbone, inputs["input_ids"])
    return torch.stack([mean_of(hidden, pictures), mean_of(hidden, mask & ~pictures)], dim=1)


def similarity_weights(found: Tensor, means: Tensor) -> Tensor:
    """[n, E] from features [n, 2, d] and the tasks' means [E, 2, d]."""
    cosines = torch.cosine_similarity(found[:, None], means[None].float(), dim=-1)  # [n, E, 2]
    return (cosines.mean(-1) / TEMPERATURE).softmax(-1)


def attach_hide(backbone: Backbone, folder: Path) -> None:
    experts, means = read_experts(folder), safetensors.torch.load_file(folder / MEANS)["means"]
    hook = PromptHook(backbone, lambda inputs: similarity_weights(features(backbone, inputs), means))
    modules = {module: name for name, module in backbone.model.named_modules()}
    top = modules[decoder(backbone.model).layers[-1]] + "."

    def mixed(name: str, layer: nn.Linear) -> Mixed:
        if name.startswith(top):
            return Mixed(layer, experts[name], decided(hook))
        down, up = (part.sum(0, keepdim=True) for part in experts[name])
        return Mixed(layer, (down, up), lambda: torch.ones(1, 1))

    put_in(backbone, experts, mixed)


@dataclass(frozen=True)
class SmoeStandIn(TaskExperts):
    """A stand-in for SMoE (Zhang et al., 2025): the expert that predicts the prompt's text best answers.

    Of the paper this has the domain-specific autoregressive loss, loss + `strength` times the mean NLL of the prompt's
    text, and the choice by it. Its per-token thresholds and its balance loss are missing, whose numbers are not known.
    """

    attach: ClassVar[str] = f"{__name__}:attach_smoe"
    name: str = "smoe_stand_in"
    strength: float = 1.0

    def penalty(self, training: AdapterTraining) -> Penalty | None:
        backbone, scorer = training.scorer.backbone, training.scorer

        def reconstruction(batch: Sequence[Example], predicted: Sequence[Tensor]) -> Tensor:
            inputs = backbone.collate([scorer.prefix(example) for example in batch])
            return self.strength * text_nll(backbone, inputs).mean()

        return reconstruction


def text_nll(backbone: Backbone, inputs: Inputs) -> Tensor:
    """Mean NLL of the text tokens of n prompts, given what is before them: [n] float32."""
    logprobs = backbone.model(**inputs, use_cache=False).logits[:, :-1].float().log_softmax(-1)
    predicted = logprobs.gather(2, inputs["input_ids"][:, 1:, None])[:, :, 0]  # [n, T - 1]
    counted = text_tokens(backbone, inputs)
    counted = (counted[:, 1:] & inputs["attention_mask"][:, :-1].bool()).float()
    return -(predicted * counted).sum(1) / counted.sum(1).clamp(min=1)


def attach_smoe(backbone: Backbone, folder: Path) -> None:
    experts = read_experts(folder)
    count = len(next(iter(experts.values()))[0])
    trying: list[Tensor] = []  # the weights of the pass under way

    @torch.no_grad()
    def choose(inputs: Inputs) -> Tensor:
        """One expert for each of n prompts: [n, E]."""
        losses = []
        for expert in torch.eye(count):
            trying.append(expert[None])
            losses.append(text_nll(backbone, inputs))
            trying.clear()
        return torch.eye(count)[torch.stack(losses).argmin(0)]

    hook = PromptHook(backbone, choose)
    chosen = decided(hook)
    put_in(
        backbone, experts, lambda name, layer: Mixed(layer, experts[name], lambda: trying[0] if trying else chosen())
    )


def decided(hook: PromptHook[Tensor]) -> Callable[[], Tensor]:
    def weights() -> Tensor:
        assert hook.decided is not None, "a layer ran outside of its model"
        return hook.decided

    return weights
