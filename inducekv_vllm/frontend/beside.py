"""A request that runs while its facts are judged.

It begins with the facts that words have found, mostly none. Its outputs wait for the judge. If the judge finds no
other, they go on; if it does, the request is begun again with it, on a prompt that lies in the prefix cache.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

from vllm.outputs import RequestOutput

from .asking import Asked, Judging

Outputs = AsyncGenerator[RequestOutput, None]


async def judged_beside(outputs: Outputs, known: Asked, judging: Judging, again: Callable[[Asked], Outputs]) -> Outputs:
    """The outputs of a request that was begun with the facts that are known, or of what `again` begins with others."""
    ahead, step = list[RequestOutput](), _next(outputs)
    try:
        while not judging.done():
            await asyncio.wait([judging, step] if not step.done() else [judging], return_when=asyncio.FIRST_COMPLETED)
            if step.done() and (output := step.result()) is not None:
                ahead.append(output)
                step = _next(outputs)
        if [each.facts for each in judging.result()] == [each.facts for each in known]:
            for output in ahead:
                yield output
            while (following := await step) is not None:
                yield following
                step = _next(outputs)
            return
    finally:
        judging.cancel()
        step.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([step])
        await outputs.aclose()
    async with contextlib.aclosing(again(judging.result())) as outputs:
        async for output in outputs:
            yield output


def _next(outputs: Outputs) -> asyncio.Task[RequestOutput | None]:
    """None behind the last one."""

    async def read() -> RequestOutput | None:
        return await anext(outputs, None)

    return asyncio.create_task(read())
