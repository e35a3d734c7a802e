"""Proof of what is particular to a program over several devices: who may touch which memory, and how one hears of another.

What one task knows of others follows from rows and waits as in any program (``clocks``); so reads after the transfers that
bring what they read, reuse of memory after a transfer has read it, and circles are found there. Here: a device has its own
rows and memory; only a transfer reads in one and writes in another, and it goes on by itself, on a row of its own, so that
nothing follows from what came before it; and what it brings is there for those who have waited for it, not for those who
heard of it from a third.

A tensor whose shape a run decides is *fetched*: a transfer brings a record of its extents, and an operator of the reader's device
that has waited for that reads the tensor where it is made, as much as the record says. There the end of the fetch is heard of,
its acknowledgement, and only who has heard of it may use the tensor's memory again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from rammer.ir.compute import Compute
from rammer.ir.expr import Const, Expr, Load, Op, Ref, integer
from rammer.ir.operator import ROperator
from rammer.ir.program import RProgram, Wait
from rammer.verify.expressions import VerifyError

__all__ = ["CROSSING", "FETCH", "TRANSFER", "check_homes", "fetched_body", "home_of"]

#: The kernel family of an operator that moves a tensor from one device to another.
TRANSFER: Final = "transfer"
#: That of one that reads as much of another device's tensor as a record says.
FETCH: Final = "fetch"
#: Of all that goes from one device to another.
CROSSING: Final = frozenset({TRANSFER, FETCH})


def home_of(program: RProgram, tensor: str) -> int:
    """The number of the device whose memory holds ``tensor``."""
    return program.buffer[program.storage[tensor].buffer].home


def fetched_body(source: str, record: str, target: Compute, fills: Mapping[int, Const]) -> Expr:
    """The body of a fetch of ``source`` into ``target``: along the axes that have one of ``fills`` it ends where the tensor
    ``record`` says, and the fill lies beyond."""
    body: Expr = Load(source, tuple(Ref(a.name) for a in target.axes))
    for d in sorted(fills, reverse=True):
        body = Op("where", (Op("lt", (Ref(target.axes[d].name), Load(record, (integer(d),)))), body, fills[d]))
    return body


def check_homes(program: RProgram) -> None:
    """VerifyError for what breaks the rules between devices. Everything else about the program's form has been checked."""
    check_rows(program)
    if not program.homes:
        stray = next((b for b in program.buffers if b.home), None)
        odd = next((o for o in program.operators if o.family in CROSSING), None)
        if stray or odd:
            raise VerifyError("a program for one device has a buffer of another or a transfer", (stray or odd or program).name)
        return
    if program.repeat is not None:
        raise VerifyError("a program over several devices repeats no turns", program.name)
    for buffer in program.buffers:
        if buffer.home >= len(program.homes):
            raise VerifyError(f"buffer {buffer.name} is on device {buffer.home} of {len(program.homes)}", buffer.name)
    _check_arenas(program)
    _Homes(program, _operator_devices(program)).check()


def check_rows(program: RProgram) -> None:
    """The devices' rows are the program's."""
    if program.homes and sum(h.rows for h in program.homes) != program.veus:
        raise VerifyError(f"its {len(program.homes)} devices do not share out its {program.veus} rows", program.name)


def _operator_devices(program: RProgram) -> dict[str, int]:
    """The device of each operator that has tasks. VerifyError for one that runs on two."""
    found: dict[str, int] = {}
    for veu, row in enumerate(program.rows):
        home = program.row_homes[veu]
        for place, task in enumerate(row):
            if found.setdefault(task.operator, home) != home:
                raise VerifyError(f"{task.operator} runs on two devices", f"v{veu} place {place}: {task.operator}[{task.index}]")
    return found


def _check_arenas(program: RProgram) -> None:
    """Devices share no bytes of the arena: each has a range of its own, so that one device can play all of them."""
    spans = [(b.offset, b.offset + b.nbytes, b) for b in program.buffers if b.kind == "arena" and b.nbytes]
    ranges: dict[int, tuple[int, int]] = {}
    for low, high, buffer in spans:
        have = ranges.get(buffer.home, (low, high))
        ranges[buffer.home] = min(low, have[0]), max(high, have[1])
    ordered = sorted((*span, home) for home, span in ranges.items())
    for (_, end, one), (begin, _, other) in pairwise(ordered):
        if begin < end:
            raise VerifyError(f"devices {one} and {other} share bytes of the arena", f"byte {begin}")


