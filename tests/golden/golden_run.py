"""Golden parts to create and compare, restricted to models and devices, as files of records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from time import process_time

import click
from golden_cubin import compiler
from golden_file import Difference, Record, differences, name_of, read, write
from golden_kernels import kernels
from golden_models import RANKED, Job, Outcome, outcome

#: Parts in the order of their creation.
PARTS = ("kernels", "cubins", "models")


@dataclass(frozen=True)
class Made:
    """New records of a golden file, its head, and the predicate of the old records that they replace."""

    file: str
    records: Sequence[Record]
    covers: Callable[[Record], bool]
    head: Record

    def compare(self) -> list[Difference]:
        """Return the differences from the frozen records."""
        return differences(self.file, filter(self.covers, read(self.file)[1]), self.records)

    def bless(self) -> None:
        """Freeze these records and keep all frozen records that they do not replace."""
        try:
            kept = [r for r in read(self.file)[1] if not self.covers(r)]
        except FileNotFoundError:
            kept = []
        write(self.file, self.head, [*kept, *self.records])


def everything(record: Record) -> bool:
    """Return True: a whole file replaces every record."""
    return True


def texts(dump: Path | None = None) -> Made:
    """Return the records of the kernels' texts, which are also written to ``dump`` if set."""
    records = []
    for number, kernel in enumerate(kernels()):
        records.append(kernel.record())
        if dump is not None:
            write_text(dump / "kernels" / f"{number:03}.cu", f"// {kernel.case}\n{kernel.text}")
    head = {"golden": "texts", "about": "hashes of the words of kernel texts (golden_text), and how kernels are launched"}
    return Made("texts", records, everything, head)


def cubins(workers: int) -> Made:
    """Return the records of the kernels' machine code."""
    with ThreadPoolExecutor(workers) as pool:
        records = list(pool.map(lambda k: k.code(), list(kernels())))
    head = {"golden": "cubins", "nvrtc": compiler(), "about": "hashes of machine code (golden_cubin), what ptxas says of it"}
    return Made("cubins", records, everything, head)


def incomparable() -> str:
    """Return the reason why frozen machine code is not comparable here, or ""."""
    frozen, here = read("cubins")[0]["nvrtc"], compiler()
    return "" if frozen == here else f"cubins are those of NVRTC {frozen} and not compared with those of {here}"


def compiled(jobs: Sequence[Job], workers: int, dump: Path | None = None) -> list[Made]:
    """Return the chosen kernels and programs of the jobs. Each of ``workers`` processes compiles one
    model and device at a time."""
    groups = [list(group) for _, group in groupby(jobs, key=lambda j: (j.model, j.device))]
    if workers == 1:
        pairs = [pair for group in groups for pair in _made(group, dump)]
    else:
        with ProcessPoolExecutor(workers) as pool:
            pairs = [pair for found in pool.map(_made, groups, [dump] * len(groups)) for pair in found]
    return [*_kernels(pairs), _programs(pairs)]


def _made(jobs: Sequence[Job], dump: Path | None) -> list[tuple[Job, Outcome]]:
    pairs = []
    for job in jobs:
        pairs.append((job, outcome(job)))
        click.echo(f"{job.model} on {job.device} in {job.precision}: after {process_time():.0f} s", err=True)
    for job, found in pairs:
        if dump is None:
            break
        folder = dump / f"{job.device.replace(' ', '-')}-{job.precision}"
        write_text(folder / f"{job.model}.program", found.text)
        write_text(folder / f"{job.model}.rankings", "\n".join(found.ranked))
    return pairs


def _kernels(pairs: Sequence[tuple[Job, Outcome]]) -> list[Made]:
    """Return the chosen kernels of the jobs' devices, or nothing if none of the devices has device-specific kernels."""
    ranked = [(job, found) for job, found in pairs if job.device in RANKED]
    head = {"golden": "choices", "about": "operators by the kernel that is predicted to be fastest; nothing is measured"}
    records = [{**vars(job), "kernels": found.kernels} for job, found in ranked]
    return [Made("choices", records, _of(job for job, _ in ranked), head)] if ranked else []


def _programs(pairs: Sequence[tuple[Job, Outcome]]) -> Made:
    head = {"golden": "programs", "about": "hashes of the parts of program texts (golden_models.program_record)"}
    return Made("programs", [found.program for _, found in pairs], _of(job for job, _ in pairs), head)


def _of(jobs: Iterable[Job]) -> Callable[[Record], bool]:
    names = {(job.device, job.precision, job.model) for job in jobs}
    return lambda record: name_of(record) in names


def write_text(path: Path, text: str) -> None:
    """Write a file and create its parent folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
