"""An engine that takes prompt embeddings serves them without memory, and requests of tokens with it."""

from pathlib import Path

import pytest
import torch
from vllm.exceptions import VLLMValidationError

from tests.engine.parity import (
    FEWER_PROCESSES,
    TOLERANCE,
    MemoryEngine,
    engine,
    greedy,
    make_world,
    served_logprobs,
    text_prompts,
)
from tests.tiny_families import FAMILIES


def test_prompt_embeddings(tmp_path: Path) -> None:
    world = make_world(FAMILIES["llama"](tmp_path / "model"), tmp_path, make_prompts=text_prompts)
    options = {"enforce_eager": True, "max_num_batched_tokens": 64, "block_size": 32, "enable_prompt_embeds": True}
    with engine(world.model, environment=FEWER_PROCESSES, **options) as llm:
        served, questions = MemoryEngine(world, llm), text_prompts(4, 1)
        plain = served.check(questions, [None] * 4)
        table = world.backbone.model.get_input_embeddings().weight.detach()
        rows = [torch.tensor(answer.output.prompt_token_ids) for answer in plain]
        for _ in range(2):  # the second time from the prefix cache, beside requests with memory
            embedded = llm.generate([{"prompt_embeds": table[row].clone()} for row in rows], greedy())
            for answer, found in zip(plain, embedded, strict=True):
                (tokens, expected), (same, logprobs) = map(
                    served_logprobs, (answer.output.outputs[0], found.outputs[0])
                )
                assert tokens == same
                torch.testing.assert_close(logprobs, expected, rtol=0, atol=TOLERANCE)
            served.check(questions, ["first", "second", "other", None])
        with pytest.raises(VLLMValidationError, match="a memory bundle cannot be used with a prompt of type 'embeds'"):
            served.offline.generate([{"prompt_embeds": table[rows[0]]}], greedy(), memory=served.memories["first"])
