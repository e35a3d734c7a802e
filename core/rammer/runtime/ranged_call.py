"""Bound calls whose lengths change between runs, and whose outputs may stay in their inputs' memory for the next run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from rammer.compiled.segments import Compiled
from rammer.device.arrays import by_name, on_host, shape_of
from rammer.device.manifest import Array, Loaded
from rammer.errors import BadInput
from rammer.ir.extent import Point
from rammer.ir.graph import Value
from rammer.runtime.bound_call import ModelBound
from rammer.runtime.shape_buckets import Span
from rammer.verify.in_place_state import state_pairs


@dataclass(frozen=True)
class BindSpec:
    """The ranges of a bound call's lengths and its aliased outputs. ``kept`` maps outputs to the inputs whose memory they share.
    ``closing`` is called when the bound call is closed."""

    spans: Mapping[str, Span] = field(default_factory=dict)
    kept: Mapping[str, str] = field(default_factory=dict)
    closing: Callable[[], None] | None = None

    def check(self, lengths: Mapping[str, Any]) -> dict[str, int]:
        """Return ``lengths`` as integers. Raise BadInput for a name that is not a ranged dimension, or for a length outside its
        range."""
        found = dict[str, int]()
        for name, value in lengths.items():
            if name not in self.spans:
                known = f"its lengths are {', '.join(self.spans)}" if self.spans else "all of its shapes are fixed"
                raise BadInput(f"the bound call has no length {name!r}", hint=known)
            low, high = self.spans[name]
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or not low <= value <= high:
                raise BadInput(f"{name} is {value!r}, the range is {low}..{high}")
            found[name] = int(value)
        return found


#: The specification of a model with fixed shapes.
PLAIN: Final = BindSpec()


class RangedCall(ModelBound):
    """A bound call of a program for a range, or with outputs that alias inputs.

    Arrays have the greatest lengths. ``run(past=5)`` sets the current length, and ``to_host`` returns outputs of that length.

    The program itself writes an output that continues its input (``frontend.ranges.kv_cache``) in place: one new row, not the
    whole cache. Any other output is copied into its input after each run, as ``notes`` reports. Elements past the length of an
    input that is written in place are zero. They are cleared when a run is shorter than the previous one."""

    def __init__(
        self,
        compiled: Compiled,
        loaded: Mapping[int, Loaded],
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        stream: Any,
        terms: BindSpec,
    ) -> None:
        self._terms, self._ranged = terms, compiled.ranged
        ports = {v.name: v.external or v.name for v in compiled.graph.inputs}
        self._names = {v.external or v.name: v.name for v in (*compiled.graph.inputs, *compiled.graph.outputs)}
        hidden = self._ranged.lengths if self._ranged is not None else {}
        self._length_ports = {ports[tensor]: symbol for symbol, tensor in hidden.items()}
        self._point = {symbol: terms.spans[symbol][1] for symbol in hidden}
        types = {v.external or v.name: v.type for v in compiled.graph.inputs}
        found = {o: p for program in compiled.programs for o, p in state_pairs(program).items()}
        self._over = {o: i for o, i in terms.kept.items() if found.get(self._tensor(compiled.graph.outputs, o)) == self._names[i]}
        self._copied = {o: i for o, i in terms.kept.items() if o not in self._over}
        begun = {n for p in compiled.programs for o in p.operators if any(e.before for e in o.skips) for n in o.outputs}
        self._whole_over = [o for o in self._over if self._tensor(compiled.graph.outputs, o) not in begun]
        given = dict(inputs)
        self._filled = {o: types[i].shape if i in given else (0,) * len(types[i].shape) for o, i in self._over.items()}
        for name in terms.kept.values():
            shape, dtype = types[name].shape, types[name].dtype
            if name not in given:
                given[name] = np.zeros(shape, dtype)
            elif on_host(given[name]):
                given[name] = np.array(_pad_array(np.asarray(given[name]), shape))
            if shape_of(given[name]) != shape:
                what = f"the state in input {name!r} has shape {list(shape)}, the array has {list(shape_of(given[name]))}"
                raise BadInput(what, hint="give a shorter host array, or an array of this shape")
        numbers = {port: np.array(self._point[symbol], np.int64) for port, symbol in self._length_ports.items()}
        super().__init__(compiled, loaded, {**given, **numbers}, outputs, stream)
        self._types = types
        self._numbers = {n: self.inputs.pop(n) for n in numbers}

    @staticmethod
    def _tensor(values: tuple[Value, ...], name: str) -> str:
        return next(v.name for v in values if (v.external or v.name) == name)

    @property
    def lengths(self) -> Point:
        """The lengths of the next run."""
        return dict(self._point)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on copies and full overwrites in each run."""
        copied = (f"output {o!r} is copied into input {i!r} after every run" for o, i in self._copied.items())
        why = "the position of its first new element is unknown"
        written = (f"all of output {o!r} is written over input {self._over[o]!r} in every run: {why}" for o in self._whole_over)
        return (*super().notes, *copied, *written)

    def run(self, **lengths: int) -> None:
        """Run once at these lengths, which stay set; see ``ModelBound.run``. Raise BadInput for a length outside its range."""
        with self.turn():
            self._prepare_run(lengths)
            super().run()
            self._end()

    def seconds(self, **lengths: int) -> float:
        """Run once at these lengths, wait, and return the seconds by ``clock``, without the copies after the run."""
        with self.turn():
            self._prepare_run(lengths)
            seconds = super().seconds()
            self._end()
            return seconds

    def write(self, inputs: Mapping[str, Any]) -> None:
        """Copy values into the bound inputs. Host arrays may be shorter than the range; zeros are appended."""
        inputs = by_name("input", inputs)
        whole = {n: self._whole(n, a) for n, a in inputs.items()}
        with self.turn():
            super().write(whole)
            for output, name in self._over.items():
                if name in whole:
                    self._filled[output] = self._types[name].shape

    def to_host(self, *names: str) -> dict[str, Array]:
        """Return copies of the outputs (all, or those in ``names``) at the lengths of the last run."""
        with self.turn():
            found = super().to_host(*names)
            return {n: np.ascontiguousarray(a[self._current_slices(n, a.shape)]) for n, a in found.items()}

    def close(self) -> None:
        """Release the arrays, and the program if only this call uses it."""
        if not self.closed:
            super().close()
            if self._terms.closing is not None:
                self._terms.closing()

    # --- lengths ------------------------------------------------------------------------------

    def _shape(self, name: str, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of an input or output at the lengths of the next run."""
        return whole if self._ranged is None else self._ranged.shape(self._names[name], self._point)

    def _current_slices(self, name: str, whole: tuple[int, ...]) -> tuple[slice, ...]:
        return tuple(map(slice, self._shape(name, whole)))

    def _whole(self, name: str, given: Any) -> Any:
        """Return a host array padded with zeros to its full shape."""
        known = self._types.get(name)
        if known is None or not on_host(given) or self._ranged is None:
            return given
        return _pad_array(np.asarray(given), known.shape)

    def _prepare_run(self, lengths: Mapping[str, Any]) -> None:
        found = self._terms.check(lengths)
        changed = {s: n for s, n in found.items() if self._point[s] != n}
        if changed:
            self._point.update(changed)
            for port, symbol in self._length_ports.items():
                if symbol in changed:
                    self.put(self._names[port], np.array(self._point[symbol], np.int64))
        if self._ranged is not None:
            self._clear_state_tails()

    def _clear_state_tails(self) -> None:
        """Clear state elements past the current length of this run."""
        for output, name in self._over.items():
            shape = self._shape(output, self._types[name].shape)
            if any(have > want for have, want in zip(self._filled[output], shape, strict=True)):
                values, box = np.zeros(self._types[name].shape, self._types[name].dtype), self._current_slices(name, ())
                if 0 not in self._shape(name, ()):
                    values[box] = self.fetched(self._names[output])[box]
                self.put(self._names[name], values)
            self._filled[output] = shape

    def _end(self) -> None:
        """Copy outputs that do not alias their inputs into the inputs."""
        for output, name in self._copied.items():
            value, shape = self.outputs[output], self._types[name].shape
            if tuple(value.shape) != shape:
                value = np.ascontiguousarray(self.fetched(self._names[output])[tuple(map(slice, shape))])
            super().write({name: value})


def _pad_array(given: Array, shape: tuple[int, ...]) -> Array:
    """Return ``given`` padded with zeros to this shape, or ``given`` itself if it does not fit."""
    if given.shape == shape or given.ndim != len(shape) or any(a > b for a, b in zip(given.shape, shape, strict=True)):
        return given
    made = np.zeros(shape, given.dtype)
    made[tuple(map(slice, given.shape))] = given
    return made
