"""Wavefronts over devices: stacked recurrent layers, each device with the weights of some, chunk of steps after chunk.

Nothing here knows what an LSTM is. Products that read the same weights one step after another are a layer; maps join the layers
whose products they read (a cell's input and recurrent weights). Devices take layers in their order, and while one computes a
chunk of steps the next has the chunk before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rammer.distributed.partition.cut_graph import Spot
from rammer.distributed.partition.operator_cost import Costs
from rammer.ir.compute import Compute, ComputeGraph

__all__ = ["assign_wavefront", "chunks_worth"]

#: Products of the same weights that make a layer.
LEAST_STEPS = 4


@dataclass(frozen=True)
class _Layers:
    """``of`` is the layer of each Compute that belongs to one, numbered as they come, ``step`` the step of each product."""

    of: Mapping[str, int]
    step: Mapping[str, int]
    count: int
    steps: int


def assign_wavefront(graph: ComputeGraph, costs: Costs, devices: int, chunks: int) -> dict[str, Spot] | None:
    """A spot for every Compute of a graph with one product a step, in so many chunks of steps; None where it has fewer layers
    than devices."""
    layers = _find_layers(graph)
    if layers is None or layers.count < devices:
        return None
    seconds = [0.0] * layers.count
    for name, layer in layers.of.items():
        seconds[layer] += costs.seconds.get(name, 0.0)
    device_of = _split_layers(seconds, devices)
    length = -(-layers.steps // chunks)
    spots: dict[str, Spot] = {}
    for c in graph.computes:
        near = [spots[n] for n in c.reads if n in spots]
        device = device_of[layers.of[c.name]] if c.name in layers.of else near[-1].device if near else 0
        stage = max([s.stage for s in near], default=0)
        spots[c.name] = Spot(max(stage, layers.step[c.name] // length if c.name in layers.step else 0), device)
    return spots


def chunks_worth(graph: ComputeGraph, alone: float, devices: int, overhead: float) -> int:
    """Chunks that make a run short, where each costs ``overhead`` seconds once more and the first and last keep devices idle; at
    least 2."""
    layers = _find_layers(graph)
    if layers is None or not overhead:
        return 2
    wanted = math.sqrt((devices - 1) * alone / devices / overhead)
    return max(2, min(layers.steps // 2, round(wanted)))


def _find_layers(graph: ComputeGraph) -> _Layers | None:
    """None where nothing is repeated."""
    uses: dict[str, list[Compute]] = {}
    for c in graph.computes:
        if c.kind == "contraction":
            for name in c.reads:
                if name in graph.constants:
                    uses.setdefault(name, []).append(c)
    uses = {n: products for n, products in uses.items() if len(products) >= LEAST_STEPS}
    if not uses:
        return None
    steps = max(map(len, uses.values()))
    # A first product may be missing, where the first state is known to be zero.
    step = {c.name: k + steps - len(products) for products in uses.values() for k, c in enumerate(products)}
    weight = {c.name: n for n, products in uses.items() for c in products}
    same = {n: n for n in uses}
    near: dict[str, str] = dict(weight)
    for c in graph.computes:
        found = [near[n] for n in c.reads if n in near]
        if c.name in weight or not found or c.kind == "contraction":
            continue
        for other in found:
            same[_find_root(same, other)] = _find_root(same, found[0])
        near[c.name] = found[0]
    number: dict[str, int] = {}
    of = {c.name: number.setdefault(_find_root(same, near[c.name]), len(number)) for c in graph.computes if c.name in near}
    return _Layers(of, step, len(number), steps)


def _find_root(same: dict[str, str], name: str) -> str:
    while same[name] != name:
        name = same[name]
    return name


def _split_layers(seconds: Sequence[float], devices: int) -> list[int]:
    """Devices of consecutive layers, such that the one that takes longest takes least; each has a layer."""
    count = len(seconds)
    best = {(0, 0): (0.0, 0)}  # (layers, devices) -> (longest, layers before the last device)
    for used in range(1, devices + 1):
        for end in range(used, count - (devices - used) + 1):
            options = [(max(best[k, used - 1][0], sum(seconds[k:end])), k) for k in range(used - 1, end) if (k, used - 1) in best]
            best[end, used] = min(options)
    result, end = [0] * count, count
    for device in reversed(range(devices)):
        begin = best[end, device + 1][1]
        result[begin:end] = [device] * (end - begin)
        end = begin
    return result
