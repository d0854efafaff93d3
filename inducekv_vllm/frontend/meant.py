"""Which stored questions mean what a request says: found in threads beside the event loop."""

import asyncio
from typing import Final
from weakref import WeakKeyDictionary

from ..backbone.meaning import MeaningIndex, SentenceEncoder
from ..backbone.stored_facts import StoredQuestions
from ..errors import InduceKVError
from ..judge import can_be_asked
from ..vllm_seams.logs import logger_of

logger = logger_of(__name__)
LONGEST_S: Final = 0.2  # that a request waits for the vectors of a version that is new


class MeantQuestions:
    """It belongs to an event loop."""

    def __init__(self, encoder: SentenceEncoder) -> None:
        self._encoder = encoder
        self._made: WeakKeyDictionary[StoredQuestions, asyncio.Task[MeaningIndex]] = WeakKeyDictionary()

    async def places(self, questions: StoredQuestions, text: str) -> list[int]:
        """The places of the questions, the nearest first; none while their vectors are computed."""
        if not questions.texts or not can_be_asked(text):
            return []
        if (making := self._made.get(questions)) is None:
            making = asyncio.create_task(asyncio.to_thread(MeaningIndex, self._encoder, questions.texts))
            self._made[questions] = making
        await asyncio.wait([making], timeout=LONGEST_S)
        if not making.done():
            return []
        try:
            return await asyncio.to_thread(making.result().nearest, text)
        except (InduceKVError, RuntimeError) as error:
            self._made.pop(questions, None)
            logger.warning("the encoder cannot be used: a request finds facts by words alone: %s", error)
            return []
