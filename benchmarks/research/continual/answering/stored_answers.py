"""Answers on disk: a question is asked once of all artifacts with the same content.

    OUT/answers/DIGEST.jsonl    {"question": digest, "answer": text}, a line for each, of the artifact with this digest

The folder belongs to one model and one way of asking, as OUT does. A process locks an artifact's file while it asks
questions; another process with the same questions waits, and then reads the answers.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from benchmarks.locks import locked
from benchmarks.research.continual.answering.http import EndpointFailed
from benchmarks.research.continual.answering.plans import Answerer
from benchmarks.research.continual.methods import Artifact
from selector.data.examples import Example

AT_ONCE = 256  # questions between two writes
NOT_CONTENT = ("artifact.json", "seconds.json")  # of a state: they report how it was made


@dataclass(frozen=True)
class StoredAnswers:
    """Asks only questions without a stored answer."""

    folder: Path
    answerer: Answerer

    def answers(self, artifact: Artifact, state: Path, examples: Sequence[Example]) -> tuple[list[str], int]:
        """Each question's answer, and how many were asked now. Raises EndpointFailed: says how many are stored."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder / f"{content_digest(artifact, state)}.jsonl") as file:
            stored = _read(file)
            new = list({e.source_digest: e for e in examples if e.source_digest not in stored}.values())
            model = self.answerer.prepare(artifact, state) if new else None
            for start in range(0, len(new), AT_ONCE):
                part = new[start : start + AT_ONCE]
                try:
                    answers = dict(zip((e.source_digest for e in part), model.answers(part), strict=True))
                except EndpointFailed as error:
                    have = sum(e.source_digest in stored for e in examples)
                    raise EndpointFailed(f"{error}; {have} of {len(examples)} questions are answered") from error
                _append(file, answers)
                stored |= answers
        return [stored[e.source_digest] for e in examples], len(new)


def content_digest(artifact: Artifact, state: Path) -> str:
    """sha256 over the artifact's kind and the files of its state: all that answers depend on."""
    digest = hashlib.sha256(artifact.kind.encode())
    for path in sorted(path for path in state.rglob("*") if path.is_file() and path.name not in NOT_CONTENT):
        digest.update(f"\n{path.relative_to(state)} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _read(file: BinaryIO) -> dict[str, str]:
    """By question. Removes a last line that a killed process has cut short."""
    file.seek(0)
    stored, end = {}, 0
    for line in file:
        if not line.endswith(b"\n"):
            break
        record = json.loads(line)
        stored[record["question"]] = record["answer"]
        end += len(line)
    file.truncate(end)
    return stored


def _append(file: BinaryIO, answers: dict[str, str]) -> None:
    """Durably: in the order of the lines, so that only the last can be cut short."""
    lines = [json.dumps({"question": question, "answer": answer}) + "\n" for question, answer in answers.items()]
    file.write("".join(lines).encode())
    file.flush()
    os.fsync(file.fileno())
