"""A compute graph partitioned into pieces, one for each device and stage, with the transfers between them.

Operates on tensor expressions, after all passes and before storages are assigned. A cut may pass through an ONNX operator
(between two steps of an LSTM); pieces are independent of ONNX operators."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from rammer.distributed.distributed_program import RunShape, SpreadInput, SpreadOutput, SpreadState, Transfer
from rammer.errors import BadInput
from rammer.frontend.ranges.range_bounds import EndedTensor, RangeBounds
from rammer.ir.compute import Compute, ComputeGraph

__all__ = ["STATIC", "Cut", "CutPiece", "Spot", "Staying", "cut_graph", "piece_transfers"]

#: Masked tensors of a static graph: empty.
STATIC: Final = RangeBounds({}, ())


@dataclass(frozen=True)
class Staying:
    """The facts about a graph that a cut needs besides its computes. ``ended`` describes tensors masked at a length. ``states``
    maps outputs, by the user's names, to the inputs of the next run."""

    ended: RangeBounds = STATIC
    states: Mapping[str, str] = field(default_factory=dict)

    def tensors(self, graph: ComputeGraph) -> dict[str, str]:
        """Return the states by tensors of ``graph``. Raises BadInput unless each maps an output to an input of equal type."""
        given, made = ({graph.aliases.get(n, n): n for n in names} for names in (graph.inputs, graph.outputs))
        found = dict[str, str]()
        for output, into in self.states.items():
            for name, known, what in ((output, made, "output"), (into, given, "input")):
                if name not in known:
                    raise BadInput(f"the model has no {what} {name!r}", f"state {output}={into}", f"it has {', '.join(known)}")
            tensor, port = made[output], given[into]
            if port in found.values() or graph.types[tensor] != graph.types[port]:
                raise BadInput(
                    f"output {output!r} ({graph.types[tensor]}) cannot be input {into!r} ({graph.types[port]}) of the next run",
                    f"state {output}={into}",
                    "both need the same type and shape, and an input takes one output",
                )
            found[tensor] = port
        return found


#: Neither masked tensors nor states.
PLAIN: Final = Staying()


@dataclass(frozen=True, order=True, slots=True)
class Spot:
    """The location of a Compute: a step of a ``device``, which runs its stages in order."""

    stage: int
    device: int


@dataclass(frozen=True)
class CutPiece:
    """The Computes of one spot as a graph. Its inputs and outputs are tensors from and for other spots."""

    spot: Spot
    graph: ComputeGraph


@dataclass(frozen=True)
class Cut:
    """A partitioned graph: pieces in the order of stages, and all tensors that cross."""

    pieces: tuple[CutPiece, ...]
    transfers: tuple[Transfer, ...]
    inputs: tuple[SpreadInput, ...]
    outputs: tuple[SpreadOutput, ...]
    states: tuple[SpreadState, ...] = ()


def cut_graph(graph: ComputeGraph, spots: Mapping[str, Spot], staying: Staying = PLAIN) -> Cut:
    """Return ``graph`` cut with every Compute at its spot.

    A masked tensor crosses at its current length. A state is sent to the devices that read it in the next run. Raises BadInput if
    an output is not computed. Tensors that cross must have elements (``pack_transfers``). ``spots`` must be in order
    (``host_steps.order_spots``), else ValueError is raised."""
    computed, ended, states = graph.producers, staying.ended, staying.tensors(graph)
    strays = [graph.aliases.get(n, n) for n in graph.outputs if n not in computed]
    if strays:
        raise BadInput(
            f"output {strays[0]!r} is an input or a constant: it cannot be made on several devices", f"model {graph.name}"
        )
    where, lengths = {c.name: spots[c.name] for c in graph.computes}, _length_inputs(graph, ended)
    readers: dict[str, set[Spot]] = {n: set() for n in (*graph.inputs, *computed)}
    for c in graph.computes:
        for name in (*c.reads, *lengths.get(c.name, ())):
            if name in readers:
                readers[name].add(where[c.name])
            if name in where and where[c.name] < where[name]:
                raise ValueError(f"{c.name} at {where[c.name]} reads {name}, which is computed later, at {where[name]}")
    targets = _target_devices(graph, where, readers, states)
    transfers = tuple(
        Transfer(f"move_{n}_to_{d}", n, graph.types[n], where[n].device, d, _run_shape(graph.producers[n], ended))
        for n, devices in targets.items()
        for d in devices
    )
    pieces = tuple(_make_pieces(graph, where, readers, lengths))
    known = graph.aliases
    inputs = tuple(
        SpreadInput(known.get(n, n), n, graph.types[n], tuple(sorted({s.device for s in readers[n]}))) for n in graph.inputs
    )
    brought = {t.tensor: t.name for t in transfers if t.target == 0}
    outputs = tuple(
        SpreadOutput(known.get(n, n), n, graph.types[n], where[n].device, brought[n] if where[n].device else "")
        for n in graph.outputs
        if n not in states
    )
    after = {n: {s.device for s in readers[i]} for n, i in states.items()}
    stay = tuple(
        SpreadState(
            known.get(n, n),
            known.get(i, i),
            n,
            i,
            where[n].device,
            tuple(t.name for t in transfers if t.tensor == n and t.target in after[n]),
        )
        for n, i in states.items()
    )
    return Cut(pieces, transfers, inputs, outputs, stay)


