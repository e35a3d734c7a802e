"""The generic emitter: C text for any ROperator on any C-family device."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from rammer.codegen import operations as ops
from rammer.codegen.layout import Layout, Stage, scratch_of
from rammer.codegen.nests import Nest, Target, Test
from rammer.codegen.scalar import Block
from rammer.codegen.target import CFunction, CTarget
from rammer.codegen.unit import Place, Unit
from rammer.device.manifest import Binding
from rammer.ir.expr import Expr, integer
from rammer.ir.operator import ROperator
from rammer.ir.types import row_major


def emit(operator: ROperator, binding: Binding, target: CTarget) -> CFunction:
    """One C function that computes any task of ``operator``.

    Raises DeviceFailure where the dialect lacks an element type, ValueError where the operator is
    ill-formed (Computes that meet at no layer, stored tensors without a storage).
    """
    return _Emitter(operator, binding, target).function()


def scratch_bytes(operator: ROperator, binding: Binding) -> int:
    """Bytes of vEU memory that ``emit`` will ask for."""
    return scratch_of(Layout(operator, binding.types).stages)


@dataclass
class _Emitter:
    """Emission of one function: ``globals`` are the stored tensors, ``tiles`` those in scratch memory."""

    operator: ROperator
    binding: Binding
    target: CTarget

    def __post_init__(self) -> None:
        self.layout = Layout(self.operator, self.binding.types)
        self.stages = self.layout.stages
        self.scratch = scratch_of(self.stages)
        inputs = tuple((name, False) for name in self.operator.inputs)
        self.arguments = inputs + tuple((name, True) for name in self.operator.outputs)
        self.globals = {name: self._global(k, name) for k, (name, _) in enumerate(self.arguments)}
        staged = [s for s in self.stages if s.offset >= 0]
        self.tiles = {s.root.name: _tile(k, s) for k, s in enumerate(staged)}
        self.unit = Unit(
            self.target,
            self.binding.types,
            self.layout.inlined,
            {**self.globals, **self.tiles},
            dict(self.layout.ranges),
        )

    def _global(self, number: int, name: str) -> Place:
        if name not in self.binding.storages:
            raise ValueError(f"operator {self.operator.name}: {name} has no storage")
        kind = self.binding.types[name]
        strides = self.binding.storages[name].strides
        return Place(f"p{number}", kind.dtype, strides, (integer(0),) * len(kind.shape), kind.shape)

    def function(self) -> CFunction:
        """The finished function."""
        body = Block(self.unit)
        self._origins(body)
        self._tile_pointers(body)
        for stage in self.stages:
            self._stage(body, stage)
            if self.target.barrier and self.scratch:
                # After the last stage too: the group's next task reuses the scratch memory.
                body.line(self.target.barrier)
        text = "".join(self.unit.tables.values()) + self._head("@NAME@") + " {\n"
        text += "".join(f"  {line}\n" for line in body.lines) + "}\n"
        name = "rm_" + hashlib.sha256(text.encode()).hexdigest()[:20]
        return CFunction(name, text.replace("@NAME@", name), self.arguments, self.scratch)

    def _head(self, name: str) -> str:
        parts = []
        for number, (tensor, written) in enumerate(self.arguments):
            const = "" if written or not self.target.restrict else "const"
            kind = ops.ctype(self.target, self.binding.types[tensor].dtype)
            parts.append(
                f"{_words(self.target.global_, const, kind)} *{_words(self.target.restrict, f'p{number}')}"
            )
        parts += [f"{_words(self.target.local, 'char')} *scratch", "int task"]
        return f"{_words(self.target.function, 'void')} {name}({', '.join(parts)})"

    def _origins(self, body: Block) -> None:
        """Decode the task index (row-major over the grid) and bound the boxes of the staged tiles."""
        grid, last = self.operator.grid, True
        step = math.prod(grid)
        for k, (tile, count) in enumerate(zip(self.operator.tile, grid, strict=True)):
            if count <= 1:
                continue
            step //= count
            place = f"task / {step}" if step > 1 else "task"
            place = place if last else f"({place}) % {count}" if step > 1 else f"task % {count}"
            body.line(f"const int o{k} = {place if tile == 1 else f'({place}) * {tile}'};")
            last = False
        for name, e in self.layout.variables.items():
            body.line(
                f"const {self.unit.axis_type(self.unit.ranges[name][1])} {name} = {body.value(e).text};"
            )

    def _tile_pointers(self, body: Block) -> None:
        for number, stage in enumerate(s for s in self.stages if s.offset >= 0):
            pointer = f"{_words(self.target.local, ops.ctype(self.target, stage.root.dtype))} *"
            body.line(f"{pointer}s{number} = ({pointer})(scratch + {stage.offset});")

    def _stage(self, body: Block, stage: Stage) -> None:
        targets = []
        for c in stage.computes:
            written = [Target(self.tiles[c.name], lambda *_: [])] if stage.offset >= 0 else []
            if c.name in self.operator.outputs:
                written.append(Target(self.globals[c.name], partial(self._own, stage)))
            targets.append((c, written))
        Nest(self.unit, stage, targets).emit(body)

    def _own(self, stage: Stage, body: Block, point: Sequence[Expr]) -> list[Test]:
        """Tests that ``point`` is the task's own part, where the stage's box is larger."""
        tests = []
        for x, have, own in zip(point, stage.box, self.layout.tile, strict=True):
            if have.low != own.low:
                tests.append((str(x), f">= {body.value(own.low).text}"))
            if have.high != own.high:
                tests.append((str(x), f"< {body.value(own.high).text}"))
        return tests


def _tile(number: int, stage: Stage) -> Place:
    low = tuple(b.low for b in stage.box)
    return Place(f"s{number}", stage.root.dtype, row_major(stage.extents), low, stage.extents)


def _words(*parts: str) -> str:
    return " ".join(p for p in parts if p)
