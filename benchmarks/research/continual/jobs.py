"""Streams in several processes, independent of each other."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks.research.continual.stream import Run
from benchmarks.server_process import end_with_parent
from inducekv_vllm.errors import InduceKVError

Stream = Callable[[Run], dict[str, Any]]  # runs it to its end and returns the content of its matrix.json
Outcome = dict[str, Any] | InduceKVError


def run_all(runs: Sequence[Run], stream: Stream, jobs: int, threads: int) -> Iterator[tuple[Run, Outcome]]:
    """Each stream with its outcome, as they end; any error but an InduceKVError ends the other streams too.

    One of `jobs` runs in this process; `threads` are torch's, in each process.
    """
    if jobs == 1:
        prepare_process(threads)
        for run in runs:
            yield run, attempt(stream, run)
        return
    executor = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), prepare_worker, (threads,))
    try:
        futures = {executor.submit(attempt, stream, run): run for run in runs}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BaseException:
        for child in multiprocessing.active_children():
            child.terminate()
        raise
    finally:
        executor.shutdown(cancel_futures=True)


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
