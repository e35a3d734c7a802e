"""Which siblings are batched: those of whose results nothing must be copied, where the device is predicted to gain.

What depends on one another through batches and the maps behind them is one region, decided on its own: as a graph of its
own it is compiled as it was, stacked and joined, and the fastest stays. Equal regions (a model's layers) are decided once.
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

#: Maps behind a product, one after another, that its region has at most.
FOLLOWED: Final = 12
#: Computes between those of a region that are compiled with it, at most.
MOST_BETWEEN: Final = 512
#: Computes of a graph that is priced as a whole with and without its batches, at most: a region leaves out later reductions.
WHOLE: Final = 64
#: How often batches are taken apart because of copies, before none of them is left.
ATTEMPTS: Final = 8
JOINED: Final[Way] = "joined"
STACKED: Final[Way] = "stacked"
#: Members that a line of the log names.
SHOWN: Final = 6


#: Of regions that are alike: seconds apart, and in the better way of batching them.
Prices: TypeAlias = "dict[str, tuple[float, float, Way]]"


class Pricing(Protocol):
    """What the steps behind say of a graph; ``measured`` by running it."""

    @property
    def measured(self) -> bool: ...

    def copies(self, graph: ComputeGraph) -> Sequence[Compute]:
        """The Computes that run and only rearrange."""
        ...

    def seconds(self, graph: ComputeGraph) -> float:
        """The time of ``graph`` as a program; infinite where it is none."""
        ...


@dataclass(frozen=True, slots=True)
class PartPricer:
    """``Pricing`` by two functions."""

    copies: Callable[[ComputeGraph], Sequence[Compute]]
    seconds: Callable[[ComputeGraph], float]
    measured: bool = False


def batch_where_it_pays(
    graph: ComputeGraph, pricing: Pricing, always: bool = False, pad: bool = False, cut: bool = True
) -> tuple[ComputeGraph, tuple[BatchTrial | CutTrial, ...]]:
    """``graph`` with siblings batched where that is predicted to be no slower (or ``always``) and copies nothing, and what
    was tried; ``graph`` itself where nothing is batched. With ``pad``, what differs in its windows only is tried behind that.
    With ``cut``, products are cut in pieces first where batching then makes them faster."""
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
    """``graph`` with products cut where they are predicted to be faster then, batched as is best; itself where there are none.
    Regions of pieces that batches connect are decided one by one."""

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
    """The decision for one graph: what was copied before, prices by region, and the log."""

    def __init__(self, graph: ComputeGraph, pricing: Pricing, joins: Joins, always: bool, wide: bool, prices: Prices) -> None:
        self.graph, self.pricing, self.joins, self.always, self.wide = graph, pricing, joins, always, wide
        self.prices = prices
        self.producers, self.consumers = graph.producers, graph.consumers()
        self.trials: list[BatchTrial] = []
        self.places = {c.name: i for i, c in enumerate(graph.computes)}

    @cached_property
    def copied(self) -> set[str]:
        """What is copied as the graph is."""
        return {c.name for c in self.pricing.copies(self.graph)}

    def decided(self) -> tuple[ComputeGraph, tuple[BatchTrial, ...]]:
        """See ``batch_where_it_pays``."""
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
            apart, together = map(self.pricing.seconds, (self.graph, final))
            # What ran beside products is no part of their region. A price is not exact enough to tell less than 1%.
            if not together * (1.0 if self.pricing.measured else CLEARLY) <= apart:
                final = self.graph
                self.trials.append(BatchTrial("all", None, apart, together, "the whole is slower with them as one"))
        return final, tuple(self.trials)

    def cuts(self, model: ComputeGraph, found: CutGraph) -> tuple[tuple[CutTrial, ...], set[str]]:
        """Of pieces, each region's price, and that of what they are part of in the ``model``; the cuts that do not pay."""
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
            trial = CutTrial(subject, whole, min(batched_as.apart, batched_as.together))
            trials.append(trial)
            refused |= set[str]() if trial.kept else {cut for n in pieces for cut in found.cuts[n]}
        return tuple(trials), refused

    def seconds_of(self, names: Collection[str], left: Collection[str]) -> float:
        """The time of those of these Computes that are the graph's, with those between them that are not ``left``, as a graph:
        apart or batched, whichever is faster."""
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
        apart, together, _ = self._price_region(
            self._part(ordered), [n for n in ordered if self.producers[n].kind == "contraction"]
        )
        return min(apart, together)

    def _without_copies(self, ways: dict[str, Way]) -> Batched:
        """Batched as ``ways`` say, which lose the products whose results would have to be copied."""
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
        """The products and maps, in order, that depend on one another through batches."""
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
        """What depends on a part of the graph and has others of it depend on it: without, they would be priced side by side, as
        the steps of a recurrence."""
        after, before, places = {*part}, {*part}, [self.places[n] for n in part]
        span = self.graph.computes[min(places) : max(places) + 1]  # others are before all of it, or behind
        for c in span:
            if not after.isdisjoint(c.reads):
                after.add(c.name)
        for c in reversed(span):
            if c.name in before:
                before.update(c.reads)
        found = (after & before).difference(part)
        return found if len(found) <= MOST_BETWEEN else set()

    def _expand_product(self, product: str) -> set[str]:
        """A product with the maps behind it, and the views of what it reads."""
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
        """``names`` without what only rearranges at the end."""
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
        apart, together, way = self.prices[key]
        kept = together <= apart or (self.always and math.isfinite(together))
        why = f"{way}, {'windows padded' if self.wide else 'side by side'}" if kept else "as one they are slower"
        chosen = way if kept else None
        return chosen, BatchTrial(subject, chosen, apart, together, why)

    def _price_region(self, part: ComputeGraph, products: Collection[str]) -> tuple[float, float, Way]:
        """Seconds of a region as it is, and in the better way, with that."""
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
        """A region as a graph of its own."""
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
    """The model's products of whose results ``names`` are slices, batches or rearrangements."""
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
            if originals[name].name in members:  # a batch that got a bias, by its own name
                waiting.append(originals[name].name)
            elif originals[name].kind == "contraction":
                result.add(originals[name].name)
            else:
                waiting += [r for r in originals[name].reads if r in of_batch]
        elif is_rearrangement(producers[name]):
            waiting += producers[name].reads
    return result


def _outermost_batch(name: str, found: Batched) -> str:
    """The batch of which ``name`` is a slice in the end, ``name`` where it is none."""
    of_batch = {m: b.name for b in found.batches for m in b.members}
    while name in of_batch:
        name = of_batch[name]
    return name


def _price_key(part: ComputeGraph, products: Collection[str]) -> str:
    """Equal for regions of one price: all but the names of tensors."""
    names: dict[str, str] = {}
    for c in part.computes:
        for n in (*c.reads, c.name):
            names.setdefault(n, f"t{len(names)}")
    lines = [f"{new}: {part.types[old]}{' constant' if old in part.constants else ''}" for old, new in names.items()]
    lines += [f"{c.text_with(names)}{' product' if c.name in products else ''}" for c in part.computes]
    shared = " ".join(names[o] for o in part.outputs)
    return "\n".join([*lines, f"writes {shared}"])
