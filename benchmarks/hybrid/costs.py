"""What memory costs a hybrid: `python -m benchmarks.hybrid.costs --work DIR --output FILE`.

A random Qwen3.5 of 8 layers, 2 of them with attention, in bfloat16 and with vLLM's own operator of gated DeltaNet; its
answers mean nothing. By form: the rows of a prompt that are computed, and the time to the first token over that without
memory, in one run. And a long conversation: how many tokens of each turn come from cached states.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from benchmarks.hybrid.train import make_tokenizer
from benchmarks.hybrid.world import asked
from benchmarks.record import keep, parser_of
from benchmarks.serving.bundles import gated_bundle
from inducekv_vllm.bundle import write_bundle
from selector.backbone.model import Backbone

LAYERS, CONTEXT = 8, 4096
KINDS = ("closed", "same_pass", "generation", "prompt")  # of `gated_bundle`
QUESTIONS = 50  # in a prompt
TURNS = 8
REPEATS = 6


def make_model(folder: Path) -> Path:
    tokenizer = make_tokenizer()
    config = Qwen3_5TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def prompts(count: int, seed: int) -> Iterator[str]:
    """Long ones, each of its own."""
    for number in range(count):
        rng = np.random.default_rng([seed, number])
        yield f"{seed} {number}. " + " ".join(asked(rng)[0] for _ in range(QUESTIONS))


class Counted:
    """An engine with memory that counts the rows it schedules."""

    def __init__(self, llm: Any) -> None:
        from inducekv_vllm.frontend.offline import MemoryLLM

        self.offline, self.rows = MemoryLLM(llm), Counter[str]()
        self.scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        schedule = self.scheduler.schedule

        def counted(*args: Any, **options: Any) -> Any:
            output = schedule(*args, **options)
            self.rows.update(output.num_scheduled_tokens)
            return output

        self.scheduler.schedule = counted

    def ask(self, messages: Sequence[Any], memory: Any, max_tokens: int = 1) -> dict[str, Any]:
        """The prompt's tokens, those from the cache, the rows computed, and the seconds it took."""
        from vllm import SamplingParams

        self.rows.clear()
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        began = time.perf_counter()
        (answer,) = self.offline.chat([list(messages)], params, memory=memory)
        seconds = time.perf_counter() - began
        return {
            "tokens": len(answer.output.prompt_token_ids or ()),
            "cached": answer.output.num_cached_tokens,
            "rows": sum(self.rows.values()) - (max_tokens - 1),
            "seconds": seconds,
            "text": answer.output.outputs[0].text,
            "same_pass": bool(answer.decision and answer.decision.same_pass),
        }


@contextmanager
def engine(model: Path) -> Iterator[Counted]:
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    os.environ.update({"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_PLUGINS": "inducekv", **settings})
    from vllm import LLM

    from inducekv_vllm.vllm_seams.config import SCHEDULER_CLS, WORKER_CLS

    llm = LLM(
        str(model),
        dtype="bfloat16",
        max_model_len=CONTEXT,
        max_num_seqs=4,
        max_num_batched_tokens=1024,
        enforce_eager=True,
        enable_prefix_caching=True,
        worker_cls=WORKER_CLS,
        scheduler_cls=SCHEDULER_CLS,
        additional_config={"inducekv": {}},
    )
    try:
        yield Counted(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()


def by_form(counted: Counted, memories: dict[str, Any]) -> dict[str, Any]:
    """Of prompts that nobody has asked before; the forms take turns."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ("none", *memories)}
    for repeat in range(-1, REPEATS):  # the first is not counted
        for number, name in enumerate(found):
            (prompt,) = prompts(1, 100 + 10 * repeat + number)
            answer = counted.ask([{"role": "user", "content": prompt}], memories.get(name))
            if repeat >= 0:
                found[name].append(answer)
    # The least of the repeats: what else a machine does only adds to it.
    least = {name: min(each["seconds"] / each["tokens"] for each in answers) for name, answers in found.items()}
    return {
        name: {
            "tokens": round(statistics.mean(each["tokens"] for each in answers)),
            "rows_over_tokens": round(statistics.mean(each["rows"] / each["tokens"] for each in answers), 3),
            "first_token_over_none": round(least[name] / least["none"], 3),
            "same_pass": all(each["same_pass"] for each in answers),
        }
        for name, answers in found.items()
    }


def conversation(counted: Counted, memory: Any, seed: int) -> list[dict[str, int]]:
    """Each turn adds a question and an answer: tokens of its prompt, and those that came from cached states."""
    messages: list[dict[str, str]] = []
    turns = []
    for turn in range(TURNS):
        rng = np.random.default_rng([seed, turn])
        messages.append({"role": "user", "content": " ".join(asked(rng)[0] for _ in range(QUESTIONS // 4))})
        answer = counted.ask(messages, memory, max_tokens=24)
        messages.append({"role": "assistant", "content": answer["text"]})
        turns.append({name: answer[name] for name in ("tokens", "cached", "rows")})
    return turns


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--work", type=Path, required=True)
    args = parser.parse_args()
    model = make_model(args.work / "costs")
    backbone = Backbone.load(model)
    torch.manual_seed(1)
    for kind in KINDS:
        write_bundle(gated_bundle(backbone, kind), args.work / f"{kind}.safetensors")
    with engine(model) as counted:
        memories = {kind: counted.offline.load_bundle(args.work / f"{kind}.safetensors") for kind in KINDS}
        found = {
            "block_tokens": counted.scheduler.block_size,
            "by_form": by_form(counted, memories),
            "conversation": {
                name: conversation(counted, memories.get(name), 50 + number)
                for number, name in enumerate(("none", *KINDS))
            },
        }
    keep(found, args.output)


if __name__ == "__main__":
    main()
