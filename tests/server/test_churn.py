"""The benchmark of changing bundles in its shortest form: a tiny model, 32 requests at a time, and steady changes."""

import time
from pathlib import Path

import httpx
import pytest

from benchmarks.churn.changes import Admin, Span, meanwhile
from benchmarks.churn.crowd import BASE, Crowd, Verdicts, ask_alone
from benchmarks.churn.leaks import drained, held_at_rest, in_use, in_use_at_rest
from inducekv_vllm.bundle import write_bundle
from tests.bundles import remade
from tests.engine.parity import World, prompts
from tests.server.http import Bundles, preemptions
from tests.server.launch import ADMIN_KEY

pytestmark = pytest.mark.anyio

KEPT, CHANGED = ("first", "second"), ("replaced", "reloaded")
WARM_UP, REQUESTS, CONCURRENCY = 32, 112, 32


async def test_answers_are_right_while_bundles_change_and_nothing_is_left(
    server: str, bundles: Bundles, world: World, tmp_path: Path
) -> None:
    questions = [prompt.messages for prompt in prompts(6, seed=31)]
    first, second, other = (world.bundles[name].digest for name in (*KEPT, "other"))
    paths = {world.bundles[name].digest: Path(world.paths[name]) for name in (*KEPT, "other")}
    values = world.bundles["other"].payload_values.clone()
    values[:, ::3] *= 0.875  # a later version: it shares the other entries
    changed = remade(world.bundles["other"], payload_values=values)
    later = changed.digest
    paths[later] = tmp_path / "later.safetensors"
    write_bundle(changed, paths[later])
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=server, timeout=600, limits=limits) as client:
        admin = Admin(client, ADMIN_KEY, paths)
        began = time.monotonic()
        for name, content in zip(KEPT, (first, second), strict=True):
            admin.names.spans[name] = [Span(content, asked=began, there=began)]
        used = await in_use(client)
        for name, content in zip(CHANGED, (other, later), strict=True):
            await admin.load(name, content)
        alone = {BASE: BASE, "first": first, "second": second, "replaced": other, "reloaded": later}
        references = await ask_alone(client, questions, alone)
        crowd = Crowd(client, questions, (BASE, *KEPT, *CHANGED), admin.names, references, Verdicts())
        await crowd.ask(WARM_UP, CONCURRENCY, seed=1)
        await drained(client, ADMIN_KEY)
        before, preempted, loads = await held_at_rest(server), preemptions(server), admin.loads

        replacing = admin.keep_replacing("replaced", [later, other], 0.2)
        reloading = admin.keep_replacing("reloaded", [first, later], 0.4, unload=True)
        async with meanwhile(replacing, reloading):
            await crowd.ask(REQUESTS, CONCURRENCY, seed=2)

        await drained(client, ADMIN_KEY)
        after = await held_at_rest(server, before)
        for name in CHANGED:
            bundles.unload(name)  # the last change may have left none
        bundles.wait_until_drained()
        assert await in_use_at_rest(client, used) == used
    assert not crowd.verdicts.faults
    assert crowd.verdicts.counts["right"] > REQUESTS / 2
    assert crowd.verdicts.counts["hung_up"] > 0
    assert admin.loads > loads + 3
    assert preemptions(server) > preempted
    assert after.more_than(before) == {}
    assert not bundles.cards().keys() & set(CHANGED)
