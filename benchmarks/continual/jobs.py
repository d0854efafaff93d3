"""Streams in several processes, independent of each other."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks.continual.stream import Run
from benchmarks.parent import end_with_parent
from inducekv_vllm.errors import InduceKVError

Stream = Callable[[Run], dict[str, Any]]  # runs it to its end and returns the content of its matrix.json
Outcome = dict[str, Any] | InduceKVError


def run_all(runs: Sequence[Run], stream: Stream, jobs: int, threads: int) -> Iterator[tuple[Run, Outcome]]:
    """Each stream with its outcome, as they end; an InduceKVError of one stream does not stop the others.

    Args:
        jobs: processes; one job runs in this process.
        threads: of torch, in each process.

    Raises Exception: any other error of a stream; the other streams are ended.
    """
    if jobs == 1:
        prepare_process(threads)
        for run in runs:
            yield run, attempt(stream, run)
        return
    waiting = deque(runs)
    running: dict[Future[Outcome], Run] = {}
    executor = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), prepare_worker, (threads,))
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                run = waiting.popleft()
                running[executor.submit(attempt, stream, run)] = run
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future.result()
    except BaseException:
        for child in multiprocessing.active_children():
            child.terminate()
        raise
    finally:
        executor.shutdown()


def attempt(stream: Stream, run: Run) -> Outcome:
    try:
        return stream(run)
    except InduceKVError as error:
        return error


def prepare_worker(threads: int) -> None:
    end_with_parent()
    prepare_process(threads)


def prepare_process(threads: int) -> None:
    torch.set_num_threads(threads)
    disable_progress_bar()
