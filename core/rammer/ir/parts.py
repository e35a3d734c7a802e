"""ProgramParts: the parts of an RProgram as plain data; ``program`` adds derived data, ``program_text`` the text form.

Tasks name an operator and a tile, never source. Buffers and storages define the location of tensors; counters and waits define
the tasks that must finish first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from rammer.ir.extent import AffineExtent
from rammer.ir.operator import ROperator
from rammer.ir.types import itemsize, row_major

#: A ``state`` holds an input and the output that continues it in place (``rammer.verify.in_place_state``).
BufferKind: TypeAlias = Literal["input", "output", "constant", "arena", "state"]
#: The time of a move in a loop program.
MoveTime: TypeAlias = Literal["once", "first", "before", "after", "last"]

#: Precisions that a user may select. ``tf32`` rounds float32 operands of contractions to 10 bits of mantissa, ``bfloat16`` to 7;
#: ``float16`` stores tensors in 16 bits. Sums are always float32.
PRECISIONS: Final = ("float32", "tf32", "float16", "bfloat16")

#: Alignment of arena offsets in bytes: one cache line, and the widest vector load.
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer of ``size`` elements of ``dtype``. ``offset`` (bytes) is the position of an arena buffer; other buffers are
    separate allocations. In a program over several devices, ``home`` is the device that holds it."""

    name: str
    dtype: str
    size: int
    kind: BufferKind
    offset: int = 0
    home: int = 0

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self.size * itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class Storage:
    """The location of a tensor: element ``offset`` into ``buffer`` and element ``strides`` per axis."""

    tensor: str
    buffer: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def row_major(self) -> bool:
        """True if the tensor is dense with its last axis innermost."""
        steps = zip(self.strides, row_major(self.shape), self.shape, strict=True)
        return all(have == want for have, want, extent in steps if extent > 1)

    def span(self) -> tuple[int, int]:
        """Return the half-open range of element addresses within the buffer; empty tensors give an empty range."""
        low = high = self.offset
        if 0 in self.shape:
            return low, high
        for extent, stride in zip(self.shape, self.strides, strict=True):
            if stride < 0:
                low += (extent - 1) * stride
            else:
                high += (extent - 1) * stride
        return low, high + 1


@dataclass(frozen=True, slots=True)
class Counter:
    """A counter of finished tasks ``first .. last-1`` of ``operator``."""

    name: str
    operator: str
    first: int
    last: int

    @property
    def total(self) -> int:
        """Number of contributing tasks, the full threshold."""
        return self.last - self.first


@dataclass(frozen=True, slots=True)
class Wait:
    """A condition to proceed: ``counter`` has reached ``threshold`` in this run."""

    counter: str
    threshold: int


@dataclass(frozen=True, slots=True)
class Task:
    """A task: tile ``index`` of ``operator``, after its waits."""

    operator: str
    index: int
    waits: tuple[Wait, ...] = ()


@dataclass(frozen=True, slots=True)
class Port:
    """A program input or output: its ONNX name and its tensor."""

    external: str
    tensor: str


@dataclass(frozen=True, slots=True)
class Move:
    """A copy of ``size`` elements between two buffers in a loop program.

    It happens ``once`` for all iterations, for the ``first`` one, ``before`` or ``after`` each, or after the ``last``. Each
    iteration advances target and source by ``target_by`` and ``source_by`` elements."""

    when: MoveTime
    target: str
    target_first: int
    target_by: int
    source: str
    source_first: int
    source_by: int
    size: int

    def places(self, turn: int, skipped: int = 0) -> tuple[int, int]:
        """Return the first element in target and source. If the loop runs ``skipped`` iterations fewer, a backward move starts at
        slice ``skipped``. The slices in use thus come first in memory."""
        target, source = (turn + skipped * (by < 0) for by in (self.target_by, self.source_by))
        return self.target_first + target * self.target_by, self.source_first + source * self.source_by

    def part(self, turn: int, skipped: int, target: int, source: int) -> tuple[int, int, int]:
        """Return ``places`` and the number of elements to move between buffers of ``target`` and ``source`` elements. The last
        slice may be clipped at the end of its buffer."""
        to, begin = self.places(turn, skipped)
        return to, begin, max(min(self.size, target - to, source - begin), 0)


@dataclass(frozen=True, slots=True)
class Repeat:
    """A loop over the table: ``count`` iterations, with ordered ``moves``.

    An iteration finishes before the next step begins. With ``until``, a function of one-element inputs (int64), the loop runs
    that many steps, ``step`` per iteration. The trip count is at least 1 and at most ``count``. A slice that exceeds its buffer
    is clipped."""

    count: int
    moves: tuple[Move, ...]
    until: AffineExtent | None = None
    step: int = 1

    def at(self, when: MoveTime) -> tuple[Move, ...]:
        """Return the moves of one time."""
        return tuple(m for m in self.moves if m.when == when)

    def turns(self, length: Callable[[str], int]) -> int:
        """Return the trip count; ``length`` returns the value of a one-element input."""
        if self.until is None:
            return self.count
        steps = self.until.at({name: length(name) for name, _ in self.until.terms})
        return min(max(-(-steps // self.step), 1), self.count)


@dataclass(frozen=True, slots=True)
class HomeDevice:
    """A device of a multi-device program: its name and its number of consecutive rows."""

    device: str
    rows: int


@dataclass(frozen=True)
class ProgramParts:
    """A program's ``rows[vEU][order]`` and all objects that its tasks refer to, except the values of constants.

    ``predicted`` is the policy's estimate in seconds (0 = none), ``precision`` that of its kernels. With ``repeat``, the table is
    that of one iteration. ``homes`` lists the devices of a multi-device program; () for a single device. ``form`` names the
    execution form of its device that runs it; "" is the device's first one (``rammer.device.execution_forms``)."""

    name: str
    policy: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    buffers: tuple[Buffer, ...]
    storages: tuple[Storage, ...]
    operators: tuple[ROperator, ...]
    counters: tuple[Counter, ...]
    rows: tuple[tuple[Task, ...], ...]
    predicted: float = field(default=0.0, compare=False)
    precision: str = PRECISIONS[0]
    repeat: Repeat | None = None
    homes: tuple[HomeDevice, ...] = ()
    form: str = ""
