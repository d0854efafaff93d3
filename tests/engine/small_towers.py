"""A worker whose models have small towers, in processes that a test does not share."""

from typing import Any

from inducekv_vllm.worker import InduceKVWorker
from tests.tiny_families import small_timm


class SmallTowersWorker(InduceKVWorker):
    def load_model(self, *args: Any, **options: Any) -> None:
        with small_timm():
            super().load_model(*args, **options)
