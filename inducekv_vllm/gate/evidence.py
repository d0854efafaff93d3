"""From a prompt to a gate's evidence: which of its tokens decide, and how close they come to the prototypes.

Those of the question decide, without system prompt, earlier turns and template. The last user turn asks the question.
Its text decides, and the media of the latest turn that has any: a conversation may be about a picture that was sent
with its first turn. A prompt without user turns, as of the completions route, decides with all of its tokens.

Tokens know their words, and the mean of some of them in a deeper layer knows what they are about, in any words. So the
last layer is averaged (`last_averaged`) before anything is compared.

Shapes: T prompt tokens, t of them deciding, S layers, F = J D features of a token (a layer's values of all J KV heads),
P prototypes of a layer, K tasks that its classifiers know, R runs of a question's clauses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, count, starmap
from typing import Final, NamedTuple

import torch
from torch import Tensor

from .clauses import runs_of_tokens
from .odds import MeanScores

WINDOW: Final = 16  # text tokens in a row, whose mean counts; about a question
PIECE: Final = 2048  # tokens whose values are held at once; 40 MB for two layers of 1024 features


def prompt_evidence(
    token_ids: Sequence[int],
    marks: TurnMarks,
    scores: TokenScores,
    placeholders: Collection[int],
    read: Callable[[list[int]], Tensor],
    add_up: Callable[[Tensor], Tensor],
    means: MeanScores | None = None,
    index: Callable[[list[int]], Tensor] = torch.tensor,
) -> Tensor:
    """The evidence [S P], or [S P + K] with that of means. A long prompt is read in pieces.

    vLLM has left no memory for all of its values.

    Args:
        placeholders: the ids of tokens that stand for media.
        read: the values [t, S, F] of the tokens at t positions.
        add_up: see `TokenScores.evidence`.
        means: the part of the gate that sees means of the question's text.
        index: numbers as int64 where the values are.
    """
    deciding, found = deciding_tokens(token_ids, marks, placeholders), list[Tensor]()
    if means is not None:
        found.append(means.evidence(_means(token_ids, deciding.text, read, means, index), add_up))
    if not scores.prototypes.shape[1]:
        return found[0]

    def of_piece(text: list[int], media: list[int]) -> Tensor:
        return scores.evidence(last_averaged(read(text + media), len(text)), add_up)

    return torch.cat([reduce(torch.maximum, starmap(of_piece, in_pieces(*deciding))), *found])


def evidence_of_texts(
    texts: Sequence[Sequence[int]],
    scores: TokenScores,
    values: Tensor,
    add_up: Callable[[Tensor], Tensor],
    means: MeanScores | None = None,
    index: Callable[[list[int]], Tensor] = torch.tensor,
) -> Tensor:
    """What `prompt_evidence` says of n prompts, side by side: [n, S P], or [n, S P + K].

    Args:
        texts: the tokens that decide of each prompt, at least `WINDOW` of text and nothing else.
        values: [t, S, F], theirs, one prompt behind the other.
        add_up, means, index: see `prompt_evidence`.
    """
    lengths, found = [len(text) for text in texts], list[Tensor]()
    starts = list(accumulate(lengths, initial=0))
    if scores.prototypes.shape[1]:
        last = [starts[n] + min(at, lengths[n] - WINDOW) for n in range(len(texts)) for at in range(lengths[n])]
        of_windows = values[:, -1].unfold(0, WINDOW, 1).mean(dim=2)  # [t - WINDOW + 1, F]
        averaged = torch.cat([values[:, :-1], of_windows[index(last)][:, None]], dim=1)
        cosines = scores.cosines(averaged, add_up)  # [t, S, P]
        found.append(above_floors(_largest_of_each(cosines, index(lengths)), scores.floors).flatten(1))
    if means is not None:
        runs = [runs_of_tokens(text, means.clause_ends) for text in texts]
        placed = zip(starts, runs, strict=False)
        shifted = [range(start + run.start, start + run.stop) for start, own in placed for run in own]
        counts = [len(own) for own in runs]
        found.append(means.evidence_of_each(_of_runs(shifted, values, index), counts, add_up, index))
    return torch.cat(found, dim=1)


def _largest_of_each(numbers: Tensor, lengths: Tensor) -> Tensor:
    """[n, 1, ...], the largest of so many rows each of numbers [t, ...]."""
    found: Tensor = torch.segment_reduce(numbers.flatten(1), "max", lengths=lengths, axis=0)
    return found.view(-1, 1, *numbers.shape[1:])


def _means(
    token_ids: Sequence[int],
    text: Sequence[int],
    read: Callable[[list[int]], Tensor],
    means: MeanScores,
    index: Callable[[list[int]], Tensor],
) -> Tensor:
    """[R, S, F], of the values of a question's text and of its runs; what is usual, if it has none."""
    if not text:
        return means.center[None]
    runs = runs_of_tokens([token_ids[at] for at in text], means.clause_ends)
    pieces = (list(text[at : at + PIECE]) for at in range(0, len(text), PIECE))
    return reduce(torch.add, (_of_runs(runs, read(piece), index, at) for at, piece in zip(count(0, PIECE), pieces)))


def _of_runs(runs: Sequence[range], values: Tensor, index: Callable[[list[int]], Tensor], start: int = 0) -> Tensor:
    """What the values [t, S, F] of the places from `start` on add to the means [R, S, F] of runs."""
    first, behind = index([*(run.start for run in runs), *(run.stop for run in runs)]).view(2, -1, 1)  # [R, 1]
    places = torch.arange(start, start + len(values), device=values.device)
    shares = ((first <= places) & (places < behind)) / (behind - first)  # [R, t]
    return torch.einsum("rt,tsf->rsf", shares, values.float())


