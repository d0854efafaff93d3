"""What a gate sees of a prompt: some layers' attention values of the tokens that decide.

The forward pass ends at the last of these layers. Shapes: n prompts, T tokens, t of them deciding, S layers, F = J V
features, R runs of a question's clauses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from transformers import DynamicCache

from inducekv_vllm.backbone.placeholders import placeholder_ids
from inducekv_vllm.bundle import Gate
from inducekv_vllm.gate import TurnMarks, deciding_tokens, ends_clause, last_averaged, runs_of_tokens

from ..data.examples import Example
from ..runtime.progress import track
from .loading import value_projection
from .model import Backbone, Inputs, attention_named

WORTH_IT: Final = 8  # tokens
BATCH_TOKENS: Final = 2048  # of a batch, with its padding, at most; a longer prompt is a batch of its own
READING: Final = "Reading the gate's questions"
USUAL: Final = "sdpa"  # attention of transformers, which knows what a prompt has begun with


def layers_of_gate(backbone: Backbone) -> tuple[int, ...]:
    """The layers whose values a gate looks at, ascending.

    The first knows a token alone, the one at a sixth of the depth what stands before it. The one at a third is averaged
    over tokens (see `last_averaged`). The nearest layers are taken whose KV cache keeps all of a prompt, if some do.
    """
    L = backbone.num_layers
    chosen = (0, max(1, L // 6), round(L / 3))
    kept = backbone.full_layers or range(L)
    return tuple(sorted({min(kept, key=lambda layer: abs(layer - wanted)) for wanted in chosen}))


def evidence_of(backbone: Backbone, gate: Gate, examples: Sequence[Example]) -> Tensor:
    """The evidence [n, H] float32 of questions, as the server finds it."""
    return evidence_of_prompts(backbone, gate, [backbone.encode_example(example) for example in examples])


def evidence_of_prompts(backbone: Backbone, gate: Gate, encoded: Sequence[Inputs]) -> Tensor:
    """The evidence [n, H] float32 of what `Backbone.encode` gives for each of n prompts."""
    parts = []
    if gate.prototypes.shape[1]:
        parts.append(evidence_in(gate, token_values(backbone, encoded, gate.layers, gate.marks)))
    if (means := gate.mean_scores) is not None and (words := gate.word_scores) is not None:
        asked = asked_texts(backbone, encoded, gate.layers, gate.marks, means.clause_ends)
        of_means = [means.evidence(means.center[None] if found is None else found) for found in asked.means]
        of_words = [torch.from_numpy(words.evidence(text)) for text in asked.texts]
        parts += [torch.stack(found) if found else torch.zeros(0, gate.classified) for found in (of_means, of_words)]
    return torch.cat(parts, dim=1)


def evidence_in(gate: Gate, values: Sequence[Tensor]) -> Tensor:
    """The evidence [n, S P] float32 for a gate's prototypes in what `token_values` gives."""
    scores = gate.token_scores
    found = [scores.evidence(of_prompt.float()) for of_prompt in values]
    return torch.stack(found) if found else torch.zeros(0, gate.floors.numel())


@dataclass(frozen=True)
class AskedTexts:
    """What a gate's classifiers see of n prompts."""

    means: Sequence[Tensor | None]  # [R, S, F] float32 of each, of its question's text and its runs; None without text
    texts: Sequence[str]


@torch.no_grad()
def asked_texts(
    backbone: Backbone,
    encoded: Sequence[Inputs],
    layers: Sequence[int],
    marks: TurnMarks,
    clause_ends: Collection[int],
    *,
    progress: bool = False,
) -> AskedTexts:
    """Other arguments as of `token_values`.

    Args:
        clause_ends: the tokens with which a clause ends; see `clause_ends_of`.
    """
    reader, ids = backbone.fact_reader, [inputs["input_ids"][0].tolist() for inputs in encoded]
    means: list[Tensor | None] = [None] * len(encoded)
    for row, values, text in _deciding_values(backbone, encoded, layers, marks, progress):
        if text:
            runs = runs_of_tokens([ids[row][at] for at in text], clause_ends)
            means[row] = torch.stack([values[run.start : run.stop].mean(dim=0) for run in runs]).cpu()
    return AskedTexts(means, [reader.question(of_prompt).text for of_prompt in ids])


def clause_ends_of(backbone: Backbone) -> Tensor:
    """[E] int32: the tokens with which a clause ends."""
    tokenizer = getattr(backbone.processor, "tokenizer", backbone.processor)
    tokens = tokenizer.batch_decode([[number] for number in range(len(tokenizer))])
    return torch.tensor([number for number, token in enumerate(tokens) if ends_clause(token)], dtype=torch.int32)


@dataclass(frozen=True)
class _Begun:
    """The tokens that most prompts begin with, as every layer keeps them: keys and values [1, J, length, D]."""

    token_ids: tuple[int, ...]
    layers: Sequence[tuple[Tensor, Tensor]]

    @property
    def length(self) -> int:
        return len(self.token_ids)


def _begins(token_ids: Sequence[int], text: Sequence[int], begun: _Begun | None) -> bool:
    """Whether a prompt begins so, and its question comes after."""
    return (
        begun is not None
        and bool(text)
        and text[0] >= begun.length
        and tuple(token_ids[: begun.length]) == begun.token_ids
    )


