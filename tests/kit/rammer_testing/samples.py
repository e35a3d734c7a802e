"""Samples of single operators: many in one program, each on tensors at chosen offsets, judged element by element.

Every tensor has a separate, larger buffer. The ports are whole buffers, as in ``single``: a wrong address reads NaN or changes a
guard. All samples of a batch run in one program, so that a device compiles only once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeAlias

import numpy as np

from rammer.device.manifest import Binding
from rammer.errors import DeviceFailure, RammerError
from rammer.ir.compute import Compute
from rammer.ir.evaluate import evaluate_compute
from rammer.ir.expr import rename_tensors
from rammer.ir.operator import ROperator
from rammer.ir.program import Buffer, Port, RProgram, Storage, Task
from rammer.ir.types import TensorType, row_major
from rammer_testing.bounds import Bounded, bounded_results
from rammer_testing.single import GUARD, Placed, images, judge
from rammer_testing.subject import Subject

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

#: Candidates of an operator searched for kernel families, and families that run, per batch.
LOOKED, FAMILIES = 12, 3


@dataclass(frozen=True)
class Sample:
    """An untiled operator over one Compute, its operands, its expected result, and the storages of non-dense tensors. ``exact``
    requires the correctly rounded result, bit for bit."""

    line: str
    inputs: Mapping[str, Array]
    places: Mapping[str, Storage] = field(default_factory=dict)
    tile: tuple[int, ...] = ()
    exact: bool = False

    @property
    def compute(self) -> Compute:
        """The Compute parsed from the line."""
        return Compute.parse(self.line)

    def wanted(self) -> Bounded:
        """Return the expected result with its error bound."""
        compute = self.compute
        if self.exact:
            with np.errstate(all="ignore"):
                value = np.asarray(evaluate_compute(compute, _wide(self.inputs), precise=True))
                return Bounded(value.astype(compute.dtype).astype(np.float64) if value.dtype.kind == "f" else value)
        operator = ROperator(compute.name, (compute,), (), (compute.name,))
        return bounded_results(operator, self.inputs)[compute.name]

    def __str__(self) -> str:
        moved = [f"{n} strides {list(p.strides)} from {p.offset}" for n, p in self.places.items()]
        return "; ".join([self.line, *moved])


def _wide(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return the inputs with floats converted to float64."""
    return {n: a.astype(np.float64) if a.dtype.kind == "f" else a for n, a in inputs.items()}


def place(name: str, shape: Sequence[int], strides: Sequence[int], offset: int = 0) -> Storage:
    """Return a storage whose lowest element is element ``offset`` of its buffer."""
    low = sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if s < 0)
    return Storage(name, name, offset - low, tuple(shape), tuple(strides))


