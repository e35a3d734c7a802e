"""Graph connecting: the grouping of Computes into ROperators, and the memory layers at which their edges meet.

First connect, then schedule (Welder, section 4.1): every edge starts at the device layer, and groups grow forwards from a seed.
Each reader of a group is tried at the layers on chip, the highest first:

- In registers (``thread``): maps that read the group element by element (an epilogue), and maps that a contraction computes on
  one of its operands (a prologue). Every task recomputes the maps of a prologue.
- In the vEU's memory (``veu``): readers of whole rows or windows. A task then computes all that it reads, with halos. Softmax and
  layer normalisation become one operator (FusionStitching's block composition), and so do layers that stay on chip.
- In a memory that several vEUs share, between the vEU's and the device's: the same readers, if larger tiles fit or are faster.

A step that does not pay does not end the search: rows are priced with the maps that follow their reductions, a few further steps
may pay together, and other readers of the group are tried. A group is accepted if it is predicted to be faster than its parts by
more than predictions err (``group_prices``). Every attempt is logged for its edges.

Products of a few rows with weights (a recurrent cell's) are bound by the bytes of the weights. Such a group may also include a
second product that the next map adds, and write several results. A whole LSTM cell is thus one operator.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from rammer.device.manifest import FusedForm
from rammer.fusion.fusion_legality import memory_bound, move_tiles
from rammer.fusion.group_prices import GroupPrices
from rammer.fusion.tile_graph import ConnectionTrial, TileGraph, edges_of
from rammer.fusion.topological_order import sort_topologically
from rammer.ir import expr as ex
from rammer.ir.compute import Compute, ComputeGraph, contraction_operands, identity_load, weight_sharing
from rammer.ir.device import Scope, VDevice
from rammer.ir.expr import Load, Ref
from rammer.ir.operator import Connection, ROperator
from rammer.ir.prefix_set import PrefixSet

__all__ = ["connect"]

#: Longest chain of Computes that meet at thread level: longer chains only cost registers and compile time.
LONGEST_CHAIN = 24
#: Longest chain of contractions that meet at vEU level.
MOST_CONTRACTIONS = 16
#: Maximum slowdown of a step over its parts after which the search goes on, and the maximum number of such steps in a row.
UPHILL, UPHILL_STEPS = 1.3, 2
#: Maximum time of a device's kernel for one sum, as a multiple of that by the traffic model: slower fusions are not compared.
MOST_OVER_MODEL = 20.0


def connect(
    graph: ComputeGraph,
    device: VDevice,
    aliases: Mapping[str, tuple[str, ...]] | None = None,
    prices: GroupPrices | None = None,
    fusion: str = "full",
) -> TileGraph:
    """Group the Computes of ``graph`` into operators for ``device``. ``fusion`` is the option of that name.

    ``aliases`` maps a tensor that no Compute writes to the tensors whose memory it shares (views and concatenations, from the
    storage pass). Its readers depend on the producers of those tensors, which must be written to memory. Without ``prices``, the
    traffic model decides.
    """
    state = _Connector(graph, device, dict(aliases or {}), prices or GroupPrices.of(graph, device), fusion)
    operators = tuple(state.grow(c) for c in state.seeds() if c.name not in state.owner)
    ordered = sort_topologically(operators, state.position, state.roots)
    edges = edges_of(graph, ordered)
    outcomes = {(e.producer, e.consumer): state.outcome(e) for e in edges}
    return TileGraph(graph, ordered, tuple(state.decisions), edges, outcomes, state.aliases)


@dataclass(frozen=True)
class _Growth:
    """A group in growth. ``best`` is its longest part that pays; ``group`` and ``links`` may go on beyond it, by ``uphill`` steps
    that did not pay. ``first`` is the first Compute beyond. ``unpriced`` is the group if it could end here, with the layer of its
    last step."""

    best: ROperator
    group: tuple[Compute, ...]
    links: tuple[Connection, ...] = ()
    uphill: int = 0
    first: str = ""
    unpriced: tuple[ROperator, Scope] | None = None


@dataclass
class _Connector:
    graph: ComputeGraph
    device: VDevice
    aliases: dict[str, tuple[str, ...]]
    prices: GroupPrices
    fusion: str
    owner: dict[str, str] = field(default_factory=dict)
    decisions: list[ConnectionTrial] = field(default_factory=list)
    tried: dict[tuple[str, str], list[ConnectionTrial]] = field(default_factory=dict)  #: By producer and consumer.
    bound: dict[str, bool] = field(default_factory=dict)
    silent: bool = False  #: Attempts are not logged.

    def __post_init__(self) -> None:
        self.consumers = self.graph.consumers()
        self.producers = self.graph.producers
        self.position = {c.name: i for i, c in enumerate(self.graph.computes)}
        self.escaping = set(self.graph.outputs) | {t for sources in self.aliases.values() for t in sources}
        self.ancestors = self._find_ancestors()

    def roots(self, tensor: str) -> tuple[str, ...]:
        """Return the tensors whose memory ``tensor`` reads: itself unless it is a view."""
        return self.aliases.get(tensor, (tensor,))

    def _find_ancestors(self) -> dict[str, PrefixSet]:
        """Return, by Compute, the positions of the Computes that it depends on, itself included."""
        result: dict[str, PrefixSet] = {}
        for i, c in enumerate(self.graph.computes):
            known = PrefixSet()
            for root in (r for name in c.reads for r in self.roots(name) if r in result):
                known |= result[root]
            result[c.name] = known.having(i)
        return result

    def seeds(self) -> list[Compute]:
        """Return the Computes in the order in which groups start, those independent of products first. Otherwise a mask computed
        between the products of an attention would prevent their fusion."""
        downstream = set[str]()
        for c in self.graph.computes:
            if c.kind == "contraction" or any(r in downstream for name in c.reads for r in self.roots(name)):
                downstream.add(c.name)
        return sorted(self.graph.computes, key=lambda c: c.name in downstream)

    def grow(self, seed: Compute) -> ROperator:
        """Form the operator that starts at ``seed`` and record its Computes."""
        best = self._grow_group(seed)
        for c in best.computes:
            self.owner[c.name] = best.name
        return best

    def outcome(self, edge: Connection) -> tuple[ConnectionTrial, ...]:
        """Return the attempts to connect an edge, the last one decisive."""
        tried = self.tried.get((edge.producer, edge.consumer), [])
        inside = edge.layer != "device"
        if inside and not (tried and tried[-1].kept):
            tried = [*tried, _refusal(edge.consumer, edge.layer, "kept with its operator", True)]
        elif not inside and tried and tried[-1].kept:
            tried = [t for t in tried if not t.kept] or [_refusal(edge.consumer, "veu", "the operator ends before it")]
        return tuple(tried) or (_refusal(edge.consumer, "thread", f"{edge.consumer} continues the operator of another operand"),)

    # --- search -----------------------------------------------------------------------------------

    def _grow_group(self, seed: Compute) -> ROperator:
        """Return the best legal and profitable group from ``seed``."""
        state, closed = _Growth(_make_operator((seed,), ()), (seed,)), set[str]()
        passed = dict[str, int]()  # by Compute: the number of its first readers that are closed
        while True:
            c = self._next_reader(state.group, closed, passed)
            reached = None if c is None or state.uphill > UPHILL_STEPS else self._step(state, c)
            if reached is not None:
                state = reached
            elif state.unpriced is not None and (operator := self._price_late(state.best, *state.unpriced)) is not None:
                state = _Growth(operator, operator.computes, operator.connections)
            elif state.first:  # what was tried beyond the best group does not pay
                closed.add(state.first)
                state = _Growth(state.best, state.best.computes, state.best.connections)
            elif c is not None:
                closed.add(c.name)
            else:
                return state.best

    def _next_reader(self, group: Sequence[Compute], closed: set[str], passed: dict[str, int]) -> Compute | None:
        """Return the first reader of the group outside it that is not ``closed``. ``passed`` is updated: a value with many
        readers would otherwise pass over its closed ones for each of them."""
        inside, found = {c.name for c in group}, list[Compute]()
        for c in group:
            readers, n = self.consumers[c.name], passed.get(c.name, 0)
            while n < len(readers) and readers[n].name in closed:
                n += 1
            passed[c.name] = n
            following = (readers[i] for i in range(n, len(readers)))
            found += islice((r for r in following if r.name not in inside and r.name not in closed), 1)
        return min(found, key=lambda r: self.position[r.name], default=None)

    def _step(self, state: _Growth, c: Compute) -> _Growth | None:
        """Return ``state`` with ``c`` at the highest layer at which that pays. A step that is not priced yet, or does not lose
        much, counts as uphill. Returns None if ``c`` cannot join."""
        joined = (*state.group, *self._partner_products(state.group, c))
        why = self._refusal_reason(joined, c)
        if why:
            self._log(joined, c, _refusal(c.name, "thread", why))
            return None
        grown, onward, fits, rival = None, None, False, math.inf
        for layer, problem in self._layers(joined, c):
            if problem:
                self._log(joined, c, _refusal(c.name, layer, problem))
                continue
            inside = {g.name for g in joined}
            links = self._add_links(state.links, [Connection(p, c.name, layer) for p in c.reads if p in inside])
            wider = _Growth(state.best, (*joined, c), links, state.uphill, state.first or c.name)
            written = self._group_outputs(wider.group)
            if not written:
                self._log(joined, c, _refusal(c.name, layer, "a value that it leaves to others is not cut like its results"))
                onward = onward or wider
                continue
            operator = ROperator(c.name, wider.group, links, written)
            rows = self._goes_on(wider.group)
            if rows and not memory_bound(operator):  # the device is asked for all rows at once
                self._log(joined, c, _refusal(c.name, layer, "priced with its readers"))
                return replace(wider, unpriced=(operator, layer))
            trial = self._try(state.best, operator, layer, rival)
            self._log(joined, c, trial)
            if trial.kept:
                grown, rival = _Growth(operator, wider.group, links), trial.together
            elif rows or self._awaits_product(wider.group):
                onward, fits = (onward, True) if fits else (wider, trial.together < math.inf)
            elif onward is None and trial.together <= UPHILL * trial.separate:
                onward = _Growth(state.best, wider.group, links, state.uphill + 1, wider.first)
            if layer == "thread" and (trial.kept or fits):
                break
        return grown or onward

    def _price_late(self, best: ROperator, operator: ROperator, layer: Scope) -> ROperator | None:
        """Return ``operator`` with its tiles at the highest layer from ``layer`` down at which it is faster than its parts, if
        any."""
        scopes = [m.scope for m in self.device.tile_layers]
        lower = scopes[scopes.index(layer) + 1 :] if layer in scopes else scopes[1:]
        moved = ((move_tiles(operator, scope), scope) for scope in lower)
        return next((o for o, scope in ((operator, layer), *moved) if self._try(best, o, scope).kept), None)

    def _add_links(self, links: tuple[Connection, ...], new: Sequence[Connection]) -> tuple[Connection, ...]:
        """Return ``links`` with ``new`` ones. A tile with several readers is held at the lowest of their layers."""
        result = (*links, *new)
        if len(self.device.tile_layers) > 1:
            scopes = [m.scope for m in self.device.tile_layers]
            lowest = dict[str, Scope]()
            for e in (e for e in result if e.holds_tile):
                lowest[e.producer] = max(lowest.get(e.producer, e.layer), e.layer, key=scopes.index)
            result = tuple(replace(e, layer=lowest[e.producer]) if e.holds_tile else e for e in result)
        return result

    def _try(self, best: ROperator, wide: ROperator, layer: Scope, rival: float = math.inf) -> ConnectionTrial:
        """Predict ``wide`` and its parts, ``best`` among them, with their best kernels. Return the decision. ``rival`` is the
        time of the same Computes at a higher layer.

        The traffic model prices an element-wise step, and memory-bound rows, of which the device's kernels decide later
        (``fall_back``). The device prices all else."""
        parts, doubt = [best, *_remaining_operators(best, wide)], self.prices.doubt
        cheap = sum(map(self.prices.modelled, parts))
        alone = len(wide.computes) == len(best.computes) + 1 and len(wide.outputs) == 1
        maps = layer == "thread" and alone and not wide.prologue and self.prices.takes_maps(best)
        if maps or (memory_bound(wide) and _is_row_wise(wide)):
            together, separate, doubt = self.prices.modelled(wide), cheap, min(0.0, doubt)
        else:
            least, most = self.prices.least(wide), MOST_OVER_MODEL * cheap
            separate = most if least > most else self._separate(parts)
            together = least if least > most else self.prices.asked(wide, UPHILL * separate)
        # The times of kernels are uncertain, those of launches are not.
        kernels = max(separate - self.device.launch * len(parts), 0.0)
        kept = together < rival and together <= separate - doubt * kernels
        lost = "it does not fit" if together == math.inf else "recomputation or memory costs more"
        lost = "a higher layer is not slower" if rival <= together < math.inf else lost
        why = "fewer bytes and launches" if kept else lost
        trial = ConnectionTrial(" + ".join(c.name for c in wide.computes), layer, separate, together, kept, why)
        self.decisions += [] if self.silent else [trial]
        return trial

    def _separate(self, parts: Sequence[ROperator]) -> float:
        """Return the seconds of ``parts``. A part without a kernel is computed by one operator for each of its Computes."""
        return sum(
            seconds
            if (seconds := self.prices.asked(o)) < math.inf
            else sum(self.prices.asked(_make_operator((c,), ())) for c in o.computes)
            for o in parts
        )

    def _log(self, group: Sequence[Compute], c: Compute, trial: ConnectionTrial) -> None:
        for name in ({g.name for g in group} & {*c.reads}) if not self.silent else ():
            tried = self.tried.setdefault((name, c.name), [])
            if all((t.layer, t.why) != (trial.layer, trial.why) for t in tried):
                tried.append(trial)

    # --- legality ---------------------------------------------------------------------------------

    def _refusal_reason(self, group: Sequence[Compute], c: Compute) -> str:
        """Return why ``c`` can meet the group in no layer on chip, or ""."""
        if self.fusion == "none":
            return "fusion is off"
        if c.name in self.owner:
            return f"{c.name} continues the operator of another operand"
        if _chain_length(group) >= LONGEST_CHAIN:
            return f"an operator has at most {LONGEST_CHAIN} Computes in a chain"
        form = _added_form(group, c)
        if form is not None and form not in self.prices.model.forms:
            return f"no kernel family computes {form}"
        outside = self._outside_roots(group, c)
        if any(n in self.position and n not in self.owner for n in outside):
            return f"another operand of {c.name} is in no operator yet"
        return "it also reads a value that depends on the operator" if self._depends_around(group, outside) else ""

    def _layers(self, group: Sequence[Compute], c: Compute) -> Iterator[tuple[Scope, str]]:
        """Yield the layers on chip from the highest one, each with the reason why ``c`` cannot meet the group there, or ""."""
        elementwise, limited = is_elementwise(c, group), "fusion is element-wise only" if self.fusion == "elementwise" else ""
        prologue = not elementwise and _can_be_prologue(group, c) and not self._weight_bound(c)
        if elementwise:
            yield "thread", ""
        elif limited or not prologue:
            yield "thread", limited or "a thread has one of the elements that it reads"
        else:
            limited = "it begins products that stay on chip" if self._can_start_layers(c) else ""
            yield "thread", limited
        for m in self.device.tile_layers:
            yield m.scope, limited or self._shared_tile_problem(group, c)

    def _shared_tile_problem(self, group: Sequence[Compute], c: Compute) -> str:
        """Return why ``c`` cannot read a tile of the group that its task holds, or ""."""
        inside = {g.name for g in group}
        if not all(ex.affine_form(i) is not None for ld in c.loads if ld.tensor in inside for i in ld.indices):
            return "data decide which elements it reads"
        products = [g for g in (*group, c) if g.kind == "contraction"]
        if c.kind == "contraction" and len(products) > MOST_CONTRACTIONS:
            return f"an operator has at most {MOST_CONTRACTIONS} products"
        if c.kind == "contraction" and any(self._weight_bound(g) for g in products):
            if products != [c]:
                return "every task would read all weights of a product of few rows"
            if "leading rows" not in self.prices.model.forms:
                return "no kernel family computes rows before a product of few rows"
            if any(sum(r.kind == "contraction" for r in self.consumers[n]) > 1 for n in c.reads if n in self.graph.constants):
                return "its weights are used again, so a cell may hold them"
        if products and c.kind != "map" and any(g.decoded is not None for g in products):
            return "no kernel holds results of quantised weights on chip"
        return ""

    def _outside_readers(self, group: Sequence[Compute]) -> set[str]:
        inside = {c.name for c in group}
        readers = (r.name for c in group for r in self.consumers[c.name])
        return {r for r in readers if r not in inside}

    def _partner_products(self, group: Sequence[Compute], c: Compute) -> list[Compute]:
        """Return the products of a few rows that only ``c`` reads, and that read nothing of the group, to be added to it."""
        inside = {g.name for g in group}
        if self.fusion != "full" or not all(self._weight_bound(g) for g in group if g.kind == "contraction"):
            return []
        found = (self.producers[n] for n in c.reads if n in self.producers and n not in inside and n not in self.owner)
        return [
            p
            for p in found
            if p.kind == "contraction"
            and self._weight_bound(p)
            and p.name not in self.escaping
            and inside.isdisjoint(p.reads)
            and [r.name for r in self.consumers[p.name]] == [c.name]
            and all(r in self.owner or r not in self.position for r in self._outside_roots(group, p))
            and not self._depends_around(group, self._outside_roots(group, p))
        ]

    def _weight_bound(self, c: Compute) -> bool:
        """Return True if ``c`` is a product of constant weights, each used for at most ``few_rows`` results."""
        if c.name not in self.bound:
            shared = weight_sharing(c, self.graph.constants)
            self.bound[c.name] = shared is not None and shared <= self.device.few_rows
        return self.bound[c.name]

    def _goes_on(self, group: Sequence[Compute]) -> bool:
        """Return True if the group ends amid row-wise work, which is priced as a whole: after a reduction along rows, all readers
        of its values are maps and reductions of the same rows, or a product that holds them."""
        last = _last_product(group)
        if self.fusion != "full" or group[-1].name in self.escaping or not any(g.kind == "reduction" for g in group[last + 1 :]):
            return False
        following = [self.producers[n] for n in self._outside_readers(group)]
        inside = {g.name for g in group}
        return bool(following) and all(
            r.name not in self.owner and r.kind in ("map", "reduction") and all(map(_is_aligned, _inner_loads(r, inside)))
            for r in following
        )

    def _awaits_product(self, group: Sequence[Compute]) -> bool:
        """Return True if only a product reads the group, which has reductions along the rows of another product. Such rows pay
        above all if they stay on chip between the two."""
        last = _last_product(group)
        if last < 0 or not any(g.kind == "reduction" for g in group[last + 1 :]):
            return False
        readers = self._outside_readers(group)
        return len(readers) == 1 and self.producers[min(readers)].kind == "contraction"

    def _group_outputs(self, group: Sequence[Compute]) -> tuple[str, ...]:
        """Return the outputs of the group: its last value and partitioned values with outside readers. Returns () if another
        value has outside readers."""
        inside = {c.name for c in group}
        leaving = [c for c in group[:-1] if c.name in self.escaping or any(r.name not in inside for r in self.consumers[c.name])]
        several = any(c.kind == "contraction" for c in group)  # memory-bound operators with several results are stitched
        if leaving and not (several and all(self._is_partitioned(c, group) for c in leaving)):
            return ()
        return (*(c.name for c in leaving), group[-1].name)

    def _is_partitioned(self, c: Compute, group: Sequence[Compute]) -> bool:
        """Return True if every task needs exactly its part of ``c``: the group reads it element by element."""
        readers = [r for r in group if c.name in r.reads]
        whole = all(identity_load(ld, r) for r in readers for ld in r.loads if ld.tensor == c.name)
        return c.shape == group[-1].shape and whole and all(r is group[-1] or self._is_partitioned(r, group) for r in readers)

    def _outside_roots(self, group: Sequence[Compute], c: Compute) -> list[str]:
        inside = {g.name for g in group}
        return [r for n in c.reads if n not in inside for r in self.roots(n)]

    def _depends_around(self, group: Sequence[Compute], outside: Sequence[str]) -> bool:
        """Return True if a value ``outside`` depends on the group (the group would not be convex)."""
        places = [self.position[g.name] for g in group]
        return any(p in self.ancestors[n] for n in outside if n in self.ancestors for p in places)

    def _can_start_layers(self, c: Compute) -> bool:
        """Return True if ``c`` would begin layers that stay on chip, which pay more than a prologue."""
        before, self.silent = self.silent, True
        found = self._grow_group(c).holds_operand
        self.silent = before
        return found


def _refusal(subject: str, layer: Scope, why: str, kept: bool = False) -> ConnectionTrial:
    """Return the record of an attempt without prices."""
    return ConnectionTrial(subject, layer, math.nan, math.nan, kept, why)


def _remaining_operators(narrow: ROperator, wide: ROperator) -> list[ROperator]:
    """Return the Computes of ``wide`` outside ``narrow`` as the operators that they would form: a product with the maps that read
    it element by element, and row-wise Computes up to the next product, one operator for each of their results."""
    inside, runs = {c.name for c in narrow.computes}, list[list[Compute]]()
    for c in wide.computes:
        if c.name not in inside:
            joins = runs and c.kind != "contraction" and (runs[-1][0].kind != "contraction" or is_elementwise(c, runs[-1]))
            if joins and any(n in {r.name for r in runs[-1]} for n in c.reads):
                runs[-1].append(c)
            else:
                runs.append([c])
    results = [part for run in runs for part in _split_results(run)]
    return [_make_operator(part, _inner_connections(part, wide)) for part in results]


def _split_results(run: Sequence[Compute]) -> list[tuple[Compute, ...]]:
    """Split Computes into one part for each result: the result and the Computes that it needs. Those that several results need
    belong to the first."""
    needs = {c.name: {c.name} for c in run}  # by Compute: itself and what it reads, directly or not
    for c in run:
        needs[c.name].update(*(needs[n] for n in c.reads if n in needs))
    parts, taken, read = list[tuple[Compute, ...]](), set[str](), {n for c in run for n in c.reads}
    for end in (c for c in run if c.name not in read):
        parts.append(tuple(c for c in run if c.name in needs[end.name] - taken))
        taken |= needs[end.name]
    return parts


def _inner_connections(run: Sequence[Compute], operator: ROperator) -> tuple[Connection, ...]:
    names = {c.name for c in run}
    return tuple(e for e in operator.connections if {e.producer, e.consumer} <= names)


def is_elementwise(c: Compute, group: Sequence[Compute]) -> bool:
    """Return True if ``c`` is a map that reads the group element by element."""
    return c.combiner is None and all(identity_load(ld, c) for ld in _inner_loads(c, {g.name for g in group}))


def _added_form(group: Sequence[Compute], c: Compute) -> FusedForm | None:
    """Return the form of fusion by which ``c`` joins the group, or None if it joins maps."""
    if any(g.combiner is not None for g in group):
        return "trailing maps" if c.combiner is None else "further sums"
    return "leading maps" if c.kind == "contraction" else None


def _inner_loads(c: Compute, inside: set[str]) -> list[Load]:
    return [ld for ld in c.loads if ld.tensor in inside]


def _is_row_wise(operator: ROperator) -> bool:
    """Return True if the Computes of an operator read each other along whole rows."""
    inside = {c.name for c in operator.computes}
    return all(map(_is_aligned, (ld for c in operator.computes for ld in _inner_loads(c, inside))))


def _is_aligned(load: Load) -> bool:
    """Return True if a load reads along whole axes, without moving or padding."""
    return load.fill is None and all(isinstance(i, Ref | ex.Const) for i in load.indices)


def _last_product(group: Sequence[Compute]) -> int:
    """Return the position of the last contraction, or -1."""
    return max((i for i, c in enumerate(group) if c.kind == "contraction"), default=-1)


def _chain_length(group: Sequence[Compute]) -> int:
    """Return the number of Computes from the last contraction on in a chain of layers, or of all Computes."""
    chain = group[0].kind == "contraction" and all(c.kind != "window" for c in group)
    return len(group) - _last_product(group) if chain else len(group)


def _can_be_prologue(group: Sequence[Compute], c: Compute) -> bool:
    """Return True if the group consists of maps that the contraction ``c`` can compute in place for one operand. Each element of
    their results must depend on the same element of their operands."""
    names = {g.name for g in group}
    operands = contraction_operands(c)
    if operands is None or sum(ld.tensor in names for ld in operands) != 1 or any(g.combiner is not None for g in group):
        return False
    return all(map(_in_place, group))


def _in_place(c: Compute) -> bool:
    """Return True if a map reads at least one tensor of its rank, and each of them element by element."""
    whole = [identity_load(ld, c) for ld in c.loads if len(ex.axes_of(ld)) == len(c.axes)]
    return bool(whole) and all(whole) and all(ld.fill is None for ld in c.loads)


def _make_operator(computes: tuple[Compute, ...], connections: tuple[Connection, ...]) -> ROperator:
    return ROperator(computes[-1].name, computes, connections, (computes[-1].name,))
