"""Proof of the moves between the iterations of a repeated program.

One iteration is proved like any program. Executors finish an iteration before any move, and move in order. So two facts remain to
be proved. An iteration finds all that it reads, in its slice or from the previous iteration. All iterations together write each
output element once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from rammer.ir.parts import Buffer, Move, Repeat
from rammer.ir.program import RProgram, dense
from rammer.verify.expressions import FARTHEST, VerifyError
from rammer.verify.structure import check_length
from rammer.verify.writers import Owners

#: Maximum iterations of a program, and moves of an iteration.
MOST_TURNS: Final = 1 << 31
MOST_MOVES: Final = 1 << 16
#: The kinds of buffers that may be the target of a move, by its time.
_TARGETS: Final = {
    "once": ("input",),
    "first": ("input",),
    "before": ("input",),
    "after": ("input", "output"),
    "last": ("output",),
}


def check_seam(program: RProgram, owners: Mapping[str, Owners]) -> frozenset[str]:
    """Return the output buffers that moves write. Raise VerifyError if the moves miss a read or a write."""
    ports = {program.storage[p.tensor].buffer for p in program.inputs}
    repeat = program.repeat
    moves = repeat.moves if repeat is not None else ()
    if repeat is not None and not (1 <= repeat.count <= MOST_TURNS and len(moves) <= MOST_MOVES):
        raise VerifyError(f"a program has at most {MOST_TURNS} iterations and {MOST_MOVES} moves in each", program.name)
    if repeat is not None:
        _check_until(program, repeat)
    by_target: dict[str, list[Move]] = {}
    for move in moves:
        _check_move(program, move, ports, owners)
        by_target.setdefault(move.target, []).append(move)
    for buffer in program.buffers:
        if repeat is not None and buffer.kind == "input" and buffer.name not in ports:
            _check_filled(buffer, by_target.get(buffer.name, ()))
    gathered = {n: found for n, found in by_target.items() if program.buffer[n].kind == "output"}
    for name, found in gathered.items():
        _check_gathered(program, program.buffer[name], found, owners)
    return frozenset(gathered)


def _check_until(program: RProgram, repeat: Repeat) -> None:
    """Check that iterations depend on lengths and have as many steps as their slices, so all valid elements are written."""
    if repeat.until is None:
        if repeat.step != 1:
            raise VerifyError("iterations without a bound must have step 1", program.name)
        return
    check_length(program, f"until {repeat.until}", repeat.until, program.name)
    rows = {s.buffer: s.shape[0] for s in program.storages if s.row_major and s.shape and not s.offset}
    for move in repeat.at("after"):
        buffer = program.buffer.get(move.target)
        if buffer is None or buffer.kind != "output" or not move.size:
            continue
        steps = rows.get(move.target, 0)
        if not steps or move.size * steps != buffer.size * repeat.step:
            raise VerifyError(f"an iteration does not write {repeat.step} steps of {move.target}", _move_title(move))


def _check_move(program: RProgram, move: Move, ports: set[str], owners: Mapping[str, Owners]) -> None:
    """Check that a move has two buffers of one type, stays within both in every iteration, and reads a complete source."""
    where = _move_title(move)
    if move.target == move.source or not {move.target, move.source} <= program.buffer.keys():
        raise VerifyError("a move needs two buffers of the program", where)
    target, source = program.buffer[move.target], program.buffer[move.source]
    if target.dtype != source.dtype:
        raise VerifyError(f"{source.dtype} is moved into {target.dtype}", where)
    at_end, once = move.when in ("after", "last"), move.when in ("once", "first", "last")
    if once and (move.target_by or move.source_by):
        raise VerifyError("a move that runs once has constant offsets", where)
    if max(abs(move.target_by), abs(move.source_by)) * program.turns >= FARTHEST:
        raise VerifyError("its offsets exceed any memory", where)
    for turn in (0,) if once else (0, program.turns - 1):
        open_end = program.repeat is not None and program.repeat.until is not None and not once
        for buffer, first, by in zip((target, source), move.places(turn), (move.target_by, move.source_by), strict=True):
            size = min(move.size, buffer.size - first) if open_end and by else move.size  # the last slice may be short
            if not 0 <= first <= first + size <= buffer.size or (move.size and not size):
                reach = f"elements {first}..{first + move.size} of {buffer.name}, which has {buffer.size}"
                raise VerifyError(f"iteration {turn} moves {reach}", where)
    if target.name in ports or target.kind not in _TARGETS[move.when]:
        raise VerifyError(f"a move at this time must not write {target.name}", where)
    if not at_end and (source.kind != "input" or source.name not in ports) and source.kind != "constant":
        raise VerifyError(f"{source.name} is undefined before an iteration", where)
    if at_end and not (source.kind == "output" and _is_fully_written(source, owners)):
        raise VerifyError(f"{source.name} is not fully written in every iteration", where)


def _is_fully_written(buffer: Buffer, owners: Mapping[str, Owners]) -> bool:
    """Return True if operators write every element of the buffer."""
    return not buffer.size or owners[buffer.name].of(dense(buffer.name, buffer.name, (buffer.size,)))[1]


def _check_filled(buffer: Buffer, moves: Iterable[Move]) -> None:
    """Check that a buffer is filled by its slice, once, or first and then after every iteration."""
    found = list(moves)
    times = sorted(m.when for m in found)
    if times not in (["once"], ["before"], ["after", "first"]):
        had = f"has moves {', '.join(times)}" if times else "has no moves"
        raise VerifyError(
            f"{buffer.name} must be filled before every iteration, or first and after every iteration, but {had}", buffer.name
        )
    for move in found:
        if (move.target_first, move.target_by, move.size) != (0, 0, buffer.size):
            raise VerifyError(f"{buffer.name} is not fully written", _move_title(move))


def _check_gathered(program: RProgram, buffer: Buffer, moves: Iterable[Move], owners: Mapping[str, Owners]) -> None:
    """Check that the slices of all iterations cover the buffer, each element once."""
    move, *others = moves
    if others or any(owners[buffer.name].of(program.storage[t])[0] for t in _buffer_tensors(program, buffer)):
        raise VerifyError(f"{buffer.name} is written by more than one move or operator", _move_title(move))
    turns = program.turns if move.when == "after" else 1
    first = min(move.places(turn)[0] for turn in (0, turns - 1))
    disjoint = abs(move.target_by) == move.size or turns == 1
    left = move.size * turns - buffer.size
    whole = 0 <= left < max(move.size, 1) if program.repeat is not None and program.repeat.until is not None else not left
    if first or not disjoint or not whole:
        raise VerifyError(f"the iterations do not write each element of {buffer.name} once", _move_title(move))


def _buffer_tensors(program: RProgram, buffer: Buffer) -> list[str]:
    return [s.tensor for s in program.storages if s.buffer == buffer.name]


def _move_title(move: Move) -> str:
    return f"move {move.when} {move.target} <- {move.source}"
