"""A worker with `gdn_float32`, in processes that a test does not share."""

from inducekv_vllm.worker import InduceKVWorker
from tests.engine import gdn_float32

gdn_float32.install()


class GdnFloat32Worker(InduceKVWorker):
    pass
