"""Batching of independent products of one kind: values stay, nothing is copied, and planted faults are detected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from onnx import helper
from onnx_models import model, tensor
from rewritten_graphs import lowered, unlike
from sibling_graphs import sibling_model
from sibling_models import attention, branches, cell, fire, widths, window_siblings

from rammer.ir.compute import Compute, ComputeGraph, verify_compute_graph
from rammer.ir.expr import Load
from rammer.passes.compute import batch_candidates, batch_decision, batch_products, pad_windows
from rammer.passes.compute.batch_candidates import SideBySide
from rammer.passes.compute.batch_decision import batch_where_it_pays
from rammer.passes.compute.batch_products import Way, batch_siblings
from rammer.passes.compute.simplify import simplify_graph
from rammer.plan.storage import assign_storage
from rammer_testing.nonempty import some

#: Random models per test run, and models searched for a planted fault.
COUNT, PLANTED = 6, 60


class Priced:
    """A pricing rule; copies are those that the storage pass leaves."""

    def __init__(self, rule: Callable[[ComputeGraph], float] = lambda graph: 1.0, measured: bool = False) -> None:
        self.rule, self.measured = rule, measured
        self.asked = list[ComputeGraph]()

    def copies(self, graph: ComputeGraph) -> list[Compute]:
        return assign_storage(simplify_graph(graph)).copies

    def seconds(self, graph: ComputeGraph) -> float:
        verify_compute_graph(graph)
        self.asked.append(graph)
        return self.rule(graph)


def products(graph: ComputeGraph) -> list[Compute]:
    return [c for c in graph.computes if c.kind == "contraction"]


def problem(graph: ComputeGraph, after: ComputeGraph, rng: np.random.Generator) -> str:
    """Return a description of a fault in ``after``, the batched ``graph``."""
    found = unlike(graph, after, rng)
    copied = {c.name for c in Priced().copies(after)} - {c.name for c in Priced().copies(graph)}
    return found or (f"{sorted(copied)} are copied" if copied else "")


def trial(graph: ComputeGraph, rng: np.random.Generator) -> str:
    """Return a description of a fault after batching all candidates: stacked, joined, and joined with padded windows. Copies
    count as faults only in profitable batching."""
    for way, pad in (("stacked", False), ("joined", False), ("joined", True)):
        ways: dict[str, Way] = {c.name: way for c in products(graph)}  # type: ignore[misc]
        found = problem(graph, batch_siblings(graph, ways, wide=pad).graph, rng)
        if found and not found.endswith("are copied"):
            return f"{way}, {pad}: {found}"
    chosen = (batch_where_it_pays(graph, Priced(), always=True, pad=pad)[0] for pad in (False, True))
    return next(filter(None, (problem(graph, after, rng) for after in chosen)), "")


@pytest.mark.slow
def test_random_siblings(seed: int, rng: np.random.Generator) -> None:
    done = 0
    for number in range(10 * COUNT):  # one model in four has no siblings; a run includes models with siblings
        graph = lowered(sibling_model(seed + number))
        done += batch_where_it_pays(graph, Priced(), always=True)[0] is not graph
        assert not (found := trial(graph, rng)), f"model {seed + number}: {found}"
        if done and number + 1 >= COUNT:
            return
    pytest.fail("nothing was batched")


def _shifted(self: SideBySide, own: Any, number: int) -> Any:
    return _SLICE(self, own, (number + 1) % len(self.starts))


_SLICE, _OF, _MADE, _PAD = SideBySide.slice, batch_products.Joins.of, batch_candidates.constant_offsets, pad_windows.Padding.of


def _ends(padding: pad_windows.Padding, known: Any) -> tuple[int, ...]:
    return tuple(n - (end - begin) for n, (begin, end) in zip(padding.shape, padding.read, strict=True))


def _reversed(self: batch_products.Joins, key: Any, known: Any) -> Any:
    return _OF(self, (key[0][::-1], key[1], key[2]), known)


PLANTS: dict[str, tuple[Any, str, Any]] = {
    "a sibling reads its neighbour's slice": (SideBySide, "slice", _shifted),
    "constants lie in another order": (batch_products.Joins, "of", _reversed),
    "slices need not follow one another": (
        batch_candidates,
        "constant_offsets",
        lambda load: (_MADE(load) or (0,))[:1] + (0,) * (len(load.indices) - 1),
    ),
    "whatever is read may be shared": (batch_candidates.Union, "_load", lambda self, loads, roots, layout, column: roots[0]),
    "copies do not matter": (
        batch_decision.BatchDecision,
        "_without_copies",
        lambda self, ways: batch_siblings(self.graph, ways, self.joins),
    ),
    "weights are padded at their end": (
        pad_windows.Padding,
        "of",
        lambda self, known: _PAD(replace(self, starts=_ends(self, known)), known),
    ),
    "any maps are carried along": (batch_products.Batcher, "_likeness", lambda self, form, number: len(form.loads)),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_planted_faults_are_found(plant: str, seed: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*PLANTS[plant])
    for each in range(seed, seed + PLANTED):
        try:
            if trial(lowered(sibling_model(each)), rng):
                return
        except (ValueError, KeyError, IndexError, AssertionError):
            return  # its result cannot be evaluated
    raise AssertionError("nothing was found")


@pytest.mark.parametrize("way", ["stacked", "joined"])
def test_a_cell_of_products_is_two_products_a_step_at_most(way: Way, rng: np.random.Generator) -> None:
    graph = lowered(cell(rng, steps=5, width=4))
    found = batch_siblings(graph, {c.name: way for c in products(graph)})
    assert len(products(graph)) == 40 and len(products(found.graph)) == 6
    assert not problem(graph, found.graph, rng)


@pytest.mark.parametrize("merged", [False, True])
def test_keys_and_values_may_be_narrower_than_queries(merged: bool, rng: np.random.Generator) -> None:
    """Check that queries are not batched if strides cannot express their order."""
    graph = lowered(attention(rng, tokens=5, width=16, heads=4, shared=2, merged=merged))
    after, trials = batch_where_it_pays(graph, Priced())
    assert len(products(graph)) - len(products(after)) == (1 if merged else 2) and not problem(graph, after, rng)
    assert [t.subject for t in some(trials)] == (["mq", "mk + mv"] if merged else ["mq + mk + mv"])


def test_what_ends_in_a_concatenation_stays_apart(rng: np.random.Generator) -> None:
    graph = lowered(branches(rng))
    after, trials = batch_where_it_pays(graph, Priced())
    assert len(products(graph)) - len(products(after)) == 1 and not problem(graph, after, rng)
    assert [t.subject for t in trials if "copied" in str(t)] == ["none_conv"]


def test_concatenated_siblings_lie_where_they_are_wanted(rng: np.random.Generator) -> None:
    """Check that a batch whose results are concatenated in order is stored as the concatenation."""
    constants = {f"w{i}": rng.standard_normal((n, 3, 1, 1)).astype(np.float32) for i, n in enumerate((2, 4))}
    nodes = [helper.make_node("Conv", ["x", f"w{i}"], [f"c{i}"]) for i in range(2)]
    nodes += [helper.make_node("Relu", [f"c{i}"], [f"r{i}"]) for i in range(2)]
    nodes += [
        helper.make_node("Concat", ["r0", "r1"], ["b"], axis=1),
        helper.make_node("MaxPool", ["b"], ["y"], kernel_shape=[2, 2]),
    ]
    graph = lowered(model(nodes, [tensor("x", (1, 3, 4, 4))], ["y"], constants=constants))
    after, _ = batch_where_it_pays(graph, Priced())
    assert len(products(after)) == 1 and not problem(graph, after, rng)


def test_biases_before_the_sum_of_products_go_along(rng: np.random.Generator) -> None:
    """Check a cell that adds the bias to the inputs' products: batched steps have one map, not one per step."""
    graph = lowered(cell(rng, steps=5, width=4, biased=True))
    for way in ("stacked", "joined"):
        found = batch_siblings(graph, dict.fromkeys((c.name for c in products(graph)), way))  # type: ignore[arg-type]
        biases = [c for c in found.graph.computes if c.combiner is None and "bi" in str(c.reads) and not isinstance(c.body, Load)]
        assert len(products(found.graph)) == 6 and len(biases) == 1 and not problem(graph, found.graph, rng)


