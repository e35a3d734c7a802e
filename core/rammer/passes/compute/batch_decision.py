"""The choice of siblings to batch: those whose results need no copies, if the device is predicted to gain.

Products and maps that depend on each other through batches form one region, which is decided separately. The region is compiled
as a graph in three variants (unbatched, stacked and joined), and the fastest is used. Equal regions (a model's layers) are
decided once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Final, Protocol, TypeAlias

from rammer.fusion.tile_graph import CLEARLY, BatchTrial, CutTrial, Way
from rammer.ir.compute import Compute, ComputeGraph
from rammer.passes.compute.batch_candidates import is_rearrangement, looked_through
from rammer.passes.compute.batch_products import Batched, Joins, batch_siblings
from rammer.passes.compute.split_graph import CutGraph
from rammer.passes.compute.split_products import cut_products

#: Maximum number of successive maps after a product in its region.
FOLLOWED: Final = 12
#: Maximum number of Computes between those of a region that are compiled with it.
MOST_BETWEEN: Final = 512
#: Maximum Computes of a graph that is priced as a whole with and without batches: a region omits later reductions.
WHOLE: Final = 64
#: Maximum number of attempts to remove batches that need copies, before all are removed.
ATTEMPTS: Final = 8
JOINED: Final[Way] = "joined"
STACKED: Final[Way] = "stacked"
#: Maximum number of members in a line of the log.
SHOWN: Final = 6


#: Prices of equal regions: seconds unbatched, seconds batched, and the better way of batching.
Prices: TypeAlias = "dict[str, tuple[float, float, Way]]"


class Pricing(Protocol):
    """The interface for prices of a graph by later compiler stages; ``measured`` is True if they run it."""

    @property
    def measured(self) -> bool: ...

    def copies(self, graph: ComputeGraph) -> Sequence[Compute]:
        """Return the Computes that run and only rearrange."""
        ...

    def seconds(self, graph: ComputeGraph) -> float:
        """Return the time of ``graph`` as a program, infinite if it cannot be compiled."""
        ...


@dataclass(frozen=True, slots=True)
class PartPricer:
    """An implementation of ``Pricing`` by two functions."""

    copies: Callable[[ComputeGraph], Sequence[Compute]]
    seconds: Callable[[ComputeGraph], float]
    measured: bool = False


def batch_where_it_pays(
    graph: ComputeGraph, pricing: Pricing, always: bool = False, pad: bool = False, cut: bool = True
) -> tuple[ComputeGraph, tuple[BatchTrial | CutTrial, ...]]:
    """Return ``graph`` with siblings batched where that is predicted to be no slower (or ``always``) and needs no copies.

    Also returns the trials; without batches, returns ``graph`` itself. With ``pad``, siblings that differ only in their windows
    are tried afterwards. With ``cut``, products are first cut into pieces if batching is then faster."""
    joins, trials = Joins(), list[BatchTrial | CutTrial]()
    prices: Prices = {}
    if cut:
        graph, tried = cut_where_it_pays(graph, pricing, joins, prices)
        trials += tried
    for wide in (False, True) if pad else (False,):
        products = [c.name for c in graph.computes if c.kind == "contraction"]
        if batch_siblings(graph, dict.fromkeys(products, JOINED), joins, wide).batches:
            graph, batches = BatchDecision(graph, pricing, joins, always, wide, prices).decided()
            trials += batches
    return graph, tuple(trials)


def cut_where_it_pays(
    graph: ComputeGraph, pricing: Pricing, joins: Joins, prices: Prices
) -> tuple[ComputeGraph, tuple[CutTrial, ...]]:
    """Return ``graph`` with products cut if they are predicted to be faster, with the best batching, or ``graph`` itself. Regions
    of pieces that batches connect are decided one by one."""

    @cache
    def copied() -> set[str]:
        return {c.name for c in pricing.copies(graph)}

    found = cut_products(graph, copied)
    if found.graph is graph:
        return graph, ()
    deciding = BatchDecision(found.graph, pricing, joins, False, False, prices)
    trials, refused = deciding.cuts(graph, found)
    return (cut_products(graph, copied, refused).graph if refused else found.graph), trials


class BatchDecision:
    """The batching decision for one graph: its existing copies, prices by region, and the log."""

    def __init__(self, graph: ComputeGraph, pricing: Pricing, joins: Joins, always: bool, wide: bool, prices: Prices) -> None:
        self.graph, self.pricing, self.joins, self.always, self.wide = graph, pricing, joins, always, wide
        self.prices = prices
        self.producers, self.consumers = graph.producers, graph.consumers()
        self.trials: list[BatchTrial] = []
        self.places = {c.name: i for i, c in enumerate(graph.computes)}

    @cached_property
    def copied(self) -> set[str]:
        """The Computes that the unbatched graph copies."""
        return {c.name for c in self.pricing.copies(self.graph)}

    def decided(self) -> tuple[ComputeGraph, tuple[BatchTrial, ...]]:
        """Decide the batches of the graph, see ``batch_where_it_pays``."""
        ways = {c.name: STACKED for c in self.graph.computes if c.kind == "contraction"}
        tried = self._without_copies(ways)
        chosen = dict[str, Way]()
        for region in self._group_regions(tried):
            way, trial = self._choose_way(region, ways)
            self.trials.append(trial)
            if way is not None:
                chosen |= {n: way for n in region if n in ways}
        final = self._without_copies(chosen).graph
        small = len(self.graph.computes) <= WHOLE
        if (self.pricing.measured or small) and not self.always and final is not self.graph:
            separate, together = map(self.pricing.seconds, (self.graph, final))
            # Operators concurrent with products are outside their region. Predictions cannot resolve differences below 1%.
            if not together * (1.0 if self.pricing.measured else CLEARLY) <= separate:
                final = self.graph
                self.trials.append(BatchTrial("all", None, separate, together, "the whole program is slower with them merged"))
        return final, tuple(self.trials)

    def cuts(self, model: ComputeGraph, found: CutGraph) -> tuple[tuple[CutTrial, ...], set[str]]:
        """Return the trial of each region of pieces, priced against its original in ``model``, and the cuts that do not pay."""
        ways = {c.name: STACKED for c in self.graph.computes if c.kind == "contraction"}
        regions = self._group_regions(self._without_copies(ways))
        inside = {n for region in regions for n in region}
        decided = frozenset[str]().union(*(found.cuts.get(n, ()) for n in inside))
        lone: dict[frozenset[str], set[str]] = {}
        for name in found.sources:
            if name not in inside and not found.cuts[name] & decided:
                lone.setdefault(found.cuts[name], set()).update(self._expand_product(name) - inside)
        regions += [sorted(names, key=self.places.__getitem__) for names in lone.values()]
        written, trials, refused = BatchDecision(model, self.pricing, self.joins, False, False, {}), list[CutTrial](), set[str]()
        for region in regions:
            pieces = [n for n in region if n in found.sources]
            if not pieces:
                continue
            _, batched_as = self._choose_way(region, ways)
            whole = written.seconds_of({found.sources.get(n, n) for n in region} | {*region}, self.producers)
            subject = " + ".join([*dict.fromkeys(found.sources[n] for n in pieces)][:SHOWN])
            trial = CutTrial(subject, whole, min(batched_as.separate, batched_as.together))
            trials.append(trial)
            refused |= set[str]() if trial.kept else {cut for n in pieces for cut in found.cuts[n]}
        return tuple(trials), refused

    def seconds_of(self, names: Collection[str], left: Collection[str]) -> float:
        """Return the time of the Computes ``names`` of this graph, unbatched or batched, whichever is faster. They are priced as
        a graph with the Computes between them that are not in ``left``."""
        waiting = [n for n in names if n in self.producers]
        region = {*waiting}
        while waiting:
            for name in self.producers[waiting.pop()].reads:
                lone = name in self.producers and name not in left and all(r.name in region for r in self.consumers[name])
                if lone and name not in region:
                    region.add(name)
                    waiting.append(name)
        region |= self._nodes_between(region)
        ordered = sorted(region, key=self.places.__getitem__)
        separate, together, _ = self._price_region(
            self._part(ordered), [n for n in ordered if self.producers[n].kind == "contraction"]
        )
        return min(separate, together)

    def _without_copies(self, ways: dict[str, Way]) -> Batched:
        """Batch siblings by ``ways``, and remove from ``ways`` the products whose results would need copies."""
        for attempt in range(ATTEMPTS):
            found = batch_siblings(self.graph, ways, self.joins, self.wide)
            new = [c for c in self.pricing.copies(found.graph) if c.name not in self.copied] if found.batches else []
            if not new:
                return found
            copied = {n for c in new for n in ((c.name,) if c.name in found.originals else c.reads)}
            named = _products_of(copied, found) & ways.keys()
            if not named or attempt == ATTEMPTS - 1:
                named = _products_of({b.name for b in found.batches}, found) & ways.keys()
            for name in sorted(named, key=self.places.__getitem__):
                self.trials.append(BatchTrial(name, None, math.inf, math.inf, "its result would have to be copied"))
                del ways[name]
        return batch_siblings(self.graph, {}, self.joins)

    def _group_regions(self, found: Batched) -> list[list[str]]:
        """Return the regions of products and maps, in order, that depend on each other through batches."""
        parts = list[set[str]]()
        for batch in found.batches:
            products = _products_of({batch.name}, found)
            mine = {n for p in products for n in self._expand_product(p)}
            touched = [p for p in parts if p & mine]
            parts = [p for p in parts if not p & mine] + [mine.union(*touched)]
        for part in list(parts):
            mine = part | self._nodes_between(part)
            touched = [p for p in parts if p & mine]
            parts = [p for p in parts if not p & mine] + [mine.union(*touched)]
        ordered = [sorted(p, key=self.places.__getitem__) for p in parts]
        return sorted(ordered, key=lambda p: self.places[p[0]])

    def _nodes_between(self, part: Collection[str]) -> set[str]:
        """Return the Computes on paths between members of ``part``. Without them, the steps of a recurrence would be priced as
        concurrent."""
        after, before, places = {*part}, {*part}, [self.places[n] for n in part]
        span = self.graph.computes[min(places) : max(places) + 1]  # all others are before or after the whole part
        for c in span:
            if not after.isdisjoint(c.reads):
                after.add(c.name)
        for c in reversed(span):
            if c.name in before:
                before.update(c.reads)
        found = (after & before).difference(part)
        return found if len(found) <= MOST_BETWEEN else set()

    def _expand_product(self, product: str) -> set[str]:
        """Return a product with the maps after it, and the views of its operands."""
        found, last = {product}, {product}
        for _ in range(FOLLOWED):
            last = {r.name for n in last for r in self.consumers[n] if r.combiner is None and r.name not in found}
            found |= last
        found = self._drop_trailing_views(found)
        for load in self.producers[product].loads:
            name, root = load.tensor, looked_through(load, self.producers).tensor
            while name != root and name in self.producers:
                found.add(name)
                name = self.producers[name].reads[0]
        return found

    def _drop_trailing_views(self, names: set[str]) -> set[str]:
        """Return ``names`` without trailing Computes that only rearrange."""
        while True:
            last = {
                n for n in names if is_rearrangement(self.producers[n]) and not any(r.name in names for r in self.consumers[n])
            }
            if not last:
                return names
            names = names - last

    def _choose_way(self, region: list[str], ways: Mapping[str, Way]) -> tuple[Way | None, BatchTrial]:
        part = self._part(region)
        products = [n for n in region if n in ways]
        more = f" and {len(products) - SHOWN} more" if len(products) > SHOWN else ""
        subject = " + ".join(products[:SHOWN]) + more
        key = _price_key(part, products)
        if key not in self.prices:
            self.prices[key] = self._price_region(part, products)
        separate, together, way = self.prices[key]
        kept = together <= separate or (self.always and math.isfinite(together))
        why = f"{way}, {'windows padded' if self.wide else 'side by side'}" if kept else "merged they are slower"
        chosen = way if kept else None
        return chosen, BatchTrial(subject, chosen, separate, together, why)

    def _price_region(self, part: ComputeGraph, products: Collection[str]) -> tuple[float, float, Way]:
        """Return the seconds of a region unbatched and batched in the better way, and that way."""
        best, way = math.inf, JOINED
        texts = set[str]()
        for each in (JOINED, STACKED):
            found = batch_siblings(part, dict.fromkeys(products, each), self.joins, self.wide)
            outputs = tuple(dict.fromkeys(_outermost_batch(o, found) for o in part.outputs))
            graph = replace(found.graph, outputs=outputs)
            if (text := str(graph)) in texts:
                continue
            texts.add(text)
            seconds = self.pricing.seconds(graph)
            if seconds < best:
                best, way = seconds, each
        return self.pricing.seconds(part), best, way

    def _part(self, region: Sequence[str]) -> ComputeGraph:
        """Return a region as a separate graph."""
        graph, inside = self.graph, {*region}
        computes = tuple(self.producers[n] for n in region)
        reads = dict.fromkeys(r for c in computes for r in c.reads if r not in inside)
        constants = {n: graph.constants[n] for n in reads if n in graph.constants}
        left = [n for n in region if n in graph.outputs or any(r.name not in inside for r in self.consumers[n])]
        outputs = left or [region[-1]]
        types = {n: graph.types[n] for n in (*reads, *region)}
        inputs = tuple(n for n in reads if n not in constants)
        return ComputeGraph(graph.name, inputs, tuple(outputs), computes, types, constants)


def _products_of(names: Collection[str], found: Batched) -> set[str]:
    """Return the model's products from which ``names`` derive as slices, batches or rearrangements."""
    producers, members = found.graph.producers, {b.name: b.members for b in found.batches}
    of_batch = {m: b for b in found.batches for m in b.members}
    originals, result, waiting = found.originals, set[str](), list(names)
    seen = set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen or name not in producers:
            continue
        seen.add(name)
        if name in members:
            waiting += members[name]
        elif name in originals and name in of_batch:
            if originals[name].name in members:  # a batch with an added bias, under its original name
                waiting.append(originals[name].name)
            elif originals[name].kind == "contraction":
                result.add(originals[name].name)
            else:
                waiting += [r for r in originals[name].reads if r in of_batch]
        elif is_rearrangement(producers[name]):
            waiting += producers[name].reads
    return result


def _outermost_batch(name: str, found: Batched) -> str:
    """Return the outermost batch of which ``name`` is a slice, or ``name`` itself."""
    of_batch = {m: b.name for b in found.batches for m in b.members}
    while name in of_batch:
        name = of_batch[name]
    return name


def _price_key(part: ComputeGraph, products: Collection[str]) -> str:
    """Return a key that is equal for regions of equal price: their text without tensor names."""
    names: dict[str, str] = {}
    for c in part.computes:
        for n in (*c.reads, c.name):
            names.setdefault(n, f"t{len(names)}")
    lines = [f"{new}: {part.types[old]}{' constant' if old in part.constants else ''}" for old, new in names.items()]
    lines += [f"{c.text_with(names)}{' product' if c.name in products else ''}" for c in part.computes]
    shared = " ".join(names[o] for o in part.outputs)
    return "\n".join([*lines, f"writes {shared}"])
