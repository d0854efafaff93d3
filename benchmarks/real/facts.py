"""Facts over HTTP on a real model: a company's, said as they are stored, in other words, and in conversations.

    python -m benchmarks.real.facts --model qwen2.5-0.5b --facts FILE.jsonl [--output FILE]

FILE has a fact a line: `question`, `answer`, wordings that ask the `same`, and questions that ask something `other`.
All facts are taught to one bundle of a running server. Then it is asked, greedily:

- each question as it is stored, alone and as the second turn of a conversation, and each of the other wordings:
  `right` is the stored answer to the letter;
- what asks something else: `said` is how often a fact was said, `untouched` how often the words are those of the model
  without the bundle. The judge's request shares a step with the first answer, and in bfloat16 a fuller step rounds in
  another way: `untouched_again` is of the same question once more, when the judge's verdict is known;
- what builds on a fact that the turn before has said ("And how long is that in weeks?", `BUILDS_ON`): `right` has the
  awaited words in the model's own answer. The same conversation goes to the model without the bundle.

The judge of other wordings is the model that serves. Nothing is counted before it is known whether it is able.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.real.model import MODELS, model_folder
from benchmarks.record import keep, parser_of
from benchmarks.server_process import ServerFailed, serving
from inducekv_vllm.errors import InduceKVError
from inducekv_vllm.vllm_seams.config import ADMIN_KEY_VARIABLE
from selector.client import Answer, Message, Server
from selector.refined.settings import usual_precision

BUNDLE, BASE, KEY = "company", "base", "the benchmark's admin"
MAX_TOKENS: Final = 24
JUDGE_SECONDS: Final = 1800.0
BEFORE: Final = (("user", "Hello, I am new at the company and have a few questions."), ("assistant", "Ask away!"))
# By words of a fact's question: what is asked next, and what a right answer has in it.
BUILDS_ON: Final[Mapping[str, tuple[str, str]]] = {
    "wifi": ("Write that password in capital letters.", "BLUE-OTTER-42"),
    "on-call": ("And what is that person's first name alone?", "Priya"),
    "warehouse": ("And what is that on a 24-hour clock?", "15"),
    "refund": ("And how long is that in weeks?", "4"),
    "vacation": ("If ten of them are taken, how many are left?", "17"),
    "Which port": ("And which number comes right after it?", "5434"),
    "SLA": ("And how long is that in minutes?", "240"),
    "expense": ("What is the name of that program?", "Ledgerly"),
    "Lyon": ("Which postcode is that?", "69003"),
    "purchases": ("And which office does that person hold?", "CFO"),
    "upload": ("And how many megabytes is twice that?", "500"),
    "Python": ("And which minor version is next?", "3.13"),
}
FLAGS: Final = ("--served-model-name", BASE, "--max-model-len", "4096", "--max-num-seqs", "8", "--block-size", "32")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        run(options)
    except (InduceKVError, ServerFailed) as error:
        print(f"python -m benchmarks.real.facts: error: {error}", file=sys.stderr)
        return 2
    return 0


def run(options: argparse.Namespace) -> None:
    facts = [json.loads(line) for line in options.facts.read_text(encoding="utf-8").splitlines()]
    model, dtype = model_folder(options.model), usual_precision()
    environment = {"VLLM_CPU_KVCACHE_SPACE": "2", ADMIN_KEY_VARIABLE: KEY}
    with tempfile.TemporaryDirectory() as folder:
        log = (options.work or Path(folder)) / "server.log"
        with serving([str(model), *FLAGS, "--dtype", dtype], log, environment) as url:
            server = Server(url, admin_key=KEY)
            server.teach(BUNDLE, [{"messages": asking(fact["question"]), "answer": fact["answer"]} for fact in facts])
            judge = ability(server, facts[0]["same"][0])
            found = measured(server, facts)
    known = {"benchmark": "real_facts", "model": model.name, "dtype": dtype, "facts": len(facts), "judge": judge}
    keep(known | found, options.output)


def ability(server: Server, wording: str) -> dict[str, Any]:
    """What the model is worth as a judge, once the server has measured it; the first wording begins that."""
    server.ask(BUNDLE, wording, max_tokens=1)
    deadline = time.monotonic() + JUDGE_SECONDS
    while time.monotonic() < deadline:
        judge: dict[str, Any] | None = server.call("GET", "memory_server").get("judge")
        if judge and judge.get("is_able") is not None:
            return judge
        time.sleep(2)
    raise ServerFailed(f"the judge was not measured in {JUDGE_SECONDS:.0f} s")


def measured(server: Server, facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    counts: dict[str, Counter[str]] = {}
    rows: list[dict[str, Any]] = []

    def count(kind: str, **happened: bool) -> None:
        counts.setdefault(kind, Counter(asked=0)).update(
            asked=1, **{name: int(each) for name, each in happened.items()}
        )

    for number, fact in enumerate(facts):
        question, answer = fact["question"], fact["answer"]
        ways = {"stored": [asking(question)], "second turn": [conversation(*BEFORE, ("user", question))]}
        ways["other words"] = [asking(text) for text in fact["same"]]
        for kind, asked in ways.items():
            for messages in asked:
                text = ask(server, BUNDLE, messages).text.strip()
                count(kind, right=text == answer)
        for text in fact["other"]:
            own, given, again = (ask(server, name, asking(text)) for name in (BASE, BUNDLE, BUNDLE))
            untouched, untouched_again = given.text == own.text, again.text == own.text
            count("something else", said=is_said(given), untouched=untouched, untouched_again=untouched_again)
        follow_up, awaited = next(each for words, each in BUILDS_ON.items() if words in question)
        messages = conversation(("user", question), ("assistant", answer), ("user", follow_up))
        given, own = (ask(server, name, messages) for name in (BUNDLE, BASE))
        count("builds on it", said=is_said(given), right=awaited in given.text, untouched=given.text == own.text)
        rows.append({"fact": number, "asked": follow_up, "awaited": awaited, "said": given.text})
        print(json.dumps({kind: dict(each) for kind, each in counts.items()}), file=sys.stderr, flush=True)
    return {"kinds": {kind: dict(each) for kind, each in counts.items()}, "builds_on": rows}


def ask(server: Server, model: str, messages: Sequence[Message]) -> Answer:
    # A salt of its own: a prompt that is partly in the prefix cache also rounds in another way.
    salt = secrets.token_hex(8)
    return server.ask(model, messages, max_tokens=MAX_TOKENS, trace=model == BUNDLE, cache_salt=salt)


def is_said(answer: Answer) -> bool:
    """Whether a fact was said."""
    assert answer.trace is not None
    return any(each["withheld"] is None for each in answer.trace["facts"])


def asking(text: str) -> list[Message]:
    return conversation(("user", text))


def conversation(*turns: tuple[str, str]) -> list[Message]:
    return [{"role": role, "content": text} for role, text in turns]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="qwen2.5-0.5b", help=f"{', '.join(MODELS)}, a folder, or a name of the hub")
    parser.add_argument("--facts", type=Path, required=True, metavar="FILE.jsonl")
    parser.add_argument("--work", type=Path, help="a folder that keeps the server's log")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
