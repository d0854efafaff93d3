"""How an API process keeps up with the state that all of them share: before each request, and five times a second."""

from __future__ import annotations

import asyncio
from typing import Final

from vllm.exceptions import RetryableRequestError

from inducekv_vllm.errors import InduceKVError
from inducekv_vllm.vllm_seams.logs import logger_of

from .names import Names
from .state import ServerState

logger = logger_of(__name__)
POLL_S: Final = 0.2  # how often a process looks for changes without being asked


class Following:
    """See the module docstring. It belongs to the event loop of its API process."""

    def __init__(self, state: ServerState, names: Names) -> None:
        self._state, self._names = state, names
        self._turn = asyncio.Lock()
        self._seen = -1  # the state's change number that the names follow
        self._behind: str | None = None  # why this process cannot follow the state
        self.task: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Follow the state from now on. Raises ConfigError: it cannot be read."""
        await self.follow()
        self.task = asyncio.get_running_loop().create_task(self._keep_following())

    async def _keep_following(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            await self.see_changes()

    async def see_changes(self) -> None:
        """`follow`, before a request begins. If that fails, nobody knows what is current, and no bundle is served."""
        try:
            await self.follow()
        except InduceKVError as error:
            if self._behind is None:
                logger.error("no bundle is served until the state can be read: %s", error)
            self._behind = str(error)
        else:
            self._behind = None

    def check(self) -> None:
        """Raises RetryableRequestError: the state cannot be read."""
        if self._behind is not None:
            raise RetryableRequestError(self._behind)

    async def follow(self) -> None:
        """See what is resident now, or later. Raises ConfigError: it cannot be read.

        Once is enough, whatever changes meanwhile: with traces and audited answers that may be at every moment.
        """
        if self._state.change_number() == self._seen:
            return
        async with self._turn:
            if (number := self._state.change_number()) == self._seen:
                return
            await self._names.follow()
            self._seen = number
