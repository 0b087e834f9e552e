"""Runs functions on several ranks of a gloo group. The processes come from a fork server that has imported torch once."""

from __future__ import annotations

import datetime
import io
import multiprocessing
import os
import tempfile
import traceback
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = 20  # seconds that a rank waits for another


def _worker(rank: int, size: int, store: str, cases: list[Any], results: Any) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=TIMEOUT)
    files = dist.FileStore(store, size)
    dist.init_process_group("gloo", store=files, rank=rank, world_size=size, timeout=timeout)
    # A rank that is meant to die in its case may not do so while another still connects to it.
    files.set(f"connected/{rank}", "")
    files.wait([f"connected/{other}" for other in range(size)], timeout)
    for index, (function, arguments) in enumerate(cases):
        try:
            # As bytes: a tensor in a queue would be shared memory of a process that is about to end.
            buffer = io.BytesIO()
            torch.save(function(*arguments), buffer)
            results.put((index, rank, buffer.getvalue(), None))
        except Exception as error:  # handed to the test, which knows whether it is expected
            results.put((index, rank, None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    results.close()
    results.join_thread()
    os._exit(0)  # a group that a test broke on purpose may not be destroyed in order


def run(size: int, cases: list[tuple[Any, tuple[Any, ...]]], *, dead: tuple[int, ...] = ()) -> list[list[Any]]:
    """results[case][rank] of function(*arguments) on every rank. A rank that raises gives its message as a
    `Failure`; ranks in `dead` give None, since they are expected to end without a word."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "lmhead", "lmhead.torch_ops"])
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_worker, args=(rank, size, f"{folder}/store", cases, results), daemon=True)
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        collected: list[list[Any]] = [[None] * size for _ in cases]
        try:
            for _ in range(len(cases) * (size - len(dead))):
                index, rank, result, error = results.get(timeout=4 * TIMEOUT)
                if error is None:
                    result = torch.load(io.BytesIO(result), weights_only=False)
                collected[index][rank] = result if error is None else Failure(error)
        finally:
            for process in processes:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()
    return collected


class Failure(str):
    """What a rank raised, as "Type: message" and its traceback."""


def checked(results: list[Any]) -> list[Any]:
    """The results of all ranks, none of which may have failed."""
    for rank, result in enumerate(results):
        assert not isinstance(result, Failure), f"rank {rank}: {result}"
    return results
