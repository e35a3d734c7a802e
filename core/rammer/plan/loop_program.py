"""Conversion of the program of one iteration into a loop program: buffers of whole sequences, and moves to and from an
iteration's."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

from rammer.frontend.bind.loop_body import RolledTurn
from rammer.ir.extent import AffineExtent
from rammer.ir.program import Buffer, BufferKind, Move, MoveTime, Port, Repeat, RProgram, Storage, dense
from rammer.ir.types import TensorType


def turn_ports(turn: RolledTurn, program: RProgram) -> RolledTurn:
    """Return ``turn`` with the tensors of the program compiled from it as inputs and outputs. The program may lack unused
    inputs: that of a state is then "", others are left out."""
    tensor = {p.external: p.tensor for p in (*program.inputs, *program.outputs)}
    return replace(
        turn,
        states=tuple((tensor.get(i, ""), first, tensor[r], last) for i, first, r, last in turn.states),
        slices=tuple((tensor[i], value, back) for i, value, back in turn.slices if i in tensor),
        gathered=tuple((tensor[r], value, back) for r, value, back in turn.gathered),
        fixed=tuple((tensor[i], value) for i, value in turn.fixed if i in tensor),
    )


def repeat_program(
    turn: RProgram,
    ports: RolledTurn,
    types: Mapping[str, TensorType],
    constants: Collection[str],
    until: AffineExtent | None = None,
    step: int = 1,
) -> RProgram:
    """Return ``ports.count`` iterations of ``turn`` as one program whose ports have the names and ``types`` of the values. Values
    in ``constants`` are constants of the program. With ``until``, ``ports.count`` is the maximum, as in ``Repeat``."""
    made = _Seam(turn, types, constants, Repeat(ports.count, (), until, step))
    for name, _ in until.terms if until is not None else ():
        made.read(name)
    for given, first, result, last in ports.states:
        if given:
            made.move("first", given, made.read(first))
            made.move("after", given, result)
        if last:
            made.move("last", made.written(last), result)
    for given, value in ports.fixed:
        made.move("once", given, made.read(value))
    for given, value, back in ports.slices:
        made.move("before", given, made.read(value), back)
    for result, value, back in ports.gathered:
        if value:
            made.move("after", made.written(value), result, back)
    return made.program()


class _Seam:
    """A loop program under construction."""

    def __init__(self, turn: RProgram, types: Mapping[str, TensorType], constants: Collection[str], repeat: Repeat) -> None:
        self.turn, self.types, self.constants, self.repeat = turn, types, constants, repeat
        self.count = repeat.count
        self.buffers: dict[str, Buffer] = {}
        self.moves: list[Move] = []

    def read(self, value: str) -> str:
        """Return the buffer of an external value, and add it if needed."""
        return self._add_buffer(value, "constant" if value in self.constants else "input")

    def written(self, value: str) -> str:
        """Return the buffer of a value of all iterations, and add it if needed."""
        return self._add_buffer(value, "output")

    def _add_buffer(self, name: str, kind: BufferKind) -> str:
        known = self.types[name]
        self.buffers.setdefault(name, Buffer(name, known.dtype, math.prod(known.shape), kind))
        return name

    def move(self, when: MoveTime, target: str, source: str, back: bool = False) -> None:
        """Add a move of one iteration's elements between its buffer and its slice of a whole sequence."""
        whole, sizes = {target, source} & self.buffers.keys(), (self._buffer_size(target), self._buffer_size(source))
        size = min(sizes)
        if whole and when in ("before", "after"):  # a whole sequence may end within its last slice
            size = next(s for n, s in zip((target, source), sizes, strict=True) if n not in whole)
        to, into = self._slice_offsets(when, target, size, back)
        begin, by = self._slice_offsets(when, source, size, back)
        self.moves.append(Move(when, self._buffer_name(target), to, into, self._buffer_name(source), begin, by, size))

    def _slice_offsets(self, when: MoveTime, name: str, size: int, back: bool) -> tuple[int, int]:
        """Return the offset of the slice of iteration 0, and the step per iteration."""
        if name not in self.buffers or when in ("once", "first", "last"):
            return 0, 0
        return ((self.count - 1) * size, -size) if back else (0, size)

    def _buffer_size(self, name: str) -> int:
        return self.buffers[name].size if name in self.buffers else self.turn.buffer[self._buffer_name(name)].size

    def _buffer_name(self, name: str) -> str:
        return name if name in self.buffers else self.turn.storage[name].buffer

    def program(self) -> RProgram:
        """Return the complete loop program."""
        whole = self.buffers.values()
        storages: list[Storage] = [dense(b.name, b.name, self.types[b.name].shape) for b in whole]
        return replace(
            self.turn,
            inputs=tuple(Port(b.name, b.name) for b in whole if b.kind == "input"),
            outputs=tuple(Port(b.name, b.name) for b in whole if b.kind == "output"),
            buffers=(*self.turn.buffers, *whole),
            storages=(*self.turn.storages, *storages),
            predicted=self.turn.predicted * self.count,
            repeat=replace(self.repeat, moves=tuple(self.moves)),
        )
