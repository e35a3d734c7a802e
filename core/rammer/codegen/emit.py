"""The generic emitter: C text for any ROperator on any C-family device."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rammer.codegen import operations as ops
from rammer.codegen.c_target import CFunction, CTarget, head_of, join_words
from rammer.codegen.c_text import format_sum
from rammer.codegen.collapse_axes import collapse_reduction
from rammer.codegen.context import FunctionContext, Place
from rammer.codegen.cooperate import find_shared_reductions, scratch_with_partials
from rammer.codegen.nests import Nest, Target, Test
from rammer.codegen.scalar import Block
from rammer.codegen.stage_layout import Layout, Stage, scratch_of
from rammer.codegen.task_parameters import hash_of
from rammer.device.manifest import Binding
from rammer.ir.compute import Compute
from rammer.ir.expr import Ref, integer
from rammer.ir.operator import ROperator
from rammer.ir.types import row_major

__all__ = ["emit_operator", "scratch_bytes"]


def emit_operator(operator: ROperator, binding: Binding, target: CTarget, within: bool = False) -> CFunction:
    """Return a C function that computes any task of ``operator``, limited to the lengths of a range if ``within``.

    Raises DeviceFailure if the dialect lacks an element type. Raises ValueError if the operator is ill-formed (Computes that meet
    at no layer, stored tensors without a storage)."""
    return _Emitter(operator, binding, target, within).function()


def scratch_bytes(operator: ROperator, binding: Binding, threads: int = 1, rereads: bool = False) -> int:
    """Return the bytes of vEU memory that ``emit_operator`` uses. ``threads`` are the VDevice's threads per task, ``rereads`` is
    the dialect's."""
    layout = Layout(operator, binding.types, rereads=rereads and threads == 1)
    return scratch_with_partials(layout, layout.inlined) if threads > 1 else scratch_of(layout.stages)["veu"]


