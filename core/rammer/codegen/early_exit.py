"""Masks of tasks in a ranged program: a task past the extent stores its fill value, if any, and returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rammer.codegen.c_target import CTarget
from rammer.codegen.c_text import Text, format_sum, split_digits
from rammer.codegen.operations import format_store, spell_literal
from rammer.device.manifest import Binding
from rammer.ir.extent import RowWindow, SkipTasks
from rammer.ir.operator import ROperator


@dataclass(frozen=True)
class EndText:
    """Emitter of the masks of an operator's tasks. ``pointers`` are those of outputs, ``lengths`` those of scalar inputs, by
    tensor."""

    operator: ROperator
    binding: Binding
    target: CTarget
    pointers: Mapping[str, str]
    lengths: Mapping[str, str]

    def beginning(self, before: str = "") -> list[str]:
        """Return statements that exit task ``task`` if it is masked; ``before`` must precede every write and return."""
        box, text = self._task_box(), Text()
        for ending in self.operator.skips:
            low, high = box[ending.axis]
            if ending.window is not None:
                text.lines += self._exit_outside_window(ending.window, ending, box, before)
                continue
            test = f"{high} <= {self._extent_text(ending)}" if ending.before else f"{low} >= {self._extent_text(ending)}"
            with text.block(f"if ({test})"):
                if before:
                    text.line(before)
                self._fill_outputs(text, ending, box)
                text.line("return;")
        return text.lines

    def rest(self) -> list[str]:
        """Return statements that fill the elements past the lengths in a task that has computed the elements before them."""
        whole, text = self._task_box(), Text()
        for ending in (e for e in self.operator.skips if not e.before):
            low, high = whole[ending.axis]
            end = f"max((int){self._extent_text(ending)}, {low})"
            self._fill_outputs(text, ending, {**whole, ending.axis: (end, high)})
        return text.lines

    def _exit_outside_window(
        self, rows: RowWindow, ending: SkipTasks, box: Mapping[str, tuple[str, str]], before: str
    ) -> list[str]:
        """Return statements that exit if the task's index is outside ``rows``; [] if a task has several indices."""
        tiles = {a.name: t for a, t in zip(self.operator.anchor.axes, self.operator.tile, strict=True)}
        if tiles[ending.axis] != 1 or tiles[rows.by] != 1:
            return []
        ((tensor, _),), kind, text = ending.extent.terms, self.target.types["int64"], Text()
        with text.block(""):
            text.line(f"{kind} step = ({kind})({box[ending.axis][0]}) - {self.lengths[tensor]}[{box[rows.by][0]}];")
            if rows.of:
                text.line(f"step = (step % {rows.of} + {rows.of}) % {rows.of};")
            with text.block(f"if (step < 0 || step >= {rows.count})"):
                if before:
                    text.line(before)
                text.line("return;")
        return text.lines

    def _extent_text(self, ending: SkipTasks) -> str:
        terms = [(f"{self.lengths[n]}[0]", f) for n, f in ending.extent.terms]
        return f"({format_sum(terms, ending.extent.offset)})"

    def _task_box(self) -> dict[str, tuple[str, str]]:
        """Return the bounds of task ``task`` by axis."""
        o, box = self.operator, dict[str, tuple[str, str]]()
        for axis, place, tile, count in zip(o.anchor.axes, split_digits("task", o.grid), o.tile, o.grid, strict=True):
            low = f"{place} * {tile}" if count > 1 else "0"
            high = f"{low} + {tile}" if axis.extent % tile == 0 else f"min({low} + {tile}, {axis.extent})"
            box[axis.name] = low, high if count > 1 else str(axis.extent)
        return box

    def _fill_outputs(self, text: Text, ending: SkipTasks, box: Mapping[str, tuple[str, str]]) -> None:
        """Write the fill values of a mask to a box of every output that has one, spread over the threads."""
        target, last = self.target, len(box) - 1
        for tensor, fill in zip(self.operator.outputs, ending.fills, strict=True):
            if fill is None:
                continue
            storage, dtype = self.binding.storages[tensor], self.binding.types[tensor].dtype
            for d, (low, high) in enumerate(box.values()):
                first, step = (f"{low} + {target.thread}", target.threads) if d == last and not target.single else (low, "1")
                text.line(f"for (int e{d} = {first}; e{d} < {high}; e{d} += {step}) {{")
            at = format_sum([(f"({target.types['int64']})e{d}", s) for d, s in enumerate(storage.strides)])
            text.line(format_store(target, self.pointers[tensor], at, dtype, spell_literal(target, fill, dtype)))
            text.all(["}"] * len(box))
