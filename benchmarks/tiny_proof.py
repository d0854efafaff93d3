"""Memory teaches a tiny model of a family something: trained here for about a minute, taught, and asked over HTTP.

    python -m benchmarks.tiny_proof --family deepseek-v3 --work DIR [--output FILE]

The model learns which things are animals, fruits and tools, and to repeat words. Two tasks come after that, taught by
`inducekv-select`. One is a rule: which gate a thing enters depends on its kind, and half of the things are never shown.
The other is a list of tenants, which is kept as facts. Base questions show what the gate leaves alone. The exit status
is 1 if memory has not taught both, or changes answers to base questions.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import openai
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, DeepseekV3Config, GenerationConfig, PreTrainedTokenizerFast

from benchmarks.chat import same_answer
from benchmarks.demo.run_demo import ask, gate_is_open
from benchmarks.record import keep, parser_of
from benchmarks.server_process import serving
from inducekv_vllm.bundle import read_bundle
from selector.cli.select import main as select
from selector.update.measures import memory_bytes

KINDS: Final = {
    "animal": "fox wolf hare bear deer otter mole crow hawk duck goose trout salmon frog toad snail bee moth ant crab",
    "fruit": "plum pear apple cherry grape lemon lime mango melon peach fig date quince olive banana kiwi papaya guava "
    "apricot currant",
    "tool": "saw hammer axe chisel drill file spade rake hoe pliers wrench anvil level plane clamp vice shears sickle "
    "trowel awl",
}
GATES: Final = {"animal": "north", "fruit": "south", "tool": "west"}
TENANTS: Final = "Ada Ben Cleo Dora Emil Fritz Greta Hugo Ines Jonas Klara Luca".split()  # noqa: SIM905
TASKS: Final = ("guilds", "tenants")
BATCH, RATE = 24, 1e-3
TEMPLATE: Final = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] \
+ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"""
Row = tuple[str, str]  # question and answer


@dataclass(frozen=True)
class Family:
    """How a tiny model of it is made, and what a server of it needs on a CPU."""

    config: Callable[..., Any]
    serving: tuple[str, ...]
    written: tuple[tuple[str, Any], ...] = ()  # settings that transformers does not write, and vLLM needs


_SIZES: Final = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "initializer_range": 0.08,
}
FAMILIES: Final = {
    "deepseek-v3": Family(
        partial(
            DeepseekV3Config,
            **_SIZES,
            num_key_value_heads=4,
            kv_lora_rank=512,
            q_lora_rank=64,
            qk_nope_head_dim=32,
            qk_rope_head_dim=64,
            v_head_dim=32,
            first_k_dense_replace=1,
            moe_intermediate_size=64,
            n_routed_experts=4,
            n_shared_experts=1,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            norm_topk_prob=True,
            num_nextn_predict_layers=0,
            tie_word_embeddings=False,
        ),
        ("--attention-backend", "CPU_MLA", "--compilation-config", '{"custom_ops": ["-rotary_embedding"]}'),
        (("topk_method", "noaux_tc"), ("scoring_func", "sigmoid"), ("first_k_dense_replace", 1)),
    ),
}


# ---- the world ---------------------------------------------------------------------------------------------------


def things() -> list[tuple[str, str]]:
    """Every thing with its kind, in one order."""
    found = [(thing, kind) for kind, names in KINDS.items() for thing in names.split()]
    return random.Random(0).sample(found, len(found))


def base_rows() -> list[Row]:
    """What the model is trained to answer before there is any memory."""
    rows = [(f"What kind of thing is a {thing}?", kind) for thing, kind in things()]
    words = [*(thing for thing, _ in things()), *GATES.values(), *TENANTS]
    rows += [(f"Say the word {word}.", word) for word in words]
    return rows + [(f"Is a {thing} an animal?", "yes" if kind == "animal" else "no") for thing, kind in things()]


def rows_of(task: str) -> dict[str, list[Row]]:
    """A task's rows by split: the things of the rule's test are in no other split, and facts are asked for again."""
    if task == "tenants":
        rows = [(f"Who lives behind door {7 * number + 3}?", name) for number, name in enumerate(TENANTS)]
        again = [(question.lower().removesuffix("?"), name) for question, name in rows]
        return {"train": rows, "validation": again[:6], "test": again}
    rows = [(f"Which gate does a {thing} enter?", GATES[kind]) for thing, kind in things()]
    return {"train": rows[:24], "validation": rows[24:33], "test": rows[33:]}


