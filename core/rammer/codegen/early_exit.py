"""The beginning of a task of a program for a range: a task beyond the extent writes what lies there, if anything, and ends."""

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
    """Writes where an operator's tasks end. ``pointers`` are those of outputs, ``lengths`` those of scalar inputs, by tensor."""

    operator: ROperator
    binding: Binding
    target: CTarget
    pointers: Mapping[str, str]
    lengths: Mapping[str, str]

    def beginning(self, before: str = "") -> list[str]:
        """Statements that return where task ``task`` ends; ``before`` must precede every write and return."""
        box, text = self._task_box(), Text()
        for ending in self.operator.endings:
            low, high = box[ending.axis]
            if ending.beside is not None:
                text.lines += self._exit_outside_window(ending.beside, ending, box, before)
                continue
            test = f"{high} <= {self._extent_text(ending)}" if ending.below else f"{low} >= {self._extent_text(ending)}"
            with text.block(f"if ({test})"):
                if before:
                    text.line(before)
                self._fill_outputs(text, ending, box)
                text.line("return;")
        return text.lines

    def rest(self) -> list[str]:
        """Statements that write what lies beyond the lengths in a task that has computed what lies before them."""
        whole, text = self._task_box(), Text()
        for ending in (e for e in self.operator.endings if not e.below):
            low, high = whole[ending.axis]
            end = f"max((int){self._extent_text(ending)}, {low})"
            self._fill_outputs(text, ending, {**whole, ending.axis: (end, high)})
        return text.lines

    def _exit_outside_window(
        self, rows: RowWindow, ending: SkipTasks, box: Mapping[str, tuple[str, str]], before: str
    ) -> list[str]:
        """Statements that return where the task's place is none of ``rows``; of more places than one none."""
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
        """By axis, where the task numbered ``task`` begins and ends."""
        o, box = self.operator, dict[str, tuple[str, str]]()
        for axis, place, tile, count in zip(o.anchor.axes, split_digits("task", o.grid), o.tile, o.grid, strict=True):
            low = f"{place} * {tile}" if count > 1 else "0"
            high = f"{low} + {tile}" if axis.extent % tile == 0 else f"min({low} + {tile}, {axis.extent})"
            box[axis.name] = low, high if count > 1 else str(axis.extent)
        return box

    def _fill_outputs(self, text: Text, ending: SkipTasks, box: Mapping[str, tuple[str, str]]) -> None:
        """Write what lies beyond an ending to a box of every output that has something there, spread over the threads."""
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
