"""`--memory-page`: the page and the latest decisions; in a browser, where there is one."""

import base64
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from inducekv_vllm.bundle import Bundle
from inducekv_vllm.vllm_seams.config import ADMIN_HEADER
from server.page import PAGE
from tests.encodings import drawn, saved
from tests.engine.parity import Prompt
from tests.server.browser import PROGRAM, opened
from tests.server.http import Bundles, ask
from tests.server.launch import ADMIN_KEY, Adapted

GATED_TASKS = ("a", None)
NODE = shutil.which("node")


def test_the_page_needs_nothing_from_elsewhere(server: str) -> None:
    answer = httpx.get(f"{server}/memory")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    (nonce,) = re.findall(r"script-src 'nonce-([\w-]+)'", policy)
    assert f'<script nonce="{nonce}">' in answer.text
    assert "default-src 'none'" in policy
    assert nonce not in httpx.get(f"{server}/memory").text
    assert not re.findall(r"(?:src|href)=|https?://|innerHTML|@import|url\(", answer.text)
    assert ADMIN_KEY not in answer.text
    assert ADMIN_HEADER in answer.text


def test_the_latest_decisions_are_for_the_admin(
    server: str, client: openai.OpenAI, bundles: Bundles, gated_bundle: tuple[Bundle, Path], questions: list[Prompt]
) -> None:
    url = f"{server}/v1/memory_decisions"
    assert httpx.get(url).status_code == 401
    with bundles.loaded("seen", gated_bundle[1]):
        for question in questions[:2]:
            ask(client, "seen", question, max_tokens=1)
        ask(client, "base", questions[0], max_tokens=1)  # which nothing decides on
        found = httpx.get(url, headers=bundles.headers).json()["data"]
    assert [each["bundle"] for each in found[:2]] == ["seen", "seen"]
    assert [each["gate"]["task"] for each in found[:2]] == list(reversed(GATED_TASKS))
    assert found[0]["gate"]["closed"] in ("outside", "below_threshold")
    assert {each["digest"] for each in found[:2]} == {gated_bundle[0].digest}
    assert all(each["facts"] == [] for each in found[:2])
    assert len(found) <= 50


def test_without_the_flag_there_is_no_page(adapted: Adapted) -> None:
    headers = {ADMIN_HEADER: ADMIN_KEY}
    for path in ("/memory", "/v1/memory_decisions"):
        answer = httpx.get(f"{adapted.url}{path}", headers=headers)
        assert (answer.status_code, "--memory-page" in answer.text) == (404, True)