def _length_inputs(graph: ComputeGraph, ended: RangeBounds) -> dict[str, tuple[str, ...]]:
    """Return the scalar inputs that determine the mask of a Compute's output and its reduction bounds."""
    found = dict[str, dict[str, None]]()
    for c in graph.computes:
        known = _masked_tensor(c, ended)
        for extent in known.extents if known else ():
            found.setdefault(c.name, {}).update((n, None) for n, _ in (extent.terms if extent else ()))
    for stop, _ in ended.stops:
        found.setdefault(stop.compute, {}).update((n, None) for n, _ in stop.extent.terms)
    return {name: tuple(terms) for name, terms in found.items()}


def _masked_tensor(c: Compute, ended: RangeBounds) -> EndedTensor | None:
    known = ended.tensors.get(c.name)
    return known if known is not None and known.shape == c.shape and any(e is not None for e in known.extents) else None


def _run_shape(c: Compute, ended: RangeBounds) -> RunShape | None:
    """Return the shape of the result of ``c`` if it is dynamic. Unread elements past it are filled with 0."""
    known = _masked_tensor(c, ended)
    return None if known is None else RunShape(known.extents, tuple(f or 0.0 for f in known.fills))


def _target_devices(
    graph: ComputeGraph, where: Mapping[str, Spot], readers: Mapping[str, Collection[Spot]], states: Mapping[str, str]
) -> dict[str, list[int]]:
    """Return the other devices that each tensor is sent to: its readers in this run or the next, and
    device 0 for user outputs."""
    found = dict[str, list[int]]()
    for c in graph.computes:
        users = {0} if c.name in graph.outputs and c.name not in states else set()
        after = readers[states[c.name]] if c.name in states else ()
        found[c.name] = sorted((users | {s.device for s in (*readers[c.name], *after)}) - {where[c.name].device})
    return found


def piece_transfers(found: Cut) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return for each piece the transfers that it waits for first on its device, and those that depart from it."""
    come: dict[tuple[int, str], str] = {(t.target, t.tensor): t.name for t in found.transfers}
    leave: dict[tuple[int, str], list[str]] = {}
    order = {t.name: k for k, t in enumerate(found.transfers)}
    for t in found.transfers:
        leave.setdefault((t.source, t.tensor), []).append(t.name)
    result = list[tuple[tuple[str, ...], tuple[str, ...]]]()
    for piece in found.pieces:
        device, known = piece.spot.device, piece.graph
        here = [come.pop((device, n)) for n in known.inputs if (device, n) in come]
        sends = [name for n in known.outputs for name in leave.get((device, n), ())]
        result.append((tuple(sorted(here, key=order.__getitem__)), tuple(sorted(sends, key=order.__getitem__))))
    return result


def _make_pieces(
    graph: ComputeGraph,
    where: Mapping[str, Spot],
    readers: Mapping[str, Collection[Spot]],
    lengths: Mapping[str, Collection[str]],
) -> Iterable[CutPiece]:
    """Yield the pieces in the order of spots."""
    there: dict[Spot, list[Compute]] = {}
    for c in graph.computes:
        there.setdefault(where[c.name], []).append(c)
    place = {n: k for k, n in enumerate(graph.constants)}
    for spot in sorted(there):
        yield _make_piece(graph, spot, there[spot], readers, place, lengths)


def _make_piece(
    graph: ComputeGraph,
    spot: Spot,
    computes: Collection[Compute],
    readers: Mapping[str, Collection[Spot]],
    place: Mapping[str, int],
    lengths: Mapping[str, Collection[str]],
) -> CutPiece:
    inside = {c.name for c in computes}
    read = dict.fromkeys(n for c in computes for n in (*c.reads, *lengths.get(c.name, ())) if n not in inside)
    outputs = tuple(c.name for c in computes if c.name in graph.outputs or any(s != spot for s in readers[c.name]))
    constants = {n: graph.constants[n] for n in sorted((n for n in read if n in place), key=place.__getitem__)}
    inputs = tuple(n for n in read if n not in constants)
    types = {n: graph.types[n] for n in (*read, *inside)}
    name = f"{graph.name}_d{spot.device}_{spot.stage}"
    own = replace(graph, name=name, inputs=inputs, outputs=outputs, computes=tuple(computes))
    return CutPiece(spot, replace(own, types=types, constants=constants, aliases={}))
