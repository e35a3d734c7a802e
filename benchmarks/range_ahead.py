"""Compilation of programs by several processes before the measurement, which then reads them from disk."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import rammer
from rammer_bench.graph import Array

Asked = TypeVar("Asked")


@dataclass(frozen=True)
class Job:
    """A program to store in the cache folder ``cache``: for a range (``spans``), or for the shapes of ``inputs``."""

    file: Path
    device: str
    cache: Path
    length: int
    spans: Mapping[str, tuple[int, int]]
    inputs: Mapping[str, Array] = field(repr=False)
    options: Mapping[str, str] = field(default_factory=dict)
    tune: str = "off"


def kept(job: Job) -> float:
    """Compile and run once, so that files of a first run are also on disk; return the CPU seconds."""
    start = time.process_time()
    exe = rammer.compile(job.file, job.device, shapes=job.spans, options=job.options, tune=job.tune)
    exe.cache_root = job.cache
    try:
        exe.run(job.inputs)
    finally:
        exe.close()
    return time.process_time() - start


def ahead(jobs: Sequence[Asked], processes: int, work: Callable[[Asked], float]) -> Iterator[tuple[Asked, float | str]]:
    """Yield each job as its ``work`` finishes, with its CPU seconds or the reason of its failure. All processes have ended at the
    end."""
    with ProcessPoolExecutor(min(processes, len(jobs)), multiprocessing.get_context("spawn")) as pool:
        asked = {pool.submit(work, job): job for job in jobs}
        for done in as_completed(asked):
            problem = done.exception()
            yield asked[done], done.result() if problem is None else f"{type(problem).__name__}: {str(problem)[:200]}"