@dataclass(frozen=True)
class _Homes:
    """``operators`` are the devices of those that have tasks."""

    program: RProgram
    operators: Mapping[str, int]

    def check(self) -> None:
        """All rules, operator by operator and then row by row."""
        brings: dict[str, set[str]] = {}  # buffer -> transfers that write it
        for name, home in self.operators.items():
            operator = self.program.operator[name]
            if operator.family == TRANSFER:
                self._check_transfer(operator, home)
                brings.setdefault(self.program.storage[operator.anchor.name].buffer, set()).add(name)
            elif operator.family == FETCH:
                self._check_fetch(operator, home)
            else:
                self._check_inside(operator, home)
        for veu, row in enumerate(self.program.rows):
            if row:
                self._check_row(veu, brings)

    def _check_inside(self, operator: ROperator, home: int) -> None:
        for tensor in (*operator.inputs, *operator.lengths, *operator.outputs):
            there = home_of(self.program, tensor)
            if there != home:
                raise VerifyError(
                    f"{operator.name} runs on device {home} and uses {tensor}, which is on device {there}",
                    operator.name,
                    "a transfer is missing",
                )

    def _check_transfer(self, operator: ROperator, home: int) -> None:
        program, target = self.program, operator.anchor
        body = target.body
        plain = isinstance(body, Load) and body == Load(body.tensor, tuple(Ref(a.name) for a in target.axes))
        if not plain or not _is_one(operator):
            raise VerifyError(f"transfer {operator.name} is more than a copy in one task", operator.name)
        (source,) = operator.inputs
        if program.types[source] != program.types[target.name]:
            raise VerifyError(f"transfer {operator.name} makes another type of {source}", operator.name)
        if not (program.storage[source].row_major and program.storage[target.name].row_major):
            raise VerifyError(f"transfer {operator.name} moves what does not lie in one piece", operator.name)
        if home_of(program, source) != home or home_of(program, target.name) == home:
            raise VerifyError(
                f"transfer {operator.name} of device {home} does not write from there to another one", operator.name
            )

    def _check_fetch(self, operator: ROperator, home: int) -> None:
        """It reads one tensor of another device, as much as a record says that has been brought to its own."""
        program, target = self.program, operator.anchor
        source, record, fills = _parse_fetch(target)
        if not fills or not _is_one(operator) or target.body != fetched_body(source, record, target, fills):
            raise VerifyError(f"fetch {operator.name} is more than a copy in one task, up to a record", operator.name)
        if program.types[source] != program.types[target.name] or program.types[record].shape != (len(target.axes),):
            raise VerifyError(f"fetch {operator.name} makes another type of {source}", operator.name)
        if not (program.storage[source].row_major and program.storage[target.name].row_major):
            raise VerifyError(f"fetch {operator.name} reads what does not lie in one piece", operator.name)
        if home_of(program, source) == home or home_of(program, target.name) != home:
            raise VerifyError(f"fetch {operator.name} of device {home} does not read another one's tensor", operator.name)
        maker = next((o for o in program.operators if record in o.outputs), None)
        if maker is None or maker.family != TRANSFER or home_of(program, record) != home:
            raise VerifyError(f"fetch {operator.name} has no record that was sent to device {home}", operator.name)

    def _check_row(self, veu: int, brings: Mapping[str, set[str]]) -> None:
        """Waits are for what happens here or arrives here; what is read has been waited for, if it arrived."""
        row, home, waited = self.program.rows[veu], self.program.row_homes[veu], set[str]()
        for place, task in enumerate(row):
            where, operator = f"v{veu} place {place}: {task.operator}[{task.index}]", self.program.operator[task.operator]
            if operator.family in CROSSING and len(row) > 1:
                raise VerifyError(f"{operator.family} {operator.name} is not alone on its row", where)
            for wait in task.waits:
                waited.add(self._awaited_operator(wait, home, where))
            for tensor in operator.inputs:
                missing = brings.get(self.program.storage[tensor].buffer, set()) - waited
                if missing:
                    raise VerifyError(
                        f"{task.operator}[{task.index}] reads {tensor}, and its row has not waited for {min(missing)}",
                        where,
                        f"a wait for {min(missing)} is missing",
                    )

    def _awaited_operator(self, wait: Wait, home: int, where: str) -> str:
        """The operator that ``wait`` is for; VerifyError where nobody can tell device ``home`` of it."""
        name = self.program.counter[wait.counter].operator
        operator, arrives = self.program.operator[name], False
        if operator.family == TRANSFER:
            arrives = home_of(self.program, operator.anchor.name) == home
        elif operator.family == FETCH:  # it is acknowledged where it has read
            arrives = any(home_of(self.program, tensor) == home for tensor in operator.inputs)
        if self.operators[name] != home and not arrives:
            raise VerifyError(
                f"waits for counter {wait.counter} of device {self.operators[name]}, which does not arrive here", where
            )
        return name


def _is_one(operator: ROperator) -> bool:
    """Whether it makes one tensor, place by place, in one task that every run computes."""
    whole = len(operator.computes) == 1 and not operator.anchor.combiner and operator.task_count == 1
    return whole and operator.outputs == (operator.anchor.name,) and not operator.endings


def _parse_fetch(target: Compute) -> tuple[str, str, dict[int, Const]]:
    """What a fetch reads, its record and what lies beyond, by axis, if it has the form of ``fetched_body``."""
    body, record, fills, axes = target.body, "", dict[int, Const](), {a.name: d for d, a in enumerate(target.axes)}
    while isinstance(body, Op) and body.fn == "where":
        test, inside, fill = body.args
        if not isinstance(fill, Const) or not isinstance(test, Op) or test.fn != "lt":
            break
        axis, end = test.args
        if not isinstance(axis, Ref) or not isinstance(end, Load):
            break
        body, record, fills[axes[axis.axis]] = inside, end.tensor, fill
    return body.tensor if isinstance(body, Load) else "", record, fills