@dataclass(frozen=True)
class Batch:
    """A batch of samples in one program, keyed by the numbers in their tensor names."""

    samples: Sequence[Sample]
    place: Placed
    operators: tuple[ROperator, ...]

    @staticmethod
    def of(samples: Sequence[Sample], rows: int) -> Batch:
        """Return a batch of all samples with generic kernels; tasks are dealt to ``rows`` rows."""
        storages, buffers, inputs, outputs = list[Storage](), list[Buffer](), list[Port](), list[Port]()
        operators, given, results = list[ROperator](), dict[str, tuple[str, ...]](), dict[str, str]()
        for number, sample in enumerate(samples):
            operator = _numbered(sample.compute, number)
            extents = operator.anchor.shape
            operators.append(operator.tiled(sample.tile or tuple(max(1, -(-n // 2)) for n in extents)))
            shapes = {n: TensorType(str(a.dtype), a.shape) for n, a in sample.inputs.items()}
            for name, kind in {**shapes, "y": operator.anchor.type}.items():
                own = f"{name}{number}"
                where = sample.places.get(name) or place(name, kind.shape, row_major(kind.shape))
                low, high = where.span()
                first = GUARD + low % GUARD
                size = -(-(first + high - low) // GUARD) * GUARD + GUARD
                storages.append(replace(where, tensor=own, buffer=f"b_{own}", offset=first + where.offset - low))
                storages.append(Storage(f"whole_{own}", f"b_{own}", 0, (size,), (1,)))
                buffers.append(Buffer(f"b_{own}", kind.dtype, size, "output" if name == "y" else "input"))
                (outputs if name == "y" else inputs).append(Port(own, f"whole_{own}"))
                if name == "y":
                    results[own] = f"whole_{own}"
                else:
                    given[own] = (own,)
        program = RProgram("samples", "test", tuple(inputs), tuple(outputs), tuple(buffers), tuple(storages), (), (), ())
        return Batch(samples, Placed(_dealt(program, operators, rows), given, results), tuple(operators))

    def with_operators(self, operators: Sequence[ROperator], rows: int) -> Batch:
        """Return the batch with other tiles and families."""
        return replace(self, place=replace(self.place, program=_dealt(self.place.program, operators, rows)))


def _numbered(compute: Compute, number: int) -> ROperator:
    """Return an operator of ``compute`` with ``number`` in its tensor names."""
    names = {n: f"{n}{number}" for n in (*compute.reads, compute.name)}
    made = replace(compute, name=names[compute.name], body=rename_tensors(compute.body, names))
    return ROperator(made.name, (made,), (), (made.name,))


def _dealt(program: RProgram, operators: Sequence[ROperator], rows: int) -> RProgram:
    tasks = [Task(o.name, i) for o in operators for i in range(o.task_count)]
    return replace(program, operators=tuple(operators), rows=tuple(tuple(tasks[r::rows]) for r in range(rows)))


def check_samples(device: Subject, samples: Sequence[Sample], what: str, runs: int = 1) -> None:
    """Run ``samples`` with generic kernels, then with the device's candidates, and check every result."""
    rows = min(device.backend.vdevice.veus, 4)
    batch = Batch.of(samples, rows)
    wanted = [{f"y{n}": sample.wanted()} for n, sample in enumerate(samples)]
    for variant in (batch, *_variants(device, batch, rows)):
        _run(device, variant, wanted, what, runs)


def _run(device: Subject, batch: Batch, wanted: Sequence[Mapping[str, Bounded]], what: str, runs: int) -> None:
    program = batch.place.program
    loaded = device.backend.load(program, {})
    inputs = {f"{name}{n}": array for n, s in enumerate(batch.samples) for name, array in s.inputs.items()}
    try:
        for _ in range(runs):
            loaded.poison()
            have = loaded.run(images(batch.place, inputs)).outputs
            for number, (sample, want) in enumerate(zip(batch.samples, wanted, strict=True)):
                problem = judge(batch.place, have, want)
                head = program.operators[number].head()
                device.expect(not problem, f"{what}: {sample} ({head}): {problem}")
    finally:
        loaded.close()


def _variants(device: Subject, batch: Batch, rows: int) -> Iterator[Batch]:
    """Yield the batch with the first candidate of each kernel family that the device offers, one family at a time."""
    binding = Binding.of(batch.place.program, ())
    plain = [replace(o, tile=(), family="", config=()) for o in batch.operators]
    offers = [_families(device, o, binding) for o in plain]
    for turn in range(min(FAMILIES, max(map(len, offers), default=0))):
        chosen = [
            (offer[min(turn, len(offer) - 1)] if offer else own) for offer, own in zip(offers, batch.operators, strict=True)
        ]
        yield batch.with_operators(chosen, rows)


def _families(device: Subject, operator: ROperator, binding: Binding) -> list[ROperator]:
    """Return the first candidate of each family that has a kernel."""
    found: dict[str, ROperator] = {}
    for candidate in islice(device.backend.candidates(operator, binding), LOOKED):
        if candidate.family not in found:
            try:
                device.backend.kernel(candidate, binding).source  # noqa: B018
            except DeviceFailure:
                continue
            found[candidate.family] = candidate
    return list(found.values())


def refusal(device: Subject, samples: Sequence[Sample]) -> str:
    """Return the device's message if it refuses programs with these types; "" if it runs them."""
    try:
        device.backend.load(Batch.of(samples, 1).place.program, {}).close()
    except RammerError as problem:
        return str(problem)
    return ""