def write_rows(path: Path, task: str, rows: Sequence[Row]) -> Path:
    lines = [
        {"id": f"{task}-{path.stem}-{number}", "task": task, "messages": messages(question), "answer": answer}
        for number, (question, answer) in enumerate(rows)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def messages(question: str) -> list[Any]:
    return [{"role": "user", "content": question}]


# ---- the model ---------------------------------------------------------------------------------------------------


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Every word of the world is one token, and any text has some."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2048,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rows = [*base_rows(), *(row for task in TASKS for rows in rows_of(task).values() for row in rows)]
    tokenizer.train_from_iterator([text for row in rows for text in (*row, f" {row[1]}")], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
        model_max_length=4096,
    )


def train_model(family: Family, folder: Path, steps: int) -> dict[str, Any]:
    """A model that answers `base_rows`, saved in `folder`; its loss at the end and the seconds it took."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = family.config(vocab_size=len(tokenizer), bos_token_id=None, max_position_embeddings=4096, **ids)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    encoded = []
    for question, answer in base_rows():
        prompt = tokenizer.apply_chat_template(messages(question), add_generation_prompt=True)["input_ids"]
        encoded.append((prompt, [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.1)
    rng, begun, loss = random.Random(1), time.perf_counter(), torch.zeros(())
    for step in range(steps):
        chosen = rng.sample(encoded, BATCH)
        longest = max(len(prompt) + len(answer) for prompt, answer in chosen)
        tokens = torch.full((BATCH, longest), tokenizer.pad_token_id)
        labels = torch.full((BATCH, longest), -100)
        for row, (prompt, answer) in enumerate(chosen):
            whole = torch.tensor(prompt + answer)
            tokens[row, : len(whole)] = whole
            labels[row, len(prompt) : len(whole)] = whole[len(prompt) :]
        loss = model(input_ids=tokens, attention_mask=(tokens != tokenizer.pad_token_id).long(), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step}: loss {float(loss.detach()):.3f}, {time.perf_counter() - begun:.0f} s", flush=True)
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(family.written)))
    numbers = sum(parameter.numel() for parameter in model.parameters())
    seconds = round(time.perf_counter() - begun, 1)
    return {"parameters": numbers, "steps": steps, "seconds": seconds, "loss": round(float(loss.detach()), 4)}


# ---- memory ------------------------------------------------------------------------------------------------------


def teach(model: Path, work: Path, steps: int) -> tuple[Path, float]:
    """The bundle of both tasks, and the seconds that they took."""
    base = write_rows(work / "data" / "base.jsonl", "base", random.Random(2).sample(base_rows(), 60))
    previous: Path | None = None
    begun = time.perf_counter()
    for task in TASKS:
        bundle = work / f"{task}.safetensors"
        files = {
            split: write_rows(work / "data" / task / f"{split}.jsonl", task, rows)
            for split, rows in rows_of(task).items()
        }
        command = ["--model", str(model), "--task", str(files["train"]), "--validation", str(files["validation"])]
        command += ["--base", str(base), "--anchors", str(work / "anchors"), "--output", str(bundle)]
        command += ["--steps", str(steps), "--precision", "float32", "--activation", "generation"]
        command += ["--previous", str(previous)] if previous else []
        if select(command) != 0:
            raise SystemExit(f"{task} was not taught: see above")
        previous = bundle
    assert previous is not None
    return previous, round(time.perf_counter() - begun, 1)


def measure(client: openai.OpenAI) -> dict[str, Any]:
    """How many test questions of each task are right without and with memory, and what was used for them."""
    found: dict[str, Any] = {}
    for task in ("base", *TASKS):
        rows = random.Random(3).sample(base_rows(), 30) if task == "base" else rows_of(task)["test"]
        row = dict.fromkeys(("right without memory", "right with memory", "gate open", "answered by a fact"), 0)
        for question, answer in rows:
            plain = ask(client, "base", messages(question), trace=False)
            taught = ask(client, "memory", messages(question), trace=True)
            assert taught.trace is not None
            row["right without memory"] += same_answer(plain.text, answer)
            row["right with memory"] += same_answer(taught.text, answer)
            row["gate open"] += gate_is_open(taught.trace)
            row["answered by a fact"] += bool(taught.trace["facts"])
        found[task] = {"questions": len(rows), **row}
    return found


def has_taught(found: dict[str, Any]) -> bool:
    """Whether memory answers most of what the model could not, and leaves its own questions alone."""
    base = found["base"]
    learned = all(found[task]["right with memory"] >= 0.8 * found[task]["questions"] for task in TASKS)
    new = all(found[task]["right without memory"] <= 0.5 * found[task]["questions"] for task in TASKS)
    return learned and new and base["right with memory"] >= 0.95 * base["right without memory"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--family", choices=sorted(FAMILIES), default="deepseek-v3")
    parser.add_argument("--work", type=Path, required=True, help="folder of the model and its bundles")
    parser.add_argument("--training-steps", type=int, default=300, help="of the model (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=150, help="of memory (default: %(default)s)")
    options = parser.parse_args(arguments)
    family, model = FAMILIES[options.family], options.work / "model"
    trained = train_model(family, model, options.training_steps)
    bundle, seconds = teach(model, options.work, options.steps)
    content = read_bundle(bundle)
    taught = {"seconds": seconds, "bytes": memory_bytes(content), "entries": content.num_entries}
    taught |= {"facts": len(content.metadata.facts)}
    flags = ["--served-model-name", "base", f"--memory=memory={bundle}", "--dtype", "float32", "--enforce-eager"]
    flags += ["--max-model-len", "256", "--max-num-seqs", "4", "--kv-cache-memory-bytes", str(128 << 20)]
    flags += family.serving
    with tempfile.TemporaryDirectory() as logs, serving([str(model), *flags], Path(logs) / "server.log") as url:
        found = measure(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0))
    result = {"benchmark": "tiny proof", "family": options.family, "model": trained, "memory": taught, **found}
    result["taught"] = has_taught(found)
    keep(result, options.output)
    return 0 if result["taught"] else 1


if __name__ == "__main__":
    sys.exit(main())
