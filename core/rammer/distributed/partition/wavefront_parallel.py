"""Wavefronts over devices for stacked recurrent layers: each device stores the weights of some layers.

The detection does not depend on LSTM operators. Products that read the same weights in successive steps form a layer. Maps join
the layers whose products they read (a cell's input and recurrent weights). Devices are assigned layers in order; while one
computes a chunk of steps, the next computes the preceding chunk.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rammer.distributed.partition.cut_graph import Spot
from rammer.distributed.partition.operator_cost import Costs
from rammer.ir.compute import Compute, ComputeGraph

__all__ = ["assign_wavefront", "chunks_worth"]

#: Minimum number of products of the same weights that form a layer.
LEAST_STEPS = 4


@dataclass(frozen=True)
class _Layers:
    """The layer of each Compute in a layer (``of``), numbered in order of occurrence, and the ``step`` of each product."""

    of: Mapping[str, int]
    step: Mapping[str, int]
    count: int
    steps: int


def assign_wavefront(graph: ComputeGraph, costs: Costs, devices: int, chunks: int) -> dict[str, Spot] | None:
    """Return a spot for every Compute of a graph with one product a step, in ``chunks`` chunks of steps. Returns None if it has
    fewer layers than devices."""
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
    """Return the number of chunks, at least 2, that minimises the time of a run. Each chunk costs ``overhead`` seconds, and
    devices idle during the first and last chunk."""
    layers = _find_layers(graph)
    if layers is None or not overhead:
        return 2
    wanted = math.sqrt((devices - 1) * alone / devices / overhead)
    return max(2, min(layers.steps // 2, round(wanted)))


def _find_layers(graph: ComputeGraph) -> _Layers | None:
    """Return the layers, or None if weights are not reused."""
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
    # The first product may be missing if the initial state is zero.
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
    """Return the device of each layer: consecutive layers, at least one a device, with the slowest device as fast as possible."""
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
