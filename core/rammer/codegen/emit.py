"""The generic emitter: C text for any ROperator on any C-family device."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

from rammer.codegen import operations as ops
from rammer.codegen.bounds import fold
from rammer.codegen.lanes import LaneBlock
from rammer.codegen.layout import Layout, Stage, scratch_of
from rammer.codegen.rows import Row, choose_row
from rammer.codegen.scalar import Block, Place, Unit
from rammer.codegen.target import CFunction, CTarget
from rammer.device.manifest import Binding
from rammer.ir.expr import Expr, Load, Ref, integer
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
        return Place(
            f"p{number}", kind.dtype, self.binding.storages[name].strides, (integer(0),) * len(kind.shape)
        )

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
            body.line(f"const int o{k} = ({place}) * {tile};")
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
        names = [f"x{d}" for d in range(len(stage.box))]
        for name, axis in zip(names, stage.root.axes, strict=True):
            self.unit.ranges[name] = (0, max(axis.extent - 1, 0))
        if 0 in stage.extents:
            return
        if self.target.single:
            self._nested(body, stage, names)
        else:
            self._strided(body, stage, names)

    def _nested(self, body: Block, stage: Stage, names: list[str]) -> None:
        """One thread: one loop per axis, in vectors along the axis that suits them."""
        stores = [self.globals[c.name] for c in stage.computes if c.name in self.operator.outputs]
        if stage.offset >= 0:
            stores.append(self.tiles[stage.root.name])
        row = choose_row(self.unit, stage, stores) if self.target.vectors else None
        order = [d for d in range(len(names)) if row is None or d != row.axis]
        self._loops(body, stage, names, order, row)

    def _loops(self, body: Block, stage: Stage, names: list[str], order: list[int], row: Row | None) -> None:
        if not order:
            if row is None:
                self._element(body, stage, names)
            else:
                self._row(body, stage, names, row)
            return
        d = order[0]
        bound, extent = stage.box[d], stage.root.axes[d].extent
        head = body.loop(names[d], body.value(bound.low).text, body.value(bound.high).text, extent)
        with body.nest(head) as inner:
            self._loops(inner, stage, names, order[1:], row)

    def _row(self, body: Block, stage: Stage, names: list[str], row: Row) -> None:
        """The lane axis: vectors in the interior, the last one shifted back to end on its edge, scalars outside."""
        lane, bound, width = names[row.axis], stage.box[row.axis], row.width
        extent = stage.root.axes[row.axis].extent
        low, high = body.value(bound.low).text, body.value(bound.high).text
        if row.whole:
            with body.nest(body.loop(lane, low, high, extent, width)) as inner:
                self._vector(inner, stage, names, row)
            return
        kind, at = self.unit.axis_type(extent), self.unit.fresh("n")
        first, last = (body.let(body.value(e)).text for e in (row.low, row.high))
        with body.nest(f"for ({kind} {at} = {low}; {at} < {high};)") as inner:
            test = f"{at} >= {first} && {at} < {last} && {last} - {first} >= {width}"
            with inner.nest(f"if ({test})") as vectors:
                # Computing some lanes twice is cheaper than a scalar remainder, and stores the same values.
                vectors.line(f"const {kind} {lane} = rm_min_i32({at}, {last} - {width});")
                self._vector(vectors, stage, names, row)
                vectors.line(f"{at} = {lane} + {width};")
            with inner.nest("else") as scalars:
                scalars.line(f"const {kind} {lane} = {at};")
                self._element(scalars, stage, names)
                scalars.line(f"++{at};")

    def _vector(self, body: Block, stage: Stage, names: list[str], row: Row) -> None:
        block = LaneBlock(self.unit, body, lane=names[row.axis], width=row.width)
        self._element(block, stage, names)
        body.lines += block.lines

    def _strided(self, body: Block, stage: Stage, names: list[str]) -> None:
        """Many threads: the box's elements in turn, each thread every ``threads``-th."""
        count = math.prod(stage.extents)
        with body.nest(
            f"for (int t = {self.target.thread}; t < {count}; t += {self.target.threads})"
        ) as inner:
            step = count
            tests = []
            for d, (name, bound, size) in enumerate(zip(names, stage.box, stage.extents, strict=True)):
                step //= size
                place = "t" if step == 1 else f"t / {step}"
                if size == 1:
                    place = "0"
                elif step * size < count:
                    place = f"({place}) % {size}" if step > 1 else f"t % {size}"
                low = inner.value(bound.low).text
                kind = self.unit.axis_type(stage.root.axes[d].extent)
                inner.line(
                    f"const {kind} {name} = {place if low == '0' else low if place == '0' else f'{low} + {place}'};"
                )
                if fold("sub", bound.high, bound.low) != integer(size):
                    tests.append(f"{name} >= {inner.value(bound.high).text}")
            if tests:
                inner.line(f"if ({' || '.join(tests)}) continue;")
            self._element(inner, stage, names)

    def _element(self, body: Block, stage: Stage, names: list[str]) -> None:
        """Compute and store every Compute of the stage at one point, or in one row of lanes."""
        point: tuple[Expr, ...] = tuple(Ref(n) for n in names)
        for c in stage.computes:
            value = body.inline(c, point)
            body.memo[Load(c.name, point)] = value
            if stage.offset >= 0:
                body.store(self.tiles[c.name], point, value, [])
            if c.name in self.operator.outputs:
                body.store(self.globals[c.name], point, value, self._own(body, stage, point))

    def _own(self, body: Block, stage: Stage, point: tuple[Expr, ...]) -> list[tuple[str, str]]:
        """Tests (axis, condition) that ``point`` is the task's own part, where the stage's box is larger."""
        tests = []
        for x, have, own in zip(point, stage.box, self.layout.tile, strict=True):
            if have.low != own.low:
                tests.append((str(x), f">= {body.value(own.low).text}"))
            if have.high != own.high:
                tests.append((str(x), f"< {body.value(own.high).text}"))
        return tests


def _tile(number: int, stage: Stage) -> Place:
    low = tuple(b.low for b in stage.box)
    return Place(f"s{number}", stage.root.dtype, row_major(stage.extents), low)


def _words(*parts: str) -> str:
    return " ".join(p for p in parts if p)
