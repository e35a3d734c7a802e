"""Splitting of products whose columns are read in blocks, and of products of concatenations. Values stay, weights are not copied,
and planted faults are detected."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
from cell_forms import WRITTEN, CellForm, cell_form
from onnx import helper
from onnx_models import model, tensor
from rewritten_graphs import lowered, unlike
from sibling_graphs import MAPS, SiblingModel
from view_graphs import Shape

from rammer.fusion.tile_graph import CutTrial
from rammer.ir.compute import Compute, ComputeGraph, verify_compute_graph
from rammer.passes.compute import split_products
from rammer.passes.compute.batch_decision import batch_where_it_pays
from rammer.passes.compute.simplify import simplify_graph
from rammer.passes.compute.split_graph import CutState
from rammer.passes.compute.split_products import cut_products
from rammer.plan.storage import assign_storage
from rammer_testing.nonempty import some

#: Random models per test run, and models searched for a planted fault.
COUNT, PLANTED = 8, 60


class CutModel(SiblingModel):
    """A generator of split products and of products of concatenations, among siblings and views."""

    def step(self) -> None:
        wide = [n for n, s in self.shapes.items() if not n.startswith("c") and len(s) > 1]
        if not wide or self.rng.random() < 0.4:
            super().step()
            return
        x = self.rng.choice(wide)
        self.rng.choice((self.in_blocks, self.in_blocks, self.of_both))(x, self.shapes[x])

    def in_blocks(self, x: str, shape: Shape) -> None:
        """Add a product or a sum of two, with maps after it, in blocks, some of which are combined."""
        widths = [self.rng.choice((2, 3, 4))] * self.rng.randint(2, 4)
        if self.rng.random() < 0.3:
            widths[0] += 1
        whole = (*shape[:-1], sum(widths))
        names = [self.add("MatMul", [x, self.weights(shape[-1], sum(widths))], whole)[0] for _ in range(self.rng.randint(1, 2))]
        (y,) = self.add("Add", names, whole) if len(names) > 1 else names
        self.parts(self.behind([y])[0], widths)

    def parts(self, y: str, widths: list[int]) -> None:
        """Split ``y`` into blocks along its last axis, by a Split or slices, with maps after some blocks."""
        shape = self.shapes[y]
        targets = [(*shape[:-1], n) for n in widths]
        if self.rng.random() < 0.6:
            found = self.add("Split", [y, self.ints(*widths)], *targets, axis=len(shape) - 1)
        else:
            ends, axis = np.cumsum(widths), self.ints(len(shape) - 1)
            bounds = [(int(e) - n, int(e)) for e, n in zip(ends, widths, strict=True)]
            found = [
                self.add("Slice", [y, self.ints(a), self.ints(b), axis], t)[0] for (a, b), t in zip(bounds, targets, strict=True)
            ]
        gates = [self.add(self.rng.choice(MAPS), [f], self.shapes[f])[0] if self.rng.random() < 0.7 else f for f in found]
        for a, b in pairwise(gates):
            if self.shapes[a] == self.shapes[b] and self.rng.random() < 0.7:
                self.add(self.rng.choice(("Mul", "Add")), [a, b], self.shapes[a])

    def of_both(self, x: str, shape: Shape) -> None:
        """Add one or two products of concatenations with the same weights, in blocks or as a whole."""
        fitting = [n for n, s in self.shapes.items() if not n.startswith("c") and s[:-1] == shape[:-1]]
        pairs = [(x, self.rng.choice(fitting)) for _ in range(self.rng.randint(1, 2))]
        pairs = [p for p in pairs if self.shapes[p[1]] == self.shapes[pairs[0][1]]]
        depth = shape[-1] + self.shapes[pairs[0][1]][-1]
        weights = self.weights(depth, 6)
        for pair in pairs:
            (both,) = self.add("Concat", list(pair), (*shape[:-1], depth), axis=len(shape) - 1)
            (y,) = self.add("MatMul", [both, weights], (*shape[:-1], 6))
            if self.rng.random() < 0.7:
                self.parts(self.behind([y])[0], [2, 2, 2] if self.rng.random() < 0.5 else [3, 3])


def cut_model(seed: int) -> ComputeGraph:
    rng = Random(seed)
    made = CutModel(rng)
    made.inputs.append(made.named((rng.choice((1, 2, 3)), rng.choice((2, 3, 5)))))
    while len(made.nodes) < 14:
        made.step()
    return lowered(made.finished(0.05))


def everything(graph: ComputeGraph) -> set[str]:
    return {c.name for c in graph.computes}


def trial(graph: ComputeGraph, rng: np.random.Generator) -> str:
    """Return a description of a fault in the graph after all cuts, or without some of them."""
    found = cut_products(graph, lambda: everything(graph))
    labels = sorted({label for cuts in found.cuts.values() for label in cuts})
    kept = [label for label in labels if rng.random() < 0.5]
    some_cut = cut_products(graph, lambda: everything(graph), kept)
    if cut_products(graph, lambda: everything(graph), labels).graph is not graph:
        return "it is cut all the same"
    if any(label in kept for cuts in some_cut.cuts.values() for label in cuts):
        return "a cut was made that was not to be"
    return unlike(graph, found.graph, rng) or unlike(graph, some_cut.graph, rng)


def test_results_stay_wherever_products_are_cut(seed: int, rng: np.random.Generator) -> None:
    done = 0
    for each in range(seed, seed + COUNT):
        graph = cut_model(each)
        assert not (found := trial(graph, rng)), f"model {each}: {found}"
        done += cut_products(graph, lambda graph=graph: everything(graph)).graph is not graph  # type: ignore[misc]
    assert done


class Drawn:
    """A random pricing rule, equal for equal graphs."""

    measured = False

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.said = dict[str, float]()

    def copies(self, graph: ComputeGraph) -> list[Compute]:
        return assign_storage(simplify_graph(graph)).copies

    def seconds(self, graph: ComputeGraph) -> float:
        verify_compute_graph(graph)
        return self.said.setdefault(str(graph), float(self.rng.random()))


def test_results_stay_whatever_is_said_to_be_faster(seed: int, rng: np.random.Generator) -> None:
    for each in range(seed, seed + COUNT):
        graph = cut_model(each)
        after, _ = batch_where_it_pays(graph, Drawn(rng))
        assert not (found := unlike(graph, after, rng)), f"model {each}: {found}"


@pytest.mark.parametrize("written", WRITTEN)
def test_pieces_are_views_of_the_weights(written: str, rng: np.random.Generator) -> None:
    form = CellForm(written, 3, 6, 5, bias="both", turned=bool(rng.integers(2)))
    graph = lowered(cell_form(rng, form)[0])
    found = cut_products(graph, lambda: everything(graph))
    assert not unlike(graph, found.graph, rng) and (found.graph is graph) == (written == "gates")
    for value in some(found.graph.constants.values()):
        assert any(np.shares_memory(value, whole) for whole in graph.constants.values())
    gates = [c for c in found.graph.computes if c.combiner]
    assert {c.shape[-1] for c in gates} == {6} and {c.reduce[0].extent for c in gates} == {5, 6}


def one(split: list[int], read: list[int], outputs: list[str], kind: str = "Mul", dtype: int = 1) -> ComputeGraph:
    """Make a product in blocks, some of which are combined."""
    width = sum(split)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["p"]),
        helper.make_node("Split", ["p", "n"], [f"s{i}" for i in range(len(split))], axis=1),
        helper.make_node(kind, [f"s{i}" for i in read], ["y"], **({"axis": 1} if kind == "Concat" else {})),
        helper.make_node("Tanh", ["p"], ["t"]),
    ]
    w = np.random.default_rng(0).standard_normal((3, width)).astype(np.float32)
    used = [n for n in nodes if n.output[0] in {"p", "s0", "y", *outputs}]
    return lowered(model(used, [tensor("x", (2, 3))], outputs, constants={"w": w, "n": np.array(split)}))


CASES: dict[str, tuple[ComputeGraph, int]] = {
    "blocks that meet": (one([4, 4], [0, 1], ["y"]), 2),
    "one that nobody reads": (one([4, 4, 3], [0, 1], ["y"]), 2),
    "blocks that only lie side by side": (one([4, 4], [0, 1], ["y"], "Concat"), 1),
    "an output": (one([4, 4], [0, 1], ["y", "p"]), 1),
    "somebody reads the whole": (one([4, 4], [0, 1], ["y", "t"]), 1),
    "blocks of one column": (one([1, 1], [0, 1], ["y"]), 1),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_cut(case: str) -> None:
    graph, count = CASES[case]
    found = cut_products(graph, lambda: ()).graph
    assert sum(c.combiner is not None for c in found.computes) == count
    assert (found is graph) == (count == 1)


def test_products_stay_whole_where_that_is_no_slower() -> None:
    graph, _ = CASES["blocks that meet"]

    class Same(Drawn):
        def seconds(self, graph: ComputeGraph) -> float:
            return 1.0

    after, trials = batch_where_it_pays(graph, Same(np.random.default_rng(0)))
    assert after is graph and [t.kept for t in trials if isinstance(t, CutTrial)] == [False]
    assert "whole" in str(trials[0])


MOVED, PIECE = split_products.shift_load, CutState.piece


PLANTS: dict[str, tuple[Any, str, Any]] = {
    "blocks are read where they were": (split_products, "shift_load", lambda root, d, name, first: MOVED(root, d, name, 0)),
    "weights of the first block serve all": (CutState, "piece", lambda self, t, at, first, n: PIECE(self, t, at, 0, n)),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_planted_faults_are_found(plant: str, seed: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*PLANTS[plant])
    for each in range(seed, seed + PLANTED):
        try:
            if trial(cut_model(each), rng):
                return
        except (ValueError, AssertionError, StopIteration, KeyError):
            return
    pytest.fail(f"{plant}: {PLANTED} models did not show it")
