"""Lengths that change between calls: length variants of a loaded program, and the ranges and states of a bound call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from rammer.compiled.segments import Cases, Compiled
from rammer.device.arrays import on_host, shape_of
from rammer.device.manifest import Array, Loaded, RunResult
from rammer.errors import BadInput
from rammer.ir.extent import Point
from rammer.ir.graph import Value
from rammer.runtime.shape_buckets import Span, format_spans, is_within, pad_array
from rammer.verify.in_place_state import state_pairs


@dataclass(frozen=True)
class LoadedVariants:
    """A loaded program with its length variants. The program's main table is the last in ``tables``. The input ``port`` is the
    length that selects a table."""

    cases: Cases
    port: str
    tables: tuple[Loaded, ...]

    @property
    def kernels(self) -> int:
        """The kernel count of the longest table."""
        return self.tables[-1].kernels

    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        """Run the table for the length in ``inputs``."""
        return self.tables[self.cases.at(int(inputs[self.port]))].run(inputs)

    def close(self) -> None:
        """Free all tables of the program."""
        for table in self.tables:
            table.close()


@dataclass(frozen=True)
class BindSpec:
    """The ranges of a bound call's lengths with their ``steps``, its aliased outputs, and the ``stream`` of its runs. ``kept``
    maps outputs to the inputs whose memory they share. ``closing`` is called when the bound call is closed."""

    spans: Mapping[str, Span] = field(default_factory=dict)
    kept: Mapping[str, str] = field(default_factory=dict)
    steps: Mapping[str, int] = field(default_factory=dict)
    closing: Callable[[], None] | None = None
    stream: Any = field(default=None, compare=False)

    def check(self, lengths: Mapping[str, Any]) -> dict[str, int]:
        """Return ``lengths`` as integers. Raise BadInput for a name that is not a ranged dimension, or for a length outside its
        range."""
        found = dict[str, int]()
        for name, value in lengths.items():
            if name not in self.spans:
                known = f"its lengths are {', '.join(self.spans)}" if self.spans else "all of its shapes are fixed"
                raise BadInput(f"the bound call has no length {name!r}", hint=known)
            is_number = isinstance(value, int | np.integer) and not isinstance(value, bool)
            if not is_number or not is_within(self.spans[name], int(value), self.steps.get(name, 1)):
                raise BadInput(f"{name} is {value!r}, the range is {format_spans({name: self.spans[name]}, self.steps)}")
            found[name] = int(value)
        return found


#: The specification of a model with fixed shapes.
PLAIN: Final = BindSpec()


class CallLengths:
    """The lengths of a bound call, and its states: outputs that alias inputs, from which the next run continues.

    Arrays have the greatest lengths. The program itself writes a state in ``in_place`` (``frontend.ranges.kv_cache``): one new
    row, not the whole cache. A state in ``copied`` is copied into its input after each run. Both map outputs to inputs. Elements
    past the length of an input that is written in place are zero; they are cleared when a run is shorter than the previous one.
    """

    def __init__(self, compiled: Compiled, spec: BindSpec) -> None:
        graph, self._spec, self._ranged = compiled.graph, spec, compiled.ranged
        self._tensors = {v.external or v.name: v.name for v in (*graph.inputs, *graph.outputs)}
        #: The lengths of the next run, by dimension.
        self.point: Point = {name: spec.spans[name][1] for name in (self._ranged.spans if self._ranged is not None else {})}
        self._types = {v.external or v.name: v.type for v in graph.inputs}
        found = {o: p for program in compiled.programs for o, p in state_pairs(program).items()}
        self.in_place = {o: i for o, i in spec.kept.items() if found.get(_tensor(graph.outputs, o)) == self._tensors[i]}
        self.copied = {o: i for o, i in spec.kept.items() if o not in self.in_place}
        begun = {n for p in compiled.programs for o in p.operators if any(e.before for e in o.skips) for n in o.outputs}
        copies = (f"output {o!r} is copied into input {i!r} after every run" for o, i in self.copied.items())
        whole = (o for o in self.in_place if _tensor(graph.outputs, o) not in begun)
        why = "the position of its first new element is unknown"
        written = (f"all of output {o!r} is written over input {self.in_place[o]!r} in every run: {why}" for o in whole)
        #: Notes on copies and full overwrites in each run.
        self.notes = (*copies, *written)
        self._filled = dict[str, tuple[int, ...]]()

    @property
    def numbers(self) -> dict[str, Array]:
        """The lengths of the next run as the programs' scalar inputs, by tensor."""
        scalars = self._ranged.scalars(self.point) if self._ranged is not None else {}
        return {tensor: np.array(n, np.int64) for tensor, n in scalars.items()}

    def initial_inputs(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arrays to bind, with those of states in full length. Raise BadInput for a state of another shape."""
        found = dict(given)
        for output, name in self._spec.kept.items():
            shape, dtype = self._types[name].shape, self._types[name].dtype
            self._filled[output] = shape if name in given else (0,) * len(shape)
            if name not in found:
                found[name] = np.zeros(shape, dtype)
            elif on_host(found[name]):
                found[name] = np.array(pad_array(np.asarray(found[name]), shape))
            if shape_of(found[name]) != shape:
                what = f"the state in input {name!r} has shape {list(shape)}, the array has {list(shape_of(found[name]))}"
                raise BadInput(what, hint="give a shorter host array, or an array of this shape")
        return found

    def set(self, lengths: Mapping[str, Any]) -> dict[str, Array]:
        """Set lengths for the next run; return the scalar inputs that change, by tensor. Raise BadInput for a wrong length."""
        given, before = self._spec.check(lengths), self.numbers
        if all(self.point[name] == n for name, n in given.items()):
            return {}
        self.point = {**self.point, **given}
        return {tensor: n for tensor, n in self.numbers.items() if n != before[tensor]}

    def shape(self, name: str, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of an input or output at the lengths of the next run."""
        return whole if self._ranged is None else self._ranged.shape(self._tensors[name], self.point)

    def pad(self, name: str, given: Any) -> Any:
        """Return a host array padded with zeros to its full shape."""
        if self._ranged is None or not on_host(given):
            return given
        return pad_array(np.asarray(given), self._types[name].shape)

    def crop(self, name: str, array: Array) -> Array:
        """Return the part of an output at the lengths of the last run."""
        return np.ascontiguousarray(array[tuple(map(slice, self.shape(name, array.shape)))])

    def mark_filled(self, names: Mapping[str, Any]) -> None:
        """Record that inputs were written in full length."""
        for output, name in self.in_place.items():
            if name in names:
                self._filled[output] = self._types[name].shape

    def shortened_states(self) -> Iterator[tuple[str, str]]:
        """Yield the output and the input of each state that has elements past its length in the next run. From then on, its
        elements are those of the next run."""
        for output, name in self.in_place.items() if self._ranged is not None else ():
            shape = self.shape(output, self._types[name].shape)
            if any(have > want for have, want in zip(self._filled[output], shape, strict=True)):
                yield output, name
            self._filled[output] = shape

    def cleared_state(self, name: str, current: Callable[[], Array]) -> Array:
        """Return a state's array with zeros past the length of its input. ``current`` returns its elements."""
        values = np.zeros(self._types[name].shape, self._types[name].dtype)
        shape = self.shape(name, values.shape)
        if 0 not in shape:
            box = tuple(map(slice, shape))
            values[box] = current()[box]
        return values

    def state_shape(self, name: str) -> tuple[int, ...]:
        """Return the full shape of a state's input."""
        return self._types[name].shape


def _tensor(values: tuple[Value, ...], name: str) -> str:
    return next(v.name for v in values if (v.external or v.name) == name)
