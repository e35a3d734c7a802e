"""Proof of the rules for programs over several devices: access to memory and visibility of other devices' tasks.

The order of tasks follows from rows and waits as in any program (``happens_before``). That proof covers reads after the transfers
that bring their data, reuse of memory after a transfer has read it, and circles. This module checks the rest:

- A device has separate rows and memory.
- Only a transfer reads the memory of one device and writes that of another.
- A transfer runs alone on a row, so no order follows from earlier tasks of the row.
- Transferred data is visible to tasks that wait for the transfer itself, not to tasks that wait for it indirectly.

A tensor with a dynamic shape is *fetched*: a transfer brings a record of its extents. An operator on the reader's device waits
for the record, then reads as much of the tensor as the record states. The tensor's device is notified of the end of the fetch,
its acknowledgement. Only tasks that wait for the acknowledgement may reuse the tensor's memory.
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
#: The kernel family of an operator that reads a tensor of another device up to the extents in a record.
FETCH: Final = "fetch"
#: All kernel families that cross devices.
CROSSING: Final = frozenset({TRANSFER, FETCH})


def home_of(program: RProgram, tensor: str) -> int:
    """Return the number of the device whose memory holds ``tensor``."""
    return program.buffer[program.storage[tensor].buffer].home


def fetched_body(source: str, record: str, target: Compute, fills: Mapping[int, Const]) -> Expr:
    """Return the body of a fetch of ``source`` into ``target``. Along the axes in ``fills``, the data ends at the extent in the
    tensor ``record``, followed by the fill."""
    body: Expr = Load(source, tuple(Ref(a.name) for a in target.axes))
    for d in sorted(fills, reverse=True):
        body = Op("where", (Op("lt", (Ref(target.axes[d].name), Load(record, (integer(d),)))), body, fills[d]))
    return body


def check_homes(program: RProgram) -> None:
    """Raise VerifyError for a violation of the rules between devices. All other rules of form are already checked."""
    check_rows(program)
    if not program.homes:
        stray = next((b for b in program.buffers if b.home), None)
        odd = next((o for o in program.operators if o.family in CROSSING), None)
        if stray or odd:
            raise VerifyError(
                "a program for one device has a transfer or a buffer of another device", (stray or odd or program).name
            )
        return
    if program.repeat is not None:
        raise VerifyError("a loop program cannot run over several devices", program.name)
    for buffer in program.buffers:
        if buffer.home >= len(program.homes):
            raise VerifyError(f"buffer {buffer.name} is on device {buffer.home} of {len(program.homes)}", buffer.name)
    _check_arenas(program)
    _Homes(program, _operator_devices(program)).check()


def check_rows(program: RProgram) -> None:
    """Check that the devices' rows add up to the program's."""
    if program.homes and sum(h.rows for h in program.homes) != program.veus:
        raise VerifyError(f"the rows of its {len(program.homes)} devices do not add up to {program.veus}", program.name)


def _operator_devices(program: RProgram) -> dict[str, int]:
    """Return the device of each operator that has tasks. Raise VerifyError for an operator on two devices."""
    found: dict[str, int] = {}
    for veu, row in enumerate(program.rows):
        home = program.row_homes[veu]
        for place, task in enumerate(row):
            if found.setdefault(task.operator, home) != home:
                raise VerifyError(f"{task.operator} runs on two devices", f"v{veu} place {place}: {task.operator}[{task.index}]")
    return found


def _check_arenas(program: RProgram) -> None:
    """Check that devices have disjoint ranges of the arena, so that one device can simulate all of them."""
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
    """A checker of the rules between devices; ``operators`` maps the operators with tasks to their devices."""

    program: RProgram
    operators: Mapping[str, int]

    def check(self) -> None:
        """Check all rules, operator by operator and then row by row."""
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
            raise VerifyError(f"transfer {operator.name} changes the type of {source}", operator.name)
        if not (program.storage[source].row_major and program.storage[target.name].row_major):
            raise VerifyError(f"transfer {operator.name} moves a tensor that is not contiguous", operator.name)
        if home_of(program, source) != home or home_of(program, target.name) == home:
            raise VerifyError(
                f"transfer {operator.name} of device {home} does not write from there to another device", operator.name
            )

    def _check_fetch(self, operator: ROperator, home: int) -> None:
        """Check that a fetch reads one tensor of another device, up to a record that was sent to its device."""
        program, target = self.program, operator.anchor
        source, record, fills = _parse_fetch(target)
        if not fills or not _is_one(operator) or target.body != fetched_body(source, record, target, fills):
            raise VerifyError(f"fetch {operator.name} is more than a copy in one task, up to a record", operator.name)
        if program.types[source] != program.types[target.name] or program.types[record].shape != (len(target.axes),):
            raise VerifyError(f"fetch {operator.name} changes the type of {source}", operator.name)
        if not (program.storage[source].row_major and program.storage[target.name].row_major):
            raise VerifyError(f"fetch {operator.name} reads a tensor that is not contiguous", operator.name)
        if home_of(program, source) == home or home_of(program, target.name) != home:
            raise VerifyError(f"fetch {operator.name} of device {home} does not read a tensor of another device", operator.name)
        maker = next((o for o in program.operators if record in o.outputs), None)
        if maker is None or maker.family != TRANSFER or home_of(program, record) != home:
            raise VerifyError(f"fetch {operator.name} has no record that was sent to device {home}", operator.name)

    def _check_row(self, veu: int, brings: Mapping[str, set[str]]) -> None:
        """Check that waits are for local or arriving operators, and that reads of transferred data wait for it."""
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
        """Return the operator of ``wait``. Raise VerifyError if its completion is not visible on device ``home``."""
        name = self.program.counter[wait.counter].operator
        operator, arrives = self.program.operator[name], False
        if operator.family == TRANSFER:
            arrives = home_of(self.program, operator.anchor.name) == home
        elif operator.family == FETCH:  # acknowledged on the device of the tensor
            arrives = any(home_of(self.program, tensor) == home for tensor in operator.inputs)
        if self.operators[name] != home and not arrives:
            raise VerifyError(
                f"waits for counter {wait.counter} of device {self.operators[name]}, which does not arrive here", where
            )
        return name


def _is_one(operator: ROperator) -> bool:
    """Return True if the operator makes one tensor without a reduction, in one task that every run computes."""
    whole = len(operator.computes) == 1 and not operator.anchor.combiner and operator.task_count == 1
    return whole and operator.outputs == (operator.anchor.name,) and not operator.skips


def _parse_fetch(target: Compute) -> tuple[str, str, dict[int, Const]]:
    """Return the source, the record and the fills by axis of a fetch, if it has the form of ``fetched_body``."""
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