@dataclass
class _Emitter:
    """Emitter of one function: ``globals`` are the stored tensors, ``tiles`` those in scratch memory."""

    operator: ROperator
    binding: Binding
    target: CTarget
    within: bool = False

    def __post_init__(self) -> None:
        rereads = self.target.rereads and self.target.single
        self.layout = Layout(self.operator, self.binding.types, within=self.within, rereads=rereads)
        self.stages = self.layout.stages
        self.outer = scratch_of(self.stages)
        tiles = self.outer.pop("veu")
        self.scratch = tiles if self.target.single else scratch_with_partials(self.layout, self.layout.inlined)
        self.shared = {
            s.root.name: () if self.target.single else find_shared_reductions(self.layout.inlined, s, tiles) for s in self.stages
        }
        ends = self._reduction_bounds()
        inputs = tuple((name, False) for name in self.operator.inputs)
        self.arguments = inputs + tuple((name, True) for name in self.operator.outputs)
        asked = dict.fromkeys(n for extent, _ in self.layout.lengths for n, _ in extent.terms)
        self.arguments += tuple((name, False) for name in asked if (name, False) not in inputs)
        self.globals = {name: self._make_global_place(k, name) for k, (name, _) in enumerate(self.arguments)}
        staged = [s for s in self.stages if s.offset >= 0]
        self.tiles = {s.root.name: _make_tile_place(k, s) for k, s in enumerate(staged)}
        self.unit = FunctionContext(
            self.target,
            self.binding.types,
            dict(self.layout.inlined),
            {**self.globals, **self.tiles},
            dict(self.layout.ranges),
            ends=ends,
            open_ends=self.layout.open_ends if self.target.single else (),
        )

        for c in self.layout.inlined.values():
            self.unit.inlined[c.name] = collapse_reduction(self.unit, c)

    def _reduction_bounds(self) -> dict[tuple[str, str], str]:
        """Return the variables that bound reductions, by compute and axis."""
        found = ((c, r, self.layout.stop(c, r)) for c in self.operator.computes for r in c.reduce)
        return {(c.name, r.name): end.axis for c, r, end in found if isinstance(end, Ref)}

    def _make_global_place(self, number: int, name: str) -> Place:
        if name not in self.binding.storages:
            raise ValueError(f"operator {self.operator.name}: {name} has no storage")
        kind = self.binding.types[name]
        strides = self.binding.storages[name].strides
        return Place(f"p{number}", kind.dtype, strides, (integer(0),) * len(kind.shape), kind.shape)

    def function(self) -> CFunction:
        """Return the finished C function."""
        body = Block(self.unit)
        self._emit_origins(body)
        self._tile_pointers(body)
        for stage in self.stages:
            self._emit_stage(body, stage)
            if self.target.barrier and (self.scratch or self.outer):
                # After the last stage too: the group's next task reuses the scratch memory.
                body.line(self.target.barrier)
        text = "".join(self.unit.tables.values()) + self._function_head("@NAME@") + " {\n"
        text += "".join(f"  {line}\n" for line in body.lines) + "}\n"
        name = "rm_" + hash_of(text)
        stops = self.within and any(not e.before for e in self.operator.skips)
        return CFunction(name, text.replace("@NAME@", name), self.arguments, self.scratch, stops, tuple(self.outer.items()))

    def _function_head(self, name: str) -> str:
        kinds = (ops.spell_type(self.target, self.binding.types[tensor].dtype) for tensor, _ in self.arguments)
        return head_of(self.target, name, zip(kinds, (written for _, written in self.arguments), strict=True), self.outer)

    def _emit_origins(self, body: Block) -> None:
        """Decode the task index (row-major over the grid) and bound the boxes of the staged tiles."""
        for (extent, bound), name in self.layout.lengths.items():
            terms = [(f"{self.globals[n].pointer}[0]", f) for n, f in extent.terms]
            low, high = (ops.spell_literal(self.target, n, "int64") for n in (1, bound))
            kind = self.target.types["int32"]
            body.line(f"const {kind} {name} = ({kind})rm_min_i64(rm_max_i64({format_sum(terms, extent.offset)}, {low}), {high});")
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
            body.line(f"const {self.unit.axis_type(self.unit.ranges[name][1])} {name} = {body.value(e).text};")

    def _tile_pointers(self, body: Block) -> None:
        for number, stage in enumerate(s for s in self.stages if s.offset >= 0):
            pointer = f"{join_words(self.target.local, ops.spell_type(self.target, stage.root.dtype))} *"
            memory = "scratch" if stage.layer == "veu" else f"scratch_{stage.layer}"
            body.line(f"{pointer}s{number} = ({pointer})({memory} + {stage.offset});")

    def _emit_stage(self, body: Block, stage: Stage) -> None:
        computes = tuple(collapse_reduction(self.unit, c) for c in stage.computes)
        targets = []
        for c in computes:
            written = [Target(self.tiles[c.name])] if stage.offset >= 0 else []
            if c.name in self.operator.outputs:
                written.append(Target(self.globals[c.name], self._own(stage, c)))
            targets.append((c, written))
        Nest(self.unit, replace(stage, computes=computes), targets, self.shared[stage.root.name]).emit(body)

    def _own(self, stage: Stage, c: Compute) -> tuple[Test, ...]:
        """Return the tests that a point is in the task's part, if the stage's box is larger."""
        tests: list[Test] = []
        for d, (have, own) in enumerate(zip(stage.box, self.layout.own(c.name), strict=True)):
            tests += [(d, ">=", own.low)] if have.low != own.low else []
            tests += [(d, "<", own.high)] if have.high != own.high else []
        return tuple(tests)


def _make_tile_place(number: int, stage: Stage) -> Place:
    low = tuple(b.low for b in stage.box)
    return Place(f"s{number}", stage.root.dtype, row_major(stage.extents), low, stage.extents)
