"""Iterations of a loop by a program that is bound twice: each call reads the other's states, which stay on the device. Between
calls the host passes slices and counts, and reads the gathered values and the condition."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from rammer.device.arrays import on_host
from rammer.ir.formats import numpy_type
from rammer.runtime.bound_call import BoundCall
from rammer.runtime.loaded_model import LoadedModel

if TYPE_CHECKING:
    from rammer.frontend.loops.control_operators import TurnsAhead, TurnsDone
    from rammer.frontend.loops.loop_chunk import LoopChunk
    from rammer.frontend.read.reader import Model

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


class TurningProgram:
    """A loop chunk ``turns`` as a loaded program of one segment, whose ports are those of ``model``. Any thread may call it;
    loops are serialised."""

    def __init__(self, special: LoadedModel, turns: LoopChunk, model: Model) -> None:
        self.special, self.turns, self._lock = special, turns, Lock()
        blank = {p.name: np.zeros([int(str(n)) for n in p.shape], numpy_type(p.dtype)) for p in model.inputs}
        states = range(len(turns.states))
        there = special.bind(blank, {}, pinned=False)
        again = {turns.name("state", i): there.outputs[turns.name("after", i)] for i in states}
        # An unread state stays in the host's array, which a device with separate memory cannot and need not write.
        pairs = [(turns.name("after", i), there.inputs[turns.name("state", i)]) for i in states]
        into = {after: array for after, array in pairs if on_host(array) == on_host(there.outputs[after])}
        back = special.bind({**there.inputs, **again}, into, pinned=False)
        self._bounds = there, back
        self._after = [turns.name("after", i) for i in states]
        self._going = [] if turns.steady else [turns.name("going")]
        self._gathered = [turns.name("gathered", i) for i in range(len(turns.results) - len(turns.states))]

    def run(self, ahead: TurnsAhead, outer: Mapping[str, Any]) -> TurnsDone:
        """Run all iterations ahead, until none remains or the condition fails. ``outer`` are outer values by name."""
        from rammer.frontend.loops.control_operators import TurnsDone

        gathered: list[list[Any]] = [[] for _ in self._gathered]
        with self._lock:
            first, going, now = ahead.first, True, 0
            _write_inputs(self._bounds[0], {**outer, **{self.turns.name("state", i): a for i, a in enumerate(ahead.state)}})
            while True:
                bound = self._bounds[now]
                done, going, found = self._run_iterations(bound, ahead, first)
                first += done
                for parts, values in zip(gathered, found, strict=True):
                    parts.append(values)
                if not going or first - ahead.first == ahead.left:
                    break
                ahead.check(first)
                now = 1 - now
            state = list(_copy_outputs(bound, self._after).values())
        return TurnsDone(first - ahead.first, going, state, [p[0] if len(p) == 1 else np.concatenate(p) for p in gathered])

    def _run_iterations(self, bound: BoundCall, ahead: TurnsAhead, first: int) -> tuple[int, bool, list[Any]]:
        """Run the iterations of one call. Return their number, True if the loop continues, and their gathered values."""
        most, name = self.turns.count, self.turns.name
        count = most if ahead.left is None else min(most, ahead.left - (first - ahead.first))
        given = {name("slices", i): _pad_slices(x, first, count, most) for i, x in enumerate(ahead.slices)}
        given[name("left")] = np.array(count)
        if not self.turns.scanned:
            given[name("first")] = np.array(first)
        _write_inputs(bound, given)
        bound.run()
        found = _copy_outputs(bound, [*self._going, *self._gathered])
        going = found.pop(self._going[0])[:count] if self._going else np.ones(0, bool)
        done = count if going.all() else int(going.argmin()) + 1
        return done, bool(going.all()), [a[:done] for a in found.values()]


def _write_inputs(bound: BoundCall, values: Mapping[str, Any]) -> None:
    """Write values to the inputs of a call. Runs that read host arrays must not be queued."""
    far = dict[str, Any]()
    for name, value in values.items():
        array = bound.inputs[name]
        if isinstance(array, np.ndarray):
            np.copyto(array, value)
        else:
            far[name] = value
    if far:
        bound.write(far)


def _copy_outputs(bound: BoundCall, names: list[str]) -> dict[str, Any]:
    """Return owned copies of outputs after the run has ended."""
    bound.synchronize()
    near = {n: bound.outputs[n] for n in names if isinstance(bound.outputs[n], np.ndarray)}
    far = bound.to_host(*(n for n in names if n not in near)) if len(near) < len(names) else {}
    return {n: near[n].copy() if n in near else far[n] for n in names}


def _pad_slices(slices: Any, first: int, count: int, wanted: int) -> Any:
    """Return the slices of ``count`` iterations, padded to ``wanted`` by repeating the last one."""
    found = slices[first : first + count]
    return found if count == wanted else np.concatenate([found, np.repeat(found[-1:], wanted - count, axis=0)])
