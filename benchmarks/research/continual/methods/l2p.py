"""L2P (Wang et al., 2022): a pool of prompts with keys; those nearest to a request go before its tokens.

A request's query is the frozen model's feature of it, the mean last hidden state r(x), and the `top` prompts whose keys
are nearest by cosine are put before its first token. Prompts and keys are trained over the stream on

    loss - pull sum over the chosen of cos(query, key)

Pool, length, top and pull are those published for CIFAR-100. A prompt takes its place in the model's context as
tokens do, so positions, masks and caches are the model's own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import safetensors.torch
import torch
from torch import Tensor, nn

from benchmarks.fit import Fit
from benchmarks.lora_adapter import FLOAT16_BYTES, memory_bytes
from benchmarks.research.continual.methods.method import Artifact, Kind, RunContext
from benchmarks.research.continual.methods.prompts import PromptHook, WholePrompts
from benchmarks.research.continual.suites import TaskData
from inducekv_vllm.errors import ConfigError
from selector.backbone.model import Backbone, Inputs, pool_retrieval_keys
from selector.data.examples import Example
from selector.refined.settings import Precision
from selector.runtime.files import replace_file

FILE = "pool.safetensors"
ATTACH = f"{__name__}:attach"


class Pool(nn.Module):
    """M prompts of length l; with `put_in`, the nearest of them precede every prompt of a backbone."""

    def __init__(self, prompts: Tensor, keys: Tensor, top: int) -> None:
        super().__init__()
        self.prompts = nn.Parameter(prompts)  # [M, l, d]
        self.keys = nn.Parameter(keys)  # [M, d]
        self.top = top
        self.pulled: Tensor | None = None  # of the running batch, [n]: the sum of the chosen keys' cosines

    @property
    def length(self) -> int:
        """Tokens before a request's own."""
        return self.top * self.prompts.shape[1]

    def choose(self, queries: Tensor) -> Tensor:
        """[n, length, d] from queries [n, d]."""
        cosines = torch.cosine_similarity(queries[:, None], self.keys[None].float(), dim=-1)  # [n, M]
        nearest = cosines.topk(self.top)
        self.pulled = nearest.values.sum(1)
        return self.prompts[nearest.indices].flatten(1, 2)


def put_in(backbone: Backbone, pool: Pool) -> None:
    """Writes the prompts' places into the chat template, and the prompts into the places."""
    for each in {id(each): each for each in (backbone.processor, backbone.tokenizer)}.values():
        if getattr(each, "chat_template", None):
            each.chat_template = place(backbone) * pool.length + each.chat_template

    def decide(inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Where each of n prompts begins, [n], and what is put there, [n, length, d]."""
        mask = inputs["attention_mask"]
        begins = mask.argmax(1)
        at = begins[:, None] + torch.arange(pool.length, device=mask.device)
        with torch.no_grad():
            unseen = mask.scatter(1, at, 0)
            queries = pool_retrieval_keys(backbone.hidden_states(inputs | {"attention_mask": unseen}), unseen)
        return begins, pool.choose(queries)

    hook = PromptHook(backbone, decide)

    def embed(module: Any, args: Any, output: Tensor) -> Tensor:
        """Runs for each batch of tokens: [n, T, d]. A pass that finds the query has none decided yet."""
        if hook.decided is None or hook.decoding or hook.deciding:
            return output
        begins, chosen = hook.decided
        at = begins[:, None] + torch.arange(pool.length, device=output.device)
        return output.scatter(1, at[:, :, None].expand_as(chosen), chosen.to(output))

    backbone.model.get_input_embeddings().register_forward_hook(embed)


def place(backbone: Backbone) -> str:
    """The text of a token that stands where a prompt's token goes; its embedding is never seen."""
    tokenizer = backbone.tokenizer
    token: str = tokenizer.pad_token or tokenizer.eos_token
    return token


@dataclass(frozen=True)
class L2p:
    """The pool over the stream, with nothing else against forgetting."""

    kind: ClassVar[Kind] = "attached"
    name: str = "l2p"
    pool: int = 10  # M
    length: int = 10  # l
    top: int = 4
    pull: float = 1.0
    steps: int = 300
    learning_rate: float = 0.03
    batch_size: int = 16
    precision: Precision = "bfloat16"
    payload_tokens: int = 8  # m of the memory whose bytes the method may take

    def learn(self, task: TaskData, previous: Path | None, out: Path, context: RunContext) -> Artifact:
        backbone = Backbone.load(context.model)
        allowed = memory_bytes(backbone, context.budget, self.payload_tokens, context.num_tasks)
        pool = self.new_pool(backbone, context.seed) if previous is None else read_pool(previous / FILE)
        if (size := FLOAT16_BYTES * sum(each.numel() for each in pool.parameters())) > allowed:
            raise ConfigError(
                f"{self.pool} prompts of {self.length} tokens take {size} bytes, the budget allows {allowed}"
            )
        put_in(backbone, pool)
        began = time.monotonic()

        def pulling(batch: Sequence[Example], predicted: Sequence[Tensor]) -> Tensor:
            assert pool.pulled is not None
            return -self.pull * pool.pulled.mean()

        fit = Fit(
            *(WholePrompts(backbone), list(pool.parameters()), task.train, (), self.batch_size),
            *((context.seed, context.number), self.precision == "bfloat16", pulling),
        )
        report = {
            "bytes_allowed": allowed,
            "compute": {"steps": self.steps, "batch_size": self.batch_size},
            "history": fit.run(self.learning_rate, self.steps),
            "validation_nll": fit.mean_loss(task.validation),
            "validation_accuracy": fit.accuracy(task.validation),
        }
        tensors = {name: tensor.detach().half() for name, tensor in pool.state_dict().items()}
        replace_file(out / FILE, safetensors.torch.save(tensors, metadata={"top": str(self.top)}))
        report["seconds"] = round(time.monotonic() - began, 1)
        return Artifact(self.kind, FILE, size, report, attach=ATTACH)

    def new_pool(self, backbone: Backbone, seed: int) -> Pool:
        """Prompts begin as embeddings of random tokens, which have the scale that the model expects."""
        generator = torch.Generator().manual_seed(seed)
        table = backbone.model.get_input_embeddings().weight.detach().float()
        rows = torch.randint(len(table), (self.pool, self.length), generator=generator)
        keys = torch.randn(self.pool, backbone.hidden_size, generator=generator)
        return Pool(table[rows].clone(), keys / keys.norm(dim=1, keepdim=True), self.top)


def read_pool(path: Path) -> Pool:
    with safetensors.safe_open(str(path), framework="pt") as file:
        prompts, keys = (file.get_tensor(name).float() for name in ("prompts", "keys"))
        return Pool(prompts, keys, int(file.metadata()["top"]))


def attach(backbone: Backbone, path: Path) -> None:
    put_in(backbone, read_pool(path).requires_grad_(False))
