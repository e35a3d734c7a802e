"""The parts of an operator around its contraction: maps that one operand passes through first, and those that follow.

A *prologue* is element-wise maps over one tensor, with constants that depend on the reduction alone (batch normalisation and ReLU
before a convolution: a scale and a shift for each channel). Kernels that stage an operand compute it once for every staged
element. Padding comes after the maps: elements outside the tensor are 0, whatever the maps compute for 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from rammer.codegen.task_parameters import Unsuited
from rammer.device.manifest import Binding
from rammer.ir import expr as ex
from rammer.ir.compute import Compute, contraction_operands, identity_load
from rammer.ir.expr import Expr, Load
from rammer.ir.operator import ROperator


@dataclass(frozen=True)
class Prologue:
    """The ``maps`` over the tensor ``source``, outermost last. ``load`` is the contraction's load of the last map, and
    ``constants`` are the other tensors that the maps read."""

    maps: tuple[Compute, ...]
    source: str
    load: Load
    constants: tuple[str, ...]

    @property
    def read(self) -> Load:
        """The contraction's load of ``source`` in place of ``load``."""
        return Load(self.source, self.load.indices, self.load.fill)

    @cached_property
    def dimensions(self) -> tuple[int, ...]:
        """Dimensions of ``source`` whose positions the maps use."""
        inside = {self.source, *(c.name for c in self.maps)}
        return tuple(d for d in range(len(self.load.indices)) if any(_is_axis_dependent(c, d, inside) for c in self.maps))


@dataclass(frozen=True)
class Parts:
    """The stored ``operands`` of the contraction ``main``, the maps ``after`` it, and its ``prologue``. The prologue belongs to
    operand number ``changed`` (None and -1 without a prologue)."""

    main: Compute
    operands: tuple[Load, Load]
    after: tuple[Compute, ...]
    prologue: Prologue | None = None
    changed: int = -1


def parts_of(operator: ROperator, binding: Binding) -> Parts:
    """Return the parts of an operator with one contraction.

    Raises Unsuited without a contraction, or with other maps before it."""
    before = operator.prologue
    rest = operator.computes[len(before) :]
    main, after = rest[0], rest[1:]
    operands = contraction_operands(main)
    if operands is None:
        raise Unsuited("no contraction")
    if not before:
        return Parts(main, operands, after)
    last = [i for i, load in enumerate(operands) if load.tensor == before[-1].name]
    names = {c.name for c in before}
    if len(last) != 1 or names & {operands[1 - last[0]].tensor, *operator.outputs, *(t for c in after for t in c.reads)}:
        raise Unsuited(f"{before[-1].name} is not an operand of {main.name} only")
    found = _find_prologue(before, main, operands[last[0]], binding)
    first, second = operands
    return Parts(main, (found.read, second) if last[0] == 0 else (first, found.read), after, found, last[0])


def _find_prologue(maps: tuple[Compute, ...], main: Compute, load: Load, binding: Binding) -> Prologue:
    """Return the prologue that ``main`` reads by ``load``. Raises Unsuited if the maps do not form a prologue."""
    inside = {c.name for c in maps}
    outside = dict.fromkeys(t for c in maps for t in c.reads if t not in inside)
    sources = [t for t in outside if t not in binding.constants]
    if len(sources) != 1:
        raise Unsuited(f"maps over {len(sources)} tensors before {main.name}")
    for c in maps:
        whole = all(identity_load(ld, c) for ld in c.loads if ld.tensor in (*inside, *sources))
        if c.reduce or not whole or c.shape != binding.types[sources[0]].shape:
            raise Unsuited(f"{c.name} is not element by element over {sources[0]}")
    if any(binding.types[t].dtype != "float32" for t in (*outside, *inside)):
        raise Unsuited("the prologue is not float32")
    found = Prologue(maps, sources[0], load, tuple(t for t in outside if t != sources[0]))
    over = {r.name for r in main.reduce}
    for d in found.dimensions:
        if ex.affine_form(load.indices[d]) is None or not ex.axes_of(load.indices[d]) <= over:
            raise Unsuited(f"the maps before {main.name} depend on more than its reduction")
    return found


def _is_axis_dependent(c: Compute, d: int, inside: set[str]) -> bool:
    """Return True if the value of ``c`` depends on its index along axis ``d`` other than by its in-place reads."""

    def rule(e: Expr) -> Expr | None:
        return ex.Const(0.0, "float32") if isinstance(e, Load) and e.tensor in inside else None

    return c.axes[d].name in ex.axes_of(ex.transform(c.body, rule))
