"""Recognition of a chain of matrix products: each product's rows and columns are the next one's rows and depth.

``T1[r, j] = maps(sum[k] X[r, k] * W1[k, j])``, ``T2[r, j] = maps(sum[k] T1[r, k] * W2[k, j])``, ...: each row of the last result
depends on one row of ``X``, so a task with whole rows recomputes nothing. The column axis has one position in all of them; every
other axis is a row axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rammer.codegen import Operand, Packing, Unsuited, operand_of, packing_key
from rammer.codegen.products import DEEP, to_core_matrices
from rammer.device.manifest import Array, Binding
from rammer.ir import expr as ex
from rammer.ir.compute import Axis, Compute, contraction_operands, identity_load
from rammer.ir.evaluate import evaluate_compute
from rammer.ir.expr import Load, Ref
from rammer.ir.operator import ROperator

from rammer_cuda.contraction.warpgroup import RESULT_ORDER, split_tf32

#: Widest product, and fewest products of a chain.
WIDEST, FEWEST = 128, 2


@dataclass(frozen=True)
class Layer:
    """A product with the maps on its result; ``depth`` and ``width`` are its extents, ``weights`` the constant."""

    main: Compute
    weights: Load
    inner: Axis
    column: Axis
    maps: tuple[Compute, ...]

    @property
    def last(self) -> str:
        """The result tensor of this layer."""
        return self.maps[-1].name if self.maps else self.main.name

    @property
    def padded(self) -> tuple[int, int]:
        """(depth, width) rounded up to whole steps of the tensor cores."""
        return -(-self.inner.extent // DEEP) * DEEP, -(-self.column.extent // DEEP) * DEEP

    @cached_property
    def packing(self) -> Packing:
        """Both halves of the weights as ``wgmma.cores``, in the order of the registers of the previous result."""
        depth, width = self.padded
        body = (self.inner, self.column, *(r for r in self.main.reduce if r != self.inner))

        def make(values: Array) -> Array:
            full = evaluate_compute(Compute("packed", "float32", body, self.weights), {self.weights.tensor: values})
            full = full.reshape(self.inner.extent, self.column.extent)
            missing = depth - self.inner.extent, width - self.column.extent
            matrices = to_core_matrices(np.pad(full, [(0, m) for m in missing]), RESULT_ORDER)
            return np.stack(split_tf32(matrices))

        key = packing_key("chain", str(self.weights), str(self.inner), str(self.column))
        return Packing(key, 2 * depth * width, make)


@dataclass(frozen=True)
class Chain:
    """The layers, the first one's data operand, and the position of the column axis."""

    operator: ROperator
    layers: tuple[Layer, ...]
    first: Operand
    column: int

    @property
    def rows(self) -> tuple[int, ...]:
        """The positions of the row axes within a task, outermost first."""
        return tuple(d for d in range(len(self.operator.anchor.axes)) if d != self.column)

    @property
    def row_count(self) -> int:
        """The rows of a full task."""
        return math.prod(self.operator.tile[d] for d in self.rows)

    @property
    def weights_bytes(self) -> int:
        """The bytes of the largest layer's arranged weights."""
        return max(8 * math.prod(x.padded) for x in self.layers)

    @property
    def registers(self) -> int:
        """The registers of a thread for one layer's operand halves and its results."""
        return max(d + w // 2 for d, w in (x.padded for x in self.layers)) + 32


def chain_of(operator: ROperator, binding: Binding) -> Chain:
    """Return the chain of an operator, tiled or not. Raise Unsuited with the reason if it has another form."""
    names = (*operator.inputs, *(c.name for c in operator.computes))
    if any(binding.types[n].dtype != "float32" for n in names):
        raise Unsuited("not float32")
    groups = _group_computes(operator.computes)
    if len(groups) < FEWEST:
        raise Unsuited(f"{len(groups)} products are not a chain")
    first = _make_layer(groups[0], binding)
    column = first.main.axes.index(first.column)
    layers = [first]
    for group in groups[1:]:
        layers.append(_make_layer(group, binding))
        _check_follows(layers[-2], layers[-1], column)
    operand = operand_of(_data_operand(first), first.main, binding)
    if operand.guards:
        raise Unsuited("the rows are padded")
    if operator.tile and operator.tile[column] != operator.anchor.axes[column].extent:
        raise Unsuited("a task must hold whole rows")
    return Chain(operator, tuple(layers), operand, column)


def _group_computes(computes: Sequence[Compute]) -> list[list[Compute]]:
    """Return every contraction with the maps up to the next one."""
    groups: list[list[Compute]] = []
    for c in computes:
        if c.kind == "contraction":
            groups.append([c])
        elif not groups or c.combiner is not None:
            raise Unsuited(f"{c.name} is neither a product nor a map after a product")
        else:
            groups[-1].append(c)
    return groups


def _make_layer(group: list[Compute], binding: Binding) -> Layer:
    main, maps = group[0], tuple(group[1:])
    operands = contraction_operands(main)
    if operands is None:
        raise Unsuited(f"{main.name} multiplies by dequantised values")
    constant = [ld for ld in operands if ld.tensor in binding.constants]
    inner = [r for r in main.reduce if r.extent > 1]
    if len(constant) != 1 or len(inner) != 1 or constant[0].fill is not None:
        raise Unsuited(f"{main.name} is not a product with one constant over one axis")
    along = [a for a in main.axes if a.name in ex.axes_of(constant[0])]
    if len(along) != 1 or max(along[0].extent, inner[0].extent) > WIDEST:
        raise Unsuited(f"{main.name}: the constant has {len(along)} axes of the result, or is too large")
    inside = {main.name}
    for c in maps:
        if c.shape != main.shape or any(ld.tensor in inside and not identity_load(ld, c) for ld in c.loads):
            raise Unsuited(f"{c.name} does not read element by element")
        inside.add(c.name)
    return Layer(main, constant[0], inner[0], along[0], maps)


def _data_operand(layer: Layer) -> Load:
    """Return the load of the non-constant operand."""
    return next(ld for ld in contraction_operands(layer.main) or () if ld != layer.weights)


def _check_follows(before: Layer, layer: Layer, column: int) -> None:
    data, axes = _data_operand(layer), layer.main.axes
    want = tuple(Ref(layer.inner.name) if d == column else Ref(a.name) for d, a in enumerate(axes))
    if axes.index(layer.column) != column or data.tensor != before.last or data.indices != want or data.fill is not None:
        raise Unsuited(f"{layer.main.name} does not read {before.last} row by row")
    if any(a.extent != b.extent for d, (a, b) in enumerate(zip(axes, before.main.axes, strict=True)) if d != column):
        raise Unsuited(f"{layer.main.name} has different rows")
    interior = {before.main.name, *(c.name for c in before.maps)}
    if any(t in interior for c in layer.maps for t in c.reads):
        raise Unsuited(f"{layer.main.name}: a map reads the layer before")