@dataclass(frozen=True)
class TurnMarks:
    """The tokens by which a chat template marks the turns of a user."""

    begin: tuple[int, ...]  # in front of every user turn, and nowhere else; empty if the template has no such mark
    end: int | None  # the token that follows a user turn; None if it has none of its own


class QuestionTokens(NamedTuple):
    """The ascending positions of the tokens that decide; not both are empty."""

    text: list[int]
    media: list[int]


def deciding_tokens(token_ids: Sequence[int], marks: TurnMarks, placeholders: Collection[int]) -> QuestionTokens:
    """The tokens of a prompt that decide.

    Args:
        token_ids: [T], the whole prompt, at least one token.
        placeholders: the ids of tokens that stand for media.
    """
    starts = turn_starts(token_ids, marks)
    question = _turn(token_ids, starts[-1], marks)
    media = [at for at, token in enumerate(token_ids) if token in placeholders]
    if media:
        latest = max(start for start in starts if start <= media[-1]) if media[-1] >= starts[0] else 0
        media = [at for at in media if at >= latest]
    text = [at for at in question if token_ids[at] not in placeholders]
    return QuestionTokens(text, media) if text or media else QuestionTokens([len(token_ids) - 1], [])


def turn_starts(token_ids: Sequence[int], marks: TurnMarks) -> list[int]:
    """The positions at which user turns begin, after their marks; [0] for a prompt without marks."""
    length = len(marks.begin)
    if length == 0:
        return [0]
    ids = tuple(token_ids)
    first = marks.begin[0]
    found = [at + length for at, token in enumerate(ids) if token == first and ids[at : at + length] == marks.begin]
    return found or [0]


def _turn(token_ids: Sequence[int], start: int, marks: TurnMarks) -> range:
    """The positions of the turn that begins at `start`."""
    end = next((at for at in range(start, len(token_ids)) if token_ids[at] == marks.end), len(token_ids))
    return range(start, end)


@dataclass(frozen=True)
class TokenScores:
    """The part of a gate that is applied to tokens.

    Under tensor parallelism a rank has the features of its KV heads only; the sums over features are then added up over
    the ranks.
    """

    center: Tensor  # [S, F]
    scale: Tensor  # [S, F], above 0
    prototypes: Tensor  # [S, P, F], each of norm 1 over all features
    floors: Tensor  # [S, P], the cosine from which a prototype counts; at least 0, below 1

    def evidence(self, values: Tensor, add_up: Callable[[Tensor], Tensor] = lambda sums: sums) -> Tensor:
        """[S P], each from 0 to 1: how far the most similar token is above the floor of each prototype.

        Args:
            values: [t, S, F] with t at least 1, any float type, the last layer averaged.
            add_up: the sum over ranks of [t, S, P + 1].
        """
        return above_floors(self.cosines(values, add_up), self.floors).flatten()

    def cosines(self, values: Tensor, add_up: Callable[[Tensor], Tensor]) -> Tensor:
        """[t, S, P], of tokens and prototypes; see `evidence`."""
        tokens = (values.to(self.center.dtype) - self.center) * self.scale  # [t, S, F]
        dots = torch.einsum("tsf,spf->tsp", tokens, self.prototypes)
        sums = add_up(torch.cat([dots, tokens.square().sum(dim=2, keepdim=True)], dim=2))  # [t, S, P + 1]
        norms = sums[..., -1:].clamp(min=torch.finfo(sums.dtype).tiny).sqrt()  # [t, S, 1]
        return sums[..., :-1] / norms


def above_floors(cosines: Tensor, floors: Tensor) -> Tensor:
    """Evidence [..., S, P] from the cosines [..., t, S, P] of tokens and prototypes; `floors` [S, P].

    A token that does not count has a cosine of -1.
    """
    return torch.relu(cosines.amax(dim=-3) - floors) / (1 - floors)


def last_averaged(values: Tensor, num_text: int) -> Tensor:
    """`values` [t, S, F] with means in the place of the last layer's values.

    The means are those of every `WINDOW` text tokens in a row, or of all text if it is shorter: other sentences around
    a question are not in its mean, and neither are media, which have many more tokens. The last mean is repeated until
    there are t of them.

    Args:
        num_text: so many of the tokens, the first ones, are text. If it is 0, the means are over all.
    """
    text = values[: num_text or len(values), -1]  # [n, F]
    means = text.unfold(0, min(WINDOW, len(text)), 1).mean(dim=2)  # [n - window + 1, F]
    repeated = means[-1:].expand(len(values) - len(means), -1)
    return torch.cat([values[:, :-1], torch.cat([means, repeated])[:, None]], dim=1)


def in_pieces(text: Sequence[int], media: Sequence[int], most: int = PIECE) -> Iterator[tuple[list[int], list[int]]]:
    """The deciding tokens in pieces of up to `most`; the evidence of all is the largest of the pieces'.

    Every window of text lies in a piece. A piece of media has a window of text, whose mean stands in the last layer.
    """
    if len(text) + len(media) <= most:
        yield list(text), list(media)
        return
    if not text:
        text, media = media, ()
    for start in range(0, max(len(text) - WINDOW, 0) + 1, most - WINDOW + 1):
        yield list(text[start : start + most]), []
    for start in range(0, len(media), most - WINDOW):
        yield list(text[:WINDOW]), list(media[start : start + most - WINDOW])