@pytest.mark.parametrize("way", ["stacked", "joined"])
@pytest.mark.parametrize("plain", ["m0", "m1", "m2"])
def test_who_has_no_bias_gets_one_of_zeros(plain: str, way: Way, rng: np.random.Generator) -> None:
    """Check a missing bias, as for the keys of some attentions: one product, one map after it, and one more map."""
    graph = lowered(widths(rng, 4, 4, *((4,) if way == "stacked" else (7,)), plain=plain))
    found = batch_siblings(graph, {c.name: way for c in products(graph)})
    maps = [c for c in found.graph.computes if c.combiner is None and not isinstance(c.body, Load)]
    assert len(products(found.graph)) == 1 and len(maps) == 2 and not problem(graph, found.graph, rng)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", range(24))
def test_windows_that_differ_become_one(case: int, seed: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check windows with equal output sizes and strides, which are merged (IOS' operator merge)."""
    monkeypatch.setattr(pad_windows, "MOST_WORK", 1000)
    odd = case % 4 == 0
    graph = lowered(window_siblings(seed + case, odd))
    after, _ = batch_where_it_pays(graph, Priced(), always=True, pad=True)
    assert len(products(after)) <= len(products(graph)) - (not odd) and not problem(graph, after, rng)
    assert not odd or len(products(after)) > 1


def test_what_would_be_mostly_padding_stays_apart(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check 1 by 1 and 3 by 3 windows: 10 products per element, or 18 with padding."""
    graph = lowered(fire(rng))
    ways: dict[str, Way] = {c.name: "joined" for c in products(graph)}
    for most, left in ((1.8, 1), (1.7, 2)):
        monkeypatch.setattr(pad_windows, "MOST_WORK", most)
        assert len(products(batch_siblings(graph, ways, wide=True).graph)) == left


def test_windows_are_padded_where_it_is_asked_for_and_pays(rng: np.random.Generator) -> None:
    """Check SqueezeNet's two convolutions of one image before a concatenation."""
    graph = lowered(fire(rng))
    rule = Priced(lambda g: float(len(products(g))))
    assert batch_where_it_pays(graph, rule) == (graph, ())
    after, trials = batch_where_it_pays(graph, rule, pad=True)
    assert len(products(after)) == 1 and "windows padded" in str(trials[0]) and not problem(graph, after, rng)
    apart, trials = batch_where_it_pays(graph, Priced(lambda g: -float(len(products(g)))), pad=True)
    assert apart.computes == graph.computes and "slower" in str(trials[0])


def test_a_dependence_keeps_products_apart(rng: np.random.Generator) -> None:
    """Check a second product that depends on the first: they read different tensors."""
    constants = {n: rng.standard_normal((4, 4)).astype(np.float32) for n in ("v", "w")}
    nodes = [
        helper.make_node("MatMul", ["x", "v"], ["a"]),
        helper.make_node("Add", ["x", "a"], ["s"]),
        helper.make_node("MatMul", ["s", "w"], ["y"]),
    ]
    graph = lowered(model(nodes, [tensor("x", (3, 4))], ["y"], constants=constants))
    assert batch_where_it_pays(graph, Priced(), always=True) == (graph, ())


def test_outputs_of_a_model_stay_apart(rng: np.random.Generator) -> None:
    """Check that model outputs have separate buffers: a slice would have to be copied."""
    constants = {n: rng.standard_normal((4, 4)).astype(np.float32) for n in ("v", "w")}
    nodes = [helper.make_node("MatMul", ["x", w], [y]) for w, y in (("v", "y"), ("w", "z"))]
    graph = lowered(model(nodes, [tensor("x", (3, 4))], ["y", "z"], constants=constants))
    after, trials = batch_where_it_pays(graph, Priced(), always=True)
    assert after.computes == graph.computes and len(trials) == 2


@pytest.mark.parametrize("last", [(), ("Relu", "Tanh", "Sigmoid")])
def test_maps_that_differ_in_constants_are_carried_along(last: tuple[str, ...], rng: np.random.Generator) -> None:
    graph = lowered(widths(rng, 4, 8, 3, last=last))
    after, _ = batch_where_it_pays(graph, Priced())
    assert len(products(after)) == 1 and not problem(graph, after, rng)
    maps = [c for c in after.computes if c.combiner is None and not isinstance(c.body, Load)]
    assert len(maps) == (1 + 3 if last else 2)


def test_what_is_slower_as_one_stays_apart(rng: np.random.Generator) -> None:
    """Check that regions are priced separately, and equal ones once."""
    graph = lowered(widths(rng, 4, 4))
    more = Priced(lambda g: 3.0 - len(products(g)))
    after, trials = batch_where_it_pays(graph, more)
    assert after.computes == graph.computes and [t.way for t in some(trials)] == [None] and "slower" in str(trials[0])
    assert batch_where_it_pays(graph, more, always=True)[1][0].way is not None


@pytest.mark.parametrize("whole", [1.0, 9.0])
def test_where_the_whole_is_measured_to_be_slower_all_stay_apart(whole: float, rng: np.random.Generator) -> None:
    constants = {f"w{i}": rng.standard_normal((4, 4)).astype(np.float32) for i in range(6)}
    nodes = [helper.make_node("MatMul", ["x" if i < 3 else "z", f"w{i}"], [f"m{i}"]) for i in range(6)]
    nodes += [helper.make_node("ReduceMax", [f"m{i}"], [f"y{i}"], keepdims=1) for i in range(6)]
    ports = [tensor(n, (3, 4)) for n in "xz"]
    graph = lowered(model(nodes, ports, [f"y{i}" for i in range(6)], constants=constants))
    seconds = {1: 1.0, 3: 3.0, 6: 6.0, 2: whole}  # by product count: region batched or separate, all separate or batched
    after, trials = batch_where_it_pays(graph, Priced(lambda g: seconds[len(products(g))], measured=True))
    assert (after is graph) == (whole > 6) == (trials[-1].subject == "all")


def test_batching_twice_gives_the_same_text(rng: np.random.Generator) -> None:
    graph = lowered(cell(rng, steps=3, width=4))
    first, second = (batch_where_it_pays(graph, Priced())[0] for _ in range(2))
    assert str(first) == str(second) and all(
        np.array_equal(first.constants[n], second.constants[n]) for n in some(first.constants)
    )
