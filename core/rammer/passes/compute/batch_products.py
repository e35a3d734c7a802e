"""Operator batching: independent products of one kind become one product (Wolong; the merge of IOS, MLSys'21, section 3).

Three kinds of siblings are tried in this order:

1. products of one tensor with different weights: Q, K and V, a cell's gates, convolutions of one kernel on one input;
2. products of slices of one tensor with the same weights: a cell's input at every step;
3. products of slices of one tensor, each with different weights: second layers of branches whose first layers are batched.

Maps after all siblings that differ in nothing else are batched too: biases, activations, sums of two batches. Each sibling
remains as a slice of the batch, which the storage pass makes a view.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

import numpy as np

from rammer.fusion.tile_graph import Way
from rammer.ir import expr as ex
from rammer.ir.compute import Compute, ComputeGraph, identity_load
from rammer.ir.constants.recipes import side_by_side
from rammer.ir.expr import Expr, Load, Op, Ref
from rammer.ir.names import Names, make_identifier
from rammer.ir.types import TensorType
from rammer.passes.compute.batch_candidates import (
    Merged,
    Sibling,
    SideBySide,
    Union,
    constant_offsets,
    form_of,
    is_rearrangement,
    join_siblings,
    looked_through,
    replace_loads,
    stack_siblings,
    strip_offsets,
)
from rammer.passes.compute.pad_windows import Padding, match_windowed, widen_windows

#: Allowed ways of batching products, by name; absent products stay separate.
Ways: TypeAlias = "Mapping[str, Way]"
#: Maximum number of products in one batch.
MOST: Final = 1 << 10


@dataclass(frozen=True)
class Batched:
    """A graph after batching, and its batches; ``originals`` holds the Computes that slices replaced."""

    graph: ComputeGraph
    batches: tuple[Merged, ...]
    originals: Mapping[str, Compute]


def batch_siblings(graph: ComputeGraph, ways: Ways, joins: Joins | None = None, wide: bool = False) -> Batched:
    """Batch all siblings that ``ways`` allow or, if ``wide``, products that differ only in their windows. The graph's Computes
    stay in place, as slices."""
    state = Batcher(graph, ways, joins or Joins())
    while any(
        state.round(kind) for kind in ((_windowed_key,) if wide else (_shared_input_key, _shared_weights_key, _own_weights_key))
    ):
        pass
    return state.result()


@dataclass
class Joins:
    """A cache of joined or padded constants. Keys are identities of arrays, since a derived constant has the same name in many
    graphs."""

    made: dict[Hashable, tuple[tuple[np.ndarray, ...], np.ndarray]] = field(default_factory=dict)

    def of(self, key: tuple[tuple[str, ...], int, bool], known: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the constants ``key[0]`` joined along dimension ``key[1]``, a new one if ``key[2]``."""
        arrays = tuple(known[n] for n in key[0])
        return self._make_once((*map(id, arrays), key[1:]), arrays, lambda: side_by_side(arrays, key[1], key[2]))

    def padded(self, padding: Padding, known: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return weights padded with zeros."""
        array = known[padding.tensor]
        return self._make_once((id(array), replace(padding, tensor="")), (array,), lambda: padding.of(known))

    def _make_once(self, key: Hashable, arrays: tuple[np.ndarray, ...], make: Callable[[], np.ndarray]) -> np.ndarray:
        if key not in self.made:
            self.made[key] = arrays, make()
        return self.made[key][1]


#: A function of a product that returns the key of its siblings and its order among them.
Kind: TypeAlias = "Callable[[Batcher, Sibling], tuple[Hashable, tuple[int, ...]] | None]"


class Batcher:
    """A graph under construction: Computes by name, in order, each batch just before its first member."""

    def __init__(self, graph: ComputeGraph, ways: Ways, joins: Joins) -> None:
        self.graph, self.ways, self.joins = graph, ways, joins
        self.computes = graph.producers
        self.before: dict[str, list[Compute]] = {}
        self.consumers = graph.consumers()
        self.constants: dict[str, np.ndarray] = dict(graph.constants)
        self.types: dict[str, TensorType] = dict(graph.types)
        self.taken = Names(graph.types)
        self.slices: dict[str, tuple[Merged, int]] = {}
        self.carried: set[str] = set()
        self.named: dict[Hashable, str] = {}
        self.made: dict[str, Merged] = {}
        self.bare: dict[str, Compute] = {}  # original products, by the names that they have after a bias was added
        self.places = {c.name: i for i, c in enumerate(graph.computes)}
        self.open = [c.name for c in graph.computes if _is_product(c) and c.name in ways]
        self.forms: dict[str, Sibling | None] = {}

    def round(self, kind: Kind) -> bool:
        """Batch all siblings of one kind, and the maps after them. Return True if a batch was created."""
        groups: dict[Hashable, list[tuple[tuple[int, ...], Sibling]]] = {}
        for name in self.open:
            form = self.form(name)
            found = kind(self, form) if form is not None else None
            if form is not None and found is not None:
                groups.setdefault(found[0], []).append((found[1], form))
        made = [self._merge_siblings(members, kind) for members in groups.values() if 1 < len(members) <= MOST]
        new = [b for b in made if b is not None]
        for batch in new:  # the list grows, since batched maps may have batchable readers
            new += self._batch_epilogues(batch)
        gone = {m for b in new for m in b.members} | {c.name for c in self.bare.values()}
        self.open = [n for n in self.open if n not in gone]
        self.open += [b.name for b in new if b.name not in self.carried]
        if new:
            self.forms.clear()
        return bool(new)

    def form(self, name: str) -> Sibling | None:
        """Return the current form of a Compute."""
        if name not in self.forms:
            self.forms[name] = form_of(self.computes[name], lambda ld: looked_through(ld, self.computes))
        return self.forms[name]

    def first(self, name: str) -> str:
        """Return the model's first product in a merged product; the way chosen for it applies to the whole."""
        while name in self.made or name in self.bare:
            name = self.bare[name].name if name in self.bare else self.made[name].members[0]
        return name

    def _merge_siblings(self, found: list[tuple[tuple[int, ...], Sibling]], kind: Kind) -> Merged | None:
        """Merge siblings into one Compute. Returns None if their layout or operands do not fit."""
        forms: Sequence[Sibling] | None = [f for _, f in sorted(found, key=lambda f: f[0])]
        if kind in (_shared_input_key, _windowed_key):
            forms = [f for _, f in found] if kind is _shared_input_key else self._widen_windows([f for _, f in found])
        if forms is None:
            return None
        first = forms[0]
        d = first.column(self.constants)
        extents = [f.compute.shape[d] for f in forms] if d is not None else []
        if kind not in (_shared_input_key, _windowed_key):
            layout = stack_siblings(0, len(forms))
        elif d is None:
            return None
        elif self.ways[self.first(first.compute.name)] == "stacked" and kind is not _windowed_key and len(set(extents)) == 1:
            layout = stack_siblings(d, len(forms))
        else:
            layout = join_siblings(d, extents)
        return self._made(self._with_biases(forms, d), layout, None if d is None else f"i{d}")

    def _widen_windows(self, forms: Sequence[Sibling]) -> list[Sibling] | None:
        """Return ``forms`` with a common window, or None."""
        found = [w for w in (match_windowed(f, self.constants) for f in forms) if w is not None]
        made = widen_windows(found, self.constants, self.types)
        if made is None:
            return None
        result = list[Sibling]()
        for form, padding in made:
            if padding not in self.named:
                value = self.joins.padded(padding, self.constants)
                self.named[padding] = self._add_constant(f"{padding.tensor}_padded", value, self.types[padding.tensor].dtype)
            names = {padding.tensor: self.named[padding]}
            body = ex.rename_tensors(form.compute.body, names)
            compute = replace(form.compute, body=body, used=None)
            result.append(form_of(compute, lambda ld: ld) or form)
        return result

    def _add_constant(self, name: str, value: np.ndarray, dtype: str) -> str:
        made = make_identifier(name, self.taken)
        self.constants[made], self.types[made] = value, TensorType(dtype, value.shape)
        return made

    def _with_biases(self, forms: Sequence[Sibling], column: int | None) -> list[Sibling]:
        """Add a zero bias to those of ``forms`` without a bias, if others have one (floats only). Otherwise the bias-free keys of
        some attentions would exclude all biases from the product's kernel."""
        known = [None if column is None else self._bias(f, column) for f in forms]
        given = next((b for b in known if b is not None), None)
        if given is None or column is None or not forms[0].compute.dtype.startswith("float"):
            return list(forms)
        return [f if b is not None else self._add_zero_bias(f, given, column) for f, b in zip(forms, known, strict=True)]

    def _bias(self, form: Sibling, column: int) -> Sibling | None:
        """Return the only reader of a product if it adds one number per column, else None."""
        name = form.compute.name
        readers = self.consumers.get(name, ())
        maps = self._elementwise_readers(name)
        made = self.form(maps[0].name) if len(maps) == len(readers) == 1 else None
        if made is None or not isinstance(made.body, Op) or made.body.fn != "add" or made.body.args != made.loads:
            return None
        bias = next((ld for ld in made.loads if ld.tensor in self.constants and ld.fill is None), None)
        if bias is None:
            return None
        return made if all(i == Ref(f"i{column}") or not ex.axes_of(i) for i in bias.indices) else None

    def _add_zero_bias(self, form: Sibling, given: Sibling, column: int) -> Sibling:
        """Add a zero bias like ``given`` to a product. The bias map has the product's name; the product is renamed."""
        c = form.compute
        raw = make_identifier(f"{c.name}_product", self.taken)
        (bias,) = (ld for ld in given.loads if ld.tensor in self.constants)
        shape = tuple(
            c.shape[column] if i == Ref(f"i{column}") else n
            for i, n in zip(bias.indices, self.types[bias.tensor].shape, strict=True)
        )
        nothing = np.zeros(shape, self.constants[bias.tensor].dtype)
        zero = replace(bias, tensor=self._add_constant(f"{c.name}_bias", nothing, self.types[bias.tensor].dtype))
        product = Load(raw, tuple(Ref(f"i{d}") for d in range(len(c.axes))))
        body = replace_loads(given.body, [zero if ld == bias else product for ld in given.loads])
        own: dict[str, Expr] = {f"i{d}": Ref(a.name) for d, a in enumerate(c.axes)}
        epilogue = Compute(c.name, c.dtype, c.axes, ex.substitute(body, own), origin=c.origin)
        moved = replace(c, name=raw)
        self.bare[raw] = c
        self.computes |= {c.name: epilogue, raw: moved}
        self.types[raw], self.places[raw], self.consumers[raw] = moved.type, self.places[c.name], [epilogue]
        self.before.setdefault(c.name, []).append(moved)
        self.forms.pop(c.name, None)
        return replace(form, compute=moved)

    def _made(self, forms: Sequence[Sibling], layout: SideBySide, column: str | None) -> Merged | None:
        name = make_identifier(f"{forms[0].compute.name}_batch", self.taken)
        union = Union(self.constants, self.types, self._join_constants, self.slices)
        whole = union.of(forms, layout, name, column)
        if whole is None:
            return None
        members = tuple(f.compute.name for f in forms)
        batch = Merged(name, members, layout)
        first = min(members, key=self.places.__getitem__)
        self.places[name] = self.places[first]
        self.before.setdefault(first, []).append(whole)
        self.computes[name], self.types[name] = whole, whole.type
        for read in (*whole.reads, name):
            self.consumers.setdefault(read, [])
        for read in whole.reads:  # a batch may be part of a further batch, together with its maps
            self.consumers[read].append(whole)
        for number, form in enumerate(forms):
            c = form.compute
            own = layout.slice([Ref(a.name) for a in c.axes], number)
            self.computes[c.name] = Compute(c.name, c.dtype, c.axes, Load(name, own), origin=c.origin)
            self.slices[c.name] = batch, number
        self.made[name] = batch
        return batch

    def _join_constants(self, names: tuple[str, ...], at: int, new: bool) -> str:
        key = names, at, new
        if key not in self.named:
            value = self.joins.of(key, self.constants)
            self.named[key] = self._add_constant(f"{names[0]}_batch", value, self.types[names[0]].dtype)
        return self.named[key]

    def _batch_epilogues(self, batch: Merged) -> Iterator[Merged]:
        """Yield batches of the maps after all members of ``batch`` that differ in nothing else."""
        kinds: dict[Hashable, list[list[Sibling]]] = {}
        for number, member in enumerate(batch.members):
            for reader in self._elementwise_readers(member):
                form = self.form(reader.name)
                if form is not None:
                    groups = kinds.setdefault(self._likeness(form, number), [[] for _ in batch.members])
                    groups[number].append(form)
        for groups in kinds.values():
            for forms in zip(*groups, strict=False):
                if any(f.compute.name in self.slices for f in forms):
                    continue  # already batched after another batch
                made = self._made(forms, batch.layout, self._stacking_axis(batch.layout))
                if made is not None:
                    self.carried.add(made.name)
                    self.forms = {n: f for n, f in self.forms.items() if n not in made.members}
                    yield made

    def _stacking_axis(self, layout: SideBySide) -> str:
        """Return the member axis at which siblings are stacked: constants of maps are stacked at the same position."""
        return f"i{layout.at}"

    def _elementwise_readers(self, member: str) -> list[Compute]:
        """Return the unbatched maps over ``member``'s shape that read it element by element."""
        c = self.computes[member]
        found = [self.computes[r.name] for r in self.consumers.get(member, ())]
        return [
            r
            for r in found
            if r.combiner is None
            and r.shape == c.shape
            and not is_rearrangement(r)
            and r.name not in self.slices
            and all(identity_load(ld, r) for ld in r.loads if ld.tensor == member)
        ]

    def _likeness(self, form: Sibling, number: int) -> Hashable:
        """Return a key that is equal for maps that can be batched: it names slices by batch, constants by type."""
        parts = list[Hashable]()
        for load in form.loads:
            batch = self.slices.get(load.tensor)
            if batch is not None and batch[1] == number:
                parts.append((batch[0].name, load.indices, load.fill))
            elif load.tensor in self.constants:
                kind = self.types[load.tensor]
                parts.append((kind.dtype, len(kind.shape), load.indices, load.fill))
            else:
                parts.append((load.tensor, load.indices, load.fill))
        return form.pattern, form.compute.dtype, tuple(parts)

    def result(self) -> Batched:
        """Return the batched graph, without constants that were joined and are unused."""
        ordered = (made for c in self.graph.computes for made in (*self._new(c.name), self.computes[c.name]))
        computes = tuple(map(self._read_batch, ordered))
        used = {n for c in computes for n in c.reads} | {*self.graph.outputs}
        constants = {n: v for n, v in self.constants.items() if n in used or (n in self.graph.constants and not self.made)}
        graph = replace(self.graph, computes=computes, types=self.types, constants=constants) if self.made else self.graph
        originals = {c.name: c for c in self.graph.computes if c.name in self.slices} | self.bare
        return Batched(graph, tuple(self.made.values()), originals)

    def _read_batch(self, c: Compute) -> Compute:
        """Let a map that reads slices element by element read the batch itself, so that their operators may fuse."""
        if c.combiner is not None or is_rearrangement(c) or not any(r in self.slices for r in c.reads):
            return c
        return replace(c, body=ex.transform(c.body, lambda e: self._of_batch(e, c)), used=None)

    def _of_batch(self, e: Expr, c: Compute) -> Load | None:
        if not isinstance(e, Load) or e.tensor not in self.slices or not identity_load(e, c):
            return None
        batch, number = self.slices[e.tensor]
        return Load(batch.name, batch.layout.slice(e.indices, number))

    def _new(self, name: str) -> Iterator[Compute]:
        """Yield the current batches that precede ``name``, each after the batches that precede it."""
        for made in self.before.get(name, ()):
            yield from self._new(made.name)
            yield self.computes[made.name]


def _is_product(c: Compute) -> bool:
    # Quantised weights have one column axis: with a second axis for the siblings, kernel families would not match them.
    return c.kind == "contraction" and c.decoded is None and c.points > 0


def _shared_input_key(state: Batcher, form: Sibling) -> tuple[Hashable, tuple[int, ...]] | None:
    """Return the key of products of one tensor, each with different weights, or None."""
    d = form.column(state.constants)
    if d is None:
        return None
    shape = form.compute.shape
    kinds = [(state.types[r.tensor].dtype, r.indices, r.fill) if r.tensor in state.constants else r for r in form.roots]
    same = form.pattern, form.compute.dtype, shape[:d], shape[d + 1 :], _reduced_extents(form.compute), tuple(kinds)
    data = any(r.tensor not in state.constants for r in form.roots)
    return (same, ()) if data else None


def _windowed_key(state: Batcher, form: Sibling) -> tuple[Hashable, tuple[int, ...]] | None:
    """Return the key of products of one image through different windows, or None."""
    d, found = form.column(state.constants), match_windowed(form, state.constants)
    if d is None or found is None:
        return None
    shape = form.compute.shape
    return (found.likeness, shape[:d], shape[d + 1 :]), ()


def _shared_weights_key(state: Batcher, form: Sibling) -> tuple[Hashable, tuple[int, ...]] | None:
    """Return the key of products of slices of one tensor with the same weights, or None."""
    return _of_slices(state, form, lambda root: root)


def _own_weights_key(state: Batcher, form: Sibling) -> tuple[Hashable, tuple[int, ...]] | None:
    """Return the key of products of slices of one tensor, each with different weights, or None."""
    return _of_slices(state, form, lambda root: (state.types[root.tensor], root.indices, root.fill))


def _of_slices(state: Batcher, form: Sibling, weights: Callable[[Load], Hashable]) -> tuple[Hashable, tuple[int, ...]] | None:
    data = [r for r in form.roots if r.tensor not in state.constants]
    spots, kinds = [constant_offsets(r) for r in data], [strip_offsets(r) for r in data]
    if not data or len(data) == len(form.roots) or None in spots or None in kinds:
        return None
    read = [weights(r) if r.tensor in state.constants else strip_offsets(r) for r in form.roots]
    same = form.pattern, form.compute.dtype, form.compute.shape, _reduced_extents(form.compute), tuple(read)
    return same, tuple(n for s in spots if s is not None for n in s)


def _reduced_extents(c: Compute) -> tuple[int, ...]:
    return tuple(a.extent for a in c.reduce)
