"""ProgramParts: what an RProgram consists of, as plain data; ``program`` adds what follows from it, ``text`` its form.

Tasks name an operator and a tile, never source. Buffers and storages say where tensors live; counters
and waits say what must have finished.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from rammer.ir.extent import AffineExtent
from rammer.ir.operator import ROperator
from rammer.ir.types import itemsize, row_major

#: A ``state`` holds an input and, in its place, an output that continues it (``standing``).
BufferKind: TypeAlias = Literal["input", "output", "constant", "arena", "state"]
#: When a repeated program moves what.
MoveTime: TypeAlias = Literal["once", "first", "before", "after", "last"]

#: What a user may ask for. ``tf32`` lets contractions of float32 round their operands to 10 bits of mantissa, ``bfloat16`` to 7;
#: ``float16`` stores tensors in 16 bits. Sums are float32 in all.
PRECISIONS: Final = ("float32", "tf32", "float16", "bfloat16")

#: Arena offsets are multiples of this many bytes: one cache line, and the widest vector load.
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Buffer:
    """``size`` elements of ``dtype``; ``offset`` (bytes) places an arena buffer, others stand alone. Of a program over several
    devices, ``home`` is the one that has it."""

    name: str
    dtype: str
    size: int
    kind: BufferKind
    offset: int = 0
    home: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.size * itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class Storage:
    """Where a tensor lives: element ``offset`` into ``buffer`` and element ``strides`` per axis."""

    tensor: str
    buffer: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def row_major(self) -> bool:
        """Whether the tensor is dense with its last axis innermost."""
        steps = zip(self.strides, row_major(self.shape), self.shape, strict=True)
        return all(have == want for have, want, extent in steps if extent > 1)

    def span(self) -> tuple[int, int]:
        """Half-open range of element addresses within the buffer; empty tensors give an empty range."""
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
    """Counts finished tasks ``first .. last-1`` of ``operator``."""

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
    """Proceed only when ``counter`` has reached ``threshold`` (in this run)."""

    counter: str
    threshold: int


@dataclass(frozen=True, slots=True)
class Task:
    """Tile ``index`` of ``operator``, after its waits."""

    operator: str
    index: int
    waits: tuple[Wait, ...] = ()


@dataclass(frozen=True, slots=True)
class Port:
    """A program input or output: the ONNX name and the tensor."""

    external: str
    tensor: str


@dataclass(frozen=True, slots=True)
class Move:
    """``size`` elements from ``source`` to ``target``, two buffers, ``once`` for all turns, for the ``first`` one, ``before``
    or ``after`` each, or ``last`` of all. In every turn they begin ``by`` elements further on than in the one before."""

    when: MoveTime
    target: str
    target_first: int
    target_by: int
    source: str
    source_first: int
    source_by: int
    size: int

    def places(self, turn: int, skipped: int = 0) -> tuple[int, int]:
        """The first element in target and source. Of a table that runs ``skipped`` times less than it may, what goes backwards
        begins at its slice of the turn of that number: the slices of all turns are the first ones in memory."""
        target, source = (turn + skipped * (by < 0) for by in (self.target_by, self.source_by))
        return self.target_first + target * self.target_by, self.source_first + source * self.source_by

    def part(self, turn: int, skipped: int, target: int, source: int) -> tuple[int, int, int]:
        """``places`` and how many elements move between buffers of so many elements: the last slice may end with its buffer."""
        to, begin = self.places(turn, skipped)
        return to, begin, max(min(self.size, target - to, source - begin), 0)


@dataclass(frozen=True, slots=True)
class Repeat:
    """A table that runs ``count`` times; ``moves`` in order, of each time. All of a turn has ended before what comes behind it
    begins. With ``until``, a function of inputs of one element (int64), it runs as often as so many steps take at ``step`` a
    turn: once at least and ``count`` times at most. A slice that would reach beyond its buffer ends with it."""

    count: int
    moves: tuple[Move, ...]
    until: AffineExtent | None = None
    step: int = 1

    def at(self, when: MoveTime) -> tuple[Move, ...]:
        """The moves of one time."""
        return tuple(m for m in self.moves if m.when == when)

    def turns(self, length: Callable[[str], int]) -> int:
        """How often it runs where ``length`` gives the inputs of one element, by tensor."""
        if self.until is None:
            return self.count
        steps = self.until.at({name: length(name) for name, _ in self.until.terms})
        return min(max(-(-steps // self.step), 1), self.count)


@dataclass(frozen=True, slots=True)
class HomeDevice:
    """A device of a program over several: its name, and how many of the rows are its own; they begin where the one before
    ends."""

    device: str
    rows: int


@dataclass(frozen=True)
class ProgramParts:
    """``rows[vEU][order]`` and everything that its tasks refer to, except the values of the constants.

    ``predicted`` is the policy's estimate in seconds (0 = none), ``precision`` what its kernels were chosen for. With ``repeat``,
    the table is that of one turn. ``homes`` are the devices of a program over several; one for a single device has none.
    """

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