def seen_by(steps: str) -> Any:
    """What a script prints that uses the page; the page's own runs on a stand-in of a browser's document."""
    script = re.findall(r"<script[^>]*>(.*)</script>", PAGE, re.DOTALL)[0]
    assert NODE is not None
    done = subprocess.run([NODE, "-"], input=DOCUMENT + script + steps, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(NODE is None, reason="there is no Node.js")
def test_facts_are_shown_in_pages_that_say_so() -> None:
    """450 facts: 200 of them at a time."""
    assert seen_by(CLICKS) == [
        [200, "e0?", "Facts 1 to 200 of 450  Next"],
        [200, "e200?", "Facts 201 to 400 of 450  Previous Next"],
        [50, "e400?", "Facts 401 to 450 of 450  Previous"],
        [49, "e401?", "Facts 401 to 449 of 449  Previous"],  # one of them was forgotten
        [200, "e200?", "Facts 201 to 400 of 449  Previous Next"],
        [200, "e0?", "Facts 1 to 200 of 448  Next"],  # somebody else forgot the last one of the page before
    ]


@pytest.mark.skipif(NODE is None, reason="there is no Node.js")
def test_the_decisions_nearest_to_the_threshold_are_shown_alone() -> None:
    """Of 40 decisions, 15 of them open and one without a gate."""
    all_of_them, alone = seen_by(NEAREST)
    assert len(all_of_them) == 40
    closed, opened = ([f"{-n / 10:.2f}" for n in range(1, 11)], [f"{n / 10:.2f}" for n in range(1, 11)])
    assert alone == [*closed, *opened]


DOCUMENT = """
class Element {
  children = []; text = ""; value = ""; listeners = {}; open = false;
  append(child) { this.children.push(child); }
  replaceChildren() { this.children = []; this.text = ""; }
  setAttribute() {}
  addEventListener(kind, listener) { this.listeners[kind] = listener; }
  get textContent() { return [this.text, ...this.children.map(child => child.textContent)].filter(Boolean).join(" "); }
  set textContent(text) { this.text = String(text); }
}
const elements = {};
globalThis.document = { getElementById: id => elements[id] ??= new Element(), createElement: () => new Element() };
let facts = Array.from({ length: 450 }, (_, n) => ({ id: `e${n}`, task: "t", question: `e${n}?`, answer: "a" }));
let decisions = [];
const card = () => ({ name: "m", digest: "d", tasks: {}, facts: facts.length, file_bytes: 1, versions: [{}] });
globalThis.fetch = async (address, { method }) => {
  const url = new URL(address, "http://server"), after = url.searchParams.get("after");
  if (method === "DELETE") facts = facts.filter(fact => !url.pathname.endsWith(`/${fact.id}`));
  const begin = after === null ? 0 : facts.findIndex(fact => fact.id === after) + 1;
  const end = begin + Number(url.searchParams.get("limit"));
  const found = url.pathname.endsWith("/examples") ? facts.slice(begin, end)
    : url.pathname.endsWith("/memory_decisions") ? decisions : [card()];
  const ok = after === null || begin > 0;
  return { ok, json: async () => ({ data: found, has_more: end < facts.length, version: "1", vllm_version: "1" }) };
};
"""
NEAREST = """
const upTo = (count, sign) => Array.from({ length: count }, (_, n) => sign * (n + 1) / 10);
const margins = [...upTo(24, -1), ...upTo(15, 1)];
const gate = m => ({ open: m > 0, closed: m > 0 ? null : "outside", task: null, margins: { other: -9, t: m } });
const decision = gate => ({ at: 0, bundle: "m", gate, facts: [], missed: null });
decisions = [...margins.map(m => decision(gate(m))), decision(null)];
decisions.sort((a, b) => String(a.gate?.margins.t).localeCompare(String(b.gate?.margins.t)));
keys.admin = "k";
chosen = "m";
const column = () => elements.decisions.children.map(row => row.children[3].textContent);
(async () => {
  await showDecisions();
  const before = column();
  elements.nearest.checked = true;
  await showDecisions();
  console.log(JSON.stringify([before, column()]));
})();
"""
CLICKS = """
keys.admin = "k";
chosen = "m";
const seen = [], settled = () => new Promise(done => setTimeout(done, 20));
async function look(work) {
  await work();
  await settled();
  const rows = elements.facts.children;
  seen.push([rows.length, rows[0].children[0].children[0].textContent, elements.places.textContent]);
}
const click = (label, place) => place.children.find(each => each.textContent === label).listeners.click();
(async () => {
  await look(() => show());
  for (let n = 0; n < 2; n++) await look(() => click("Next", elements.places));
  await look(async () => {
    const fact = elements.facts.children[0], actions = () => fact.children[1].children.at(-2);
    fact.open = true;
    fact.listeners.toggle();
    click("Forget", actions());
  });
  await look(() => click("Previous", elements.places));
  facts = facts.filter(fact => fact.id !== "e199");
  await look(() => show());
  console.log(JSON.stringify(seen));
})();
"""


@pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium: with one, the page is tested in it")
def test_in_a_browser(server: str, bundles: Bundles, tmp_path: Path) -> None:
    """A fact is taught, asked, corrected, rolled back and forgotten with the keyboard and by clicks, on a phone, too.

    Nothing can be changed before a key is given and a fact is opened.
    """
    with opened(f"{server}/memory", tmp_path / "browser") as page:

        def text(name: str) -> str:
            return f"document.getElementById('{name}').innerText"

        def fill(**values: str) -> None:
            for name, value in values.items():
                page.run(f"document.getElementById('{name.replace('_', '-')}').value = {json.dumps(value)}")

        def press(label: str, of: str) -> None:
            buttons = f"[...document.querySelectorAll('{of} button')]"
            page.run(f"{buttons}.find(b => b.innerText.startsWith({json.dumps(label)})).click()")

        def unfold(box: str) -> None:
            page.run(f"document.querySelector('{box} summary').click()")

        page.wait_for(f"{text('bundles')}.includes('first')")
        assert page.run("document.querySelectorAll('#facts *, #decisions *').length") == 0
        assert page.run("document.getElementById('teach-box').checkVisibility()") is False
        page.run("document.getElementById('admin').focus()")
        page.send("Input.insertText", text=ADMIN_KEY)
        page.press("Enter", 13)
        page.wait_for(f"{text('message')} === 'The keys are used'")

        unfold("#teach-box")
        fill(teach_bundle="page", teach_task="towns", teach_question="Who keeps the tower?", teach_answer="Ann")
        press("Teach", "#teach")
        page.wait_for(f"{text('message')} === 'Taught'")
        assert page.run("document.querySelector('#facts summary').innerText") == "Who keeps the tower?\nAnn"
        assert page.run("document.querySelectorAll('#facts button').length") == 0
        unfold("#facts")
        page.wait_for(f"{FACT} === 'Ann'")

        fill(question="Please tell me: who keeps the tower?", tokens="16")
        press("Ask", "#ask")
        answers = "[...document.querySelectorAll('.answer pre')].map(p => p.innerText)"
        page.wait_for(f"{answers}.length === 2 && !{answers}.includes('…')")
        plain, with_memory = page.run(answers)
        assert (plain != "Ann", with_memory) == (True, "Ann")
        assert "No gate; no entries; fact towns/" in page.run("document.querySelector('.answer .note').innerText")
        page.wait_for(f"{text('decisions')}.includes('page')")

        for width, dark in ((1280, False), (1280, True), (400, False), (320, False)):
            page.look(width, dark=dark)
            page.screenshot(tmp_path / f"{width}-{'dark' if dark else 'light'}.png")
            assert page.run("document.documentElement.scrollWidth <= innerWidth")

        page.run("document.querySelector('#facts textarea').value = 'Bo'")
        press("Correct", "#facts")
        page.wait_for(f"{text('message')}.endsWith('is corrected')")
        page.wait_for(f"{FACT} === 'Bo'")
        unfold(BUNDLE)
        press("Back to", BUNDLE)
        page.wait_for(f"{text('message')}.endsWith('again')")
        page.wait_for(f"{FACT} === 'Ann'")
        press("Forget", "#facts")
        page.wait_for(f"{text('message')}.includes('a bundle needs one')")
        fill(teach_bundle="page", teach_question="Who keeps the mill?", teach_answer="Cy")
        press("Teach", "#teach")
        page.wait_for("document.querySelectorAll('#facts summary').length === 2")
        press("Forget", "#facts")  # the fact that is open
        page.wait_for("document.querySelectorAll('#facts summary').length === 1")
        assert page.run(text("facts")).startswith("Who keeps the mill?")
        assert [each for each in page.said if "400" not in each] == []  # the refusal
    bundles.unload("page")


BUNDLE = "#bundles li:has(input[value=page])"  # other tests may have left their own
FACT = "document.querySelector('#facts textarea')?.value"


@pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium: with one, the page is tested in it")
def test_pictures_in_a_browser(server: str, bundles: Bundles, tmp_path: Path) -> None:
    """Dropped, a picture is taught with its question, is shown beside the fact, and is asked about."""
    png = base64.b64encode(saved(drawn(), "PNG")).decode()
    with opened(f"{server}/memory", tmp_path / "browser") as page:

        def drop(form: str) -> None:
            page.run(f"({DROP})({json.dumps(form)}, {json.dumps(png)})")
            page.wait_for(f"{shown(f'#{form}-pictures')} === 40")

        def shown(place: str) -> str:
            return f"document.querySelector('{place} img')?.naturalWidth"

        def submit(form: str, **values: str) -> None:
            for name, value in values.items():
                page.run(f"document.getElementById('{name.replace('_', '-')}').value = {json.dumps(value)}")
            page.run(f"document.querySelector('#{form} button.main').click()")

        page.run(f"keys.admin = {json.dumps(ADMIN_KEY)}")
        drop("teach")
        page.run("document.querySelector('#teach-pictures button').click()")
        assert page.run("document.querySelectorAll('#teach-pictures *').length") == 0
        drop("teach")
        fact = {"teach_bundle": "shown", "teach_question": "What is this?", "teach_answer": "A flag"}
        submit("teach", **fact)
        page.wait_for("document.getElementById('message').innerText === 'Taught'")
        page.wait_for(f"{shown('#facts')} === 96")  # small
        assert page.run("pictures.teach.length") == 0
        drop("ask")
        submit("ask", question="What is this?", tokens="8")
        answers = "[...document.querySelectorAll('.answer pre')].map(p => p.innerText)"
        page.wait_for(f"{answers}[1] === 'A flag'")
        page.screenshot(tmp_path / "page.png")
        assert page.said == []
    bundles.unload("shown")


DROP = """(form, data) => {
  const files = new DataTransfer(), bytes = Uint8Array.from(atob(data), character => character.charCodeAt(0));
  files.items.add(new File([bytes], "flag.png", { type: "image/png" }));
  document.getElementById(form).dispatchEvent(new DragEvent("drop", { dataTransfer: files, cancelable: true }));
}"""