def _begun(backbone: Backbone, ids: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]) -> _Begun | None:
    """None if it is not worth it, or the model cannot go on from there."""
    fronts = Counter(tuple(of_prompt[: text[0]]) for of_prompt, text in zip(ids, texts, strict=True) if text)
    front, count = fronts.most_common(1)[0] if fronts else ((), 0)
    if backbone.kind != "text" or backbone.has_windows or backbone.has_states or len(front) < WORTH_IT or count < 2:
        return None
    with attention_named(backbone, USUAL):
        first = torch.tensor([list(front)], device=backbone.device)
        kept = backbone.model.model(input_ids=first, use_cache=True).past_key_values
    return _Begun(front, [(layer.keys, layer.values) for layer in kept.layers])


def _values_after(backbone: Backbone, inputs: Inputs, layers: Sequence[int], begun: _Begun) -> Tensor:
    """The layers' attention values [n, T - length, S, F] of the tokens behind what the prompts begin with."""
    n, kept = len(inputs["input_ids"]), DynamicCache()
    for number, (keys, values) in enumerate(begun.layers[: layers[-1] + 1]):
        kept.update(keys.expand(n, -1, -1, -1).contiguous(), values.expand(n, -1, -1, -1).contiguous(), number)

    def run() -> None:
        rest = inputs["input_ids"][:, begun.length :]
        positions = torch.arange(begun.length, begun.length + rest.shape[1], device=backbone.device)
        with attention_named(backbone, USUAL):
            backbone.model.model(
                input_ids=rest, position_ids=positions.expand(n, -1), past_key_values=kept, use_cache=True
            )

    return _values_of(backbone, layers, run)


@torch.no_grad()
def token_values(
    backbone: Backbone,
    encoded: Sequence[Inputs],
    layers: Sequence[int],
    marks: TurnMarks,
    *,
    dtype: torch.dtype = torch.float32,
    progress: bool = False,
) -> list[Tensor]:
    """The values [t, S, F] of each prompt, the last layer averaged.

    Args:
        encoded: what `Backbone.encode` gives for each prompt.
        layers: [S], ascending.
    """
    found: list[Tensor] = [torch.empty(0)] * len(encoded)
    for row, values, text in _deciding_values(backbone, encoded, layers, marks, progress):
        found[row] = last_averaged(values, len(text)).to("cpu", dtype)
    return found


def _deciding_values(
    backbone: Backbone, encoded: Sequence[Inputs], layers: Sequence[int], marks: TurnMarks, progress: bool
) -> Iterator[tuple[int, Tensor, list[int]]]:
    """Each prompt's row, the values [t, S, F] float32 of its text and media, and where its text is.

    What most prompts of a model for text begin with is computed once.
    """
    placeholders = placeholder_ids(backbone.model.config)
    ids = [inputs["input_ids"][0].tolist() for inputs in encoded]
    deciding = [deciding_tokens(of_prompt, marks, placeholders) for of_prompt in ids]
    begun = _begun(backbone, ids, [text for text, _ in deciding])
    begins = [_begins(of_prompt, text, begun) for of_prompt, (text, _) in zip(ids, deciding, strict=True)]
    for after in (begun, None) if any(begins) else (None,):
        chosen = [row for row, so in enumerate(begins) if so == (after is not None)]
        skipped = 0 if after is None else after.length
        for batch in track(_batches([len(ids[row]) - skipped for row in chosen]), READING, progress):
            rows = [chosen[at] for at in batch]
            inputs = backbone.collate([encoded[row] for row in rows])
            values = (
                _values(backbone, inputs, layers) if after is None else _values_after(backbone, inputs, layers, after)
            )
            for row, of_prompt in zip(rows, values, strict=True):  # [T - skipped, S, F]
                text, media = deciding[row]
                yield row, of_prompt[[at - skipped for at in text + media]].float(), text


class _Enough(Exception):
    """Ends a forward pass."""


def _values(backbone: Backbone, inputs: Inputs, layers: Sequence[int]) -> Tensor:
    """The layers' attention values [n, T, S, F], not rotated."""
    return _values_of(backbone, layers, lambda: backbone.hidden_states(inputs))


def _values_of(backbone: Backbone, layers: Sequence[int], run: Callable[[], object]) -> Tensor:
    """What a forward pass has as the layers' attention values; it ends at the last of them."""
    kept: list[Tensor] = []

    def keep(module: torch.nn.Module, arguments: Any, output: Tensor) -> None:
        kept.append(output.flatten(2))
        if len(kept) == len(layers):
            raise _Enough

    modules: list[Any] = backbone.attention_layers()
    handles = [_gives_values(modules[layer]).register_forward_hook(keep) for layer in layers]
    try:
        run()
    except _Enough:
        pass
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack(kept, dim=2)


def _gives_values(attention: Any) -> Any:
    """The part of a layer's attention whose output is what the KV cache keeps as a token's values."""
    parts = (getattr(attention, name, None) for name in ("kv_a_layernorm", "v_norm"))  # of latents, of Gemma 4
    return next((part for part in parts if part is not None), None) or value_projection(attention)


def _batches(lengths: Sequence[int]) -> list[list[int]]:
    """Rows of about one length together."""
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batches and (len(batches[-1]) + 1) * lengths[row] <= BATCH_TOKENS:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches
