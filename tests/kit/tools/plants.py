"""The faults of ``planted.py``: functions that plant them in this process, by device and name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, TypeAlias

Edit: TypeAlias = Callable[[str], str]
Plant: TypeAlias = Callable[[], None]


def changed(pattern: str, new: str, count: int = 0, needs: str = "") -> Edit:
    """Return an edit that replaces ``count`` matches (0: all) in texts that contain ``needs``."""
    return lambda text: re.sub(pattern, new, text, count=count) if needs in text else text


def last(old: str, new: str) -> Edit:
    """Return an edit that replaces the last ``old`` of a text."""

    def edit(text: str) -> str:
        before, found, after = text.rpartition(old)
        return before + new + after if found else text

    return edit


def early(text: str) -> str:
    """Move one fetch before the wait, in float16 warpgroup products of two non-constant operands."""
    wait = "rm_after();\n"
    at = text.find("if (tid >=")
    if "rm_products_f16" not in text or at < 0 or wait not in text[at:]:
        return text
    first = text.index("#pragma unroll", at)
    waited = text.index(wait, at)
    if waited > first:
        return text  # a constant may be fetched first
    loop = text.index("#pragma unroll 1", first + 1)
    return text[:waited] + text[waited + len(wait) : loop] + wait + text[loop:]


def edited(made: Any, edit: Edit) -> Any:
    """Edit the text of a rocm function, or the statements of a cuda kernel, or else its device code."""
    own = [f.name for f in fields(made)]
    parts = ["text"] if "text" in own else ["body", "device"]
    changes = {part: new for part in parts if (new := edit(getattr(made, part))) != getattr(made, part)}
    return replace(made, **dict(list(changes.items())[:1]))


def faulted(honest: Callable[..., Any], edit: Edit) -> Callable[..., Any]:
    """Return a kernel writer whose texts are edited, except for kernels that only delay others."""

    def faulty(*arguments: Any) -> Any:
        made = honest(*arguments)
        return made if "held_" in arguments[0].name else edited(made, edit)

    return faulty


def cuda(edit: Edit) -> Plant:
    """Return a plant that edits the text of every cuda kernel."""

    def plant() -> None:
        import rammer_cuda.source

        rammer_cuda.source.task_kernel = faulted(rammer_cuda.source.task_kernel, edit)

    return plant


def everything_aligned() -> None:
    """Make products assume that every operand starts at a multiple of 16 bytes."""
    import rammer.codegen.contraction_form as contraction

    honest = contraction.Operand.__init__

    def believing(self: Any, *arguments: Any, **named: Any) -> None:
        honest(self, *arguments, **named)
        object.__setattr__(self, "aligned", True)

    contraction.Operand.__init__ = believing  # type: ignore[method-assign]


def rows_aligned() -> None:
    """Make row kernels assume that four neighbours are always 16 aligned bytes."""
    import rammer_cuda.rows.rowwise as rowwise

    def believing(load: Any, binding: Any, along: set[str]) -> bool:
        moved = {n: replace(s, offset=s.offset // 4 * 4) for n, s in binding.storages.items()}
        return honest(load, replace(binding, storages=moved), along)

    honest = rowwise.is_quad_aligned
    rowwise.is_quad_aligned = believing


def unstored_product() -> None:
    """Make a cell of one bare product leave its result in shared memory."""
    import rammer_cuda.families as families

    def faulty(*arguments: Any) -> Any:
        kernel = families.CELL.kernel(*arguments)
        if any(not c.reduce for c in arguments[0].computes):
            return kernel
        lines = kernel.device.splitlines(keepends=True)
        stores = [i for i, line in enumerate(lines) if re.search(r"^\s*p\d+\[.*\] = ", line)]
        return replace(kernel, device="".join(line for i, line in enumerate(lines) if i not in stores))

    families.BY_NAME["cell"] = replace(families.CELL, kernel=faulty)


def opencl(edit: Edit) -> Plant:
    """Return a plant that edits every function of a rocm program."""

    def plant() -> None:
        import rammer_rocm.families

        rammer_rocm.families.task_function = faulted(rammer_rocm.families.task_function, edit)

    return plant


def walk(edit: Edit) -> Plant:
    """Return a plant that edits the table walker of a rocm program."""

    def plant() -> None:
        import rammer_rocm.table_executor

        honest = rammer_rocm.table_executor.program_text
        rammer_rocm.table_executor.program_text = lambda *arguments: edit(honest(*arguments))

    return plant


#: Text faults, by device.
EDITS: Mapping[str, Mapping[str, Edit]] = {
    "cuda": {
        "a dropped barrier": last("__syncthreads();", ""),
        "an off-by-one bound": changed(r"(\+ [ab]k(?: \+ \d+)?\)+) < (\d+)", r"\1 <= \2"),
        "a row too many": changed(r"if \(x0 < (\d+)", r"if (x0 <= \1"),
        "a wrong zero fill": changed(r" < (\d+)\);", r" < \g<1>00);", needs="rm_copy"),
        "an unaligned copy": changed(r"rm_copy16\(as \+ ", "rm_copy16(as + 1 + "),
        "a missed NaN": changed(r"rm_max_f32\(([^;]*)\);", r"fmaxf(\1);"),
        "an early fetch": early,
        "no wait": changed(r"\brm_after\(\);", ""),
    },
    "rocm": {
        "an off-by-one bound": changed(r"(for \(int ([rk]\d+) = 0; \2) < (\d+);", r"\1 <= \3;"),
        "a row too many": changed(r"(for \(int (x\d+) = o\d+; \2) < (\(o\d+ \+ \d+\));", r"\1 <= \3;"),
        "a wrong zero fill": changed(r"(\] : |\bd\[i\] = )0\.0f", r"\g<1>1.0f"),
        "a missed NaN": changed(r"rm_max_f32\(", "fmax("),
        "a cast that cuts": changed(r"\bvstore_half\(", "vstore_half_rtz("),
        "a wrong stride": changed(r"(\d+) \* x0\b", r"(\1 + 1) * x0"),
        "a task twice": changed(r"int task\) \{", "int number) { const int task = number | 1;"),
    },
}
PLANTS: Mapping[str, Mapping[str, Plant]] = {
    "cuda": {
        **{name: cuda(edit) for name, edit in EDITS["cuda"].items()},
        "operands believed aligned": everything_aligned,
        "rows believed aligned": rows_aligned,
        "a bare product that a cell does not store": unstored_product,
    },
    "rocm": {
        **{name: opencl(edit) for name, edit in EDITS["rocm"].items()},
        "a dropped barrier": walk(changed(r"while \(atomic_load_explicit\(done", "while (0 && atomic_load_explicit(done")),
    },
}
