"""Tuning: from an untiled operator to its kernels, by the cost model alone or by measurement.

Three levels. ``off`` uses the cost model; ``quick`` measures the best few candidates; ``full`` the best dozen (Welder profiles
its top 10 to 20). Measurements are stored in the kernel store, by ``Binding.key``, so equal operators are tuned once, in this
model and the next.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from math import inf

from rammer.cache.cache_keys import key_of, unit_key
from rammer.compile_options import MEASURED
from rammer.device.lazy_sequence import LazySequence
from rammer.device.manifest import Backend, Binding
from rammer.device.shared_constants import LoadedArrangements
from rammer.errors import DeviceFailure, attribute_errors
from rammer.fusion.tile_traffic import least_task_seconds
from rammer.ir.device import VDevice
from rammer.ir.operator import RKernel, ROperator
from rammer.tuning.kernel_store import KernelStore, TunedKernel
from rammer.tuning.measure_process import TaskTimer

#: Candidates retained.
KEPT = 3


@dataclass
class Tuner:
    """A tuner of operators' kernels on one backend.

    ``extra`` yields third-party candidates, which compete with the device's; ``extensions`` identifies their origin for the
    store. ``progress`` receives each operator's name when it is done. ``timer`` measures a task, by default with the backend's
    profiler."""

    backend: Backend
    store: KernelStore
    level: str = "off"
    extra: Callable[[ROperator, Binding], Sequence[ROperator]] = lambda operator, binding: ()
    extensions: str = ""
    progress: Callable[[str], None] = lambda name: None
    timer: TaskTimer | None = None
    measured: int = 0
    arrangements: LoadedArrangements = field(init=False)
    _seen: dict[str, tuple[RKernel, ...]] = field(default_factory=dict)
    _offers: dict[str, tuple[ROperator, Sequence[ROperator]]] = field(default_factory=dict)  #: By key: what was offered.
    _stored: dict[str, tuple[TunedKernel, ...]] = field(default_factory=dict)  #: Entries that ``prepare`` read.
    _firsts: dict[str, RKernel | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.arrangements = LoadedArrangements(self.backend)

    def kernels(self, operator: ROperator, binding: Binding) -> tuple[RKernel, ...]:
        """Return the kernels of ``operator``, fastest first. Raise DeviceFailure if no candidate fits."""
        sign = binding.key(operator)
        if sign not in self._seen:
            self._seen[sign] = self._find_kernels(operator, binding, sign)
        self.progress(operator.name)
        return tuple(k.made_for(operator) for k in self._seen[sign])

    def first(self, operator: ROperator, binding: Binding) -> float:
        """Return the seconds of ``first_kernel`` on all vEUs, or infinity if no candidate fits."""
        kernel = self.first_kernel(operator, binding)
        return inf if kernel is None else kernel.operator_time(self.backend.vdevice.veus)

    def first_kernel(self, operator: ROperator, binding: Binding) -> RKernel | None:
        """Return the first of ``kernels``, or None if no candidate fits. If nothing is measured, the other kernels are not
        searched."""
        sign = binding.key(operator)
        if sign not in self._firsts:
            try:
                self._firsts[sign] = self._first(operator, binding, sign) if sign not in self._seen else self._seen[sign][0]
            except DeviceFailure:
                self._firsts[sign] = None
        found = self._firsts[sign]
        return None if found is None else found.made_for(operator)

    def _first(self, operator: ROperator, binding: Binding, sign: str) -> RKernel:
        if MEASURED[self.level]:
            return self.kernels(operator, binding)[0]
        options = self.offered(operator, binding)
        self._offers[sign] = (operator, options)
        if not options:
            raise _unfitting_error(operator, self.backend.vdevice)
        best = self._best_predicted(options, binding)
        shared = self.arrangements.shared(best.operator, binding)
        return best if shared is best.operator else self._predict_kernel(shared, binding)

    @cached_property
    def guessing(self) -> Tuner:
        """A tuner of the same device that measures nothing."""
        made = replace(self, store=KernelStore(None), level="off", measured=0, _seen={}, _offers={}, _stored={}, _firsts={})
        made.arrangements = self.arrangements
        return made

    def prepare(self, operators: Sequence[ROperator], binding: Binding) -> None:
        """Let the device build all kernels that tuning ``operators`` will measure at once, if its profiler can."""
        if not MEASURED[self.level]:
            return
        pairs = list[tuple[ROperator, Binding]]()
        for operator in operators:
            sign = binding.key(operator)
            if sign in self._seen or sign in self._offers or sign in self._stored:
                continue
            cached = self.store.get(self._store_key(sign))
            if cached is not None:
                self._stored[sign] = cached
            else:
                self._offers[sign] = (operator, self.offered(operator, binding))
                pairs += [(o, binding) for o in self._select_measured(self._offers[sign][1], binding)]
        self.backend.profiler.prepare(pairs)

    def offered(self, operator: ROperator, binding: Binding) -> Sequence[ROperator]:
        own = self.backend.candidates(operator, binding)
        if any(e.before for e in operator.skips):
            return self._narrow_candidates(operator, own, binding)
        extra = [o for o in self.extra(operator, binding) if self._has_kernel(o, binding)]
        return self._rank_candidates(extra, LazySequence(own), binding) if extra else own

    def _narrow_candidates(self, operator: ROperator, own: Sequence[ROperator], binding: Binding) -> Sequence[ROperator]:
        """Return candidates of an operator that writes a few positions of an axis in a run. Their tasks have one position along
        that axis, so that all other tasks end at once. They are of the first supporting family of the device."""
        axes = {e.axis for e in operator.skips if e.before}
        axes |= {e.window.by for e in operator.skips if e.window is not None}
        for option in own[: MEASURED["full"]]:
            tile = tuple(1 if a.name in axes else n for a, n in zip(operator.anchor.axes, option.tile, strict=True))
            for narrow in (replace(option, tile=tile), replace(option, tile=tile, family="", config=())):
                if self._has_kernel(narrow, binding):
                    return [narrow]
        return own

    def _has_kernel(self, option: ROperator, binding: Binding) -> bool:
        """Return True if the device has a kernel for a third-party candidate, which may target another version of the device."""
        with attribute_errors(option):
            try:
                return bool(self.backend.kernel(option, binding).source)
            except DeviceFailure:
                return False

    def _rank_candidates(self, extra: Sequence[ROperator], own: Sequence[ROperator], binding: Binding) -> Sequence[ROperator]:
        """Merge third-party candidates with the device's. If nothing is measured, the predicted time decides. Otherwise the best
        of each third-party family is measured, and the device's candidates as without third parties."""
        veus = self.backend.vdevice.veus

        def predicted(option: ROperator) -> float:
            return self.backend.kernel(option, binding).operator_time(veus)

        if not MEASURED[self.level]:
            return LazySequence(chain(sorted((*own[:KEPT], *extra), key=predicted), own[KEPT:]))
        best = {o.family: o for o in sorted(extra, key=predicted, reverse=True)}
        return LazySequence(chain(best.values(), own, (o for o in extra if o is not best[o.family])))

    def _store_key(self, sign: str) -> str:
        return key_of(unit_key(self.backend), sign, self.level, self.extensions)

    def _find_kernels(self, operator: ROperator, binding: Binding, sign: str) -> tuple[RKernel, ...]:
        key = self._store_key(sign)
        cached = self._stored.pop(sign, None) or self.store.get(key)
        offer = self._offers.pop(sign, None)  # an equal operator may have other tensors
        options = offer[1] if offer is not None and offer[0] == operator else self.offered(operator, binding)
        known = {(o.tile, o.family, o.config) for o in self._select_measured(options, binding)} if cached else {}
        # A store only selects the best candidate; an entry that is not a candidate was never measured here.
        if cached is not None and all((t.tile, t.family, t.config) in known for t in cached):
            return tuple(self._rebuild_kernel(operator, binding, t) for t in cached)
        if not options:
            raise _unfitting_error(operator, self.backend.vdevice)
        kernels = self._measure_candidates(options, binding) if MEASURED[self.level] else self._predict_kernels(options, binding)
        if MEASURED[self.level]:
            self.store.put(key, [_to_tuned_kernel(k) for k in kernels])
        return kernels

    def _predict_kernels(self, options: Sequence[ROperator], binding: Binding) -> tuple[RKernel, ...]:
        """Return the best-predicted candidate and the cheapest per vEU (Rammer's two kinds).

        The cheapest is chosen from the next few and the device's lean candidates. A fallback is not compared with a named family,
        since their predictions differ more than their times: it took 17 us for a convolution where 4 were predicted. A candidate
        that takes little longer and shares its constants' layout with other programs is returned alone."""
        best = self._best_predicted(options, binding)
        shared = self.arrangements.shared(best.operator, binding)
        if shared is not best.operator:
            return (self._predict_kernel(shared, binding),)
        others = [o for o in options[:KEPT] if o is not best.operator and (o.family or not best.operator.family)]
        others += self._lean_candidates(best.operator, binding)
        thrifty = min((best, *(self._predict_kernel(o, binding) for o in others)), key=RKernel.busy_time)
        return (best,) if thrifty is best else (best, thrifty)

    def _best_predicted(self, options: Sequence[ROperator], binding: Binding) -> RKernel:
        """Return the kernel of the first candidate. If the vEU's memory bounds its time, which families may ignore, return the
        fastest of the first dozen."""
        first, veus = self._predict_kernel(options[0], binding), self.backend.vdevice.veus
        if first.crowded > self._least_seconds(first, binding):
            return first
        return min(
            (first, *(self._predict_kernel(o, binding) for o in options[1 : MEASURED["full"]])),
            key=lambda k: k.operator_time(veus),
        )

    def _predict_kernel(self, option: ROperator, binding: Binding) -> RKernel:
        """Return the device's kernel, whose tasks take at least the seconds that the vEU's memory needs."""
        kernel = self.backend.kernel(option, binding)
        least = self._least_seconds(kernel, binding)
        return replace(kernel, alone=max(kernel.alone, least), crowded=max(kernel.crowded, least))

    def _least_seconds(self, kernel: RKernel, binding: Binding) -> float:
        """Return the seconds in which the vEU's memory moves the operands and results of a task."""
        return least_task_seconds(kernel.operator, binding.types, self.backend.vdevice) / kernel.spread

    def _lean_candidates(self, best: ROperator, binding: Binding) -> list[ROperator]:
        """Return the candidates that occupy least of the device. They exist if the best candidate is of a named family of the
        device, and no run ends its tasks early."""
        if best.skips or not best.family:
            return []
        found = self.backend.smallest_kernel(best, binding)
        return [found] if found is not None else []

    def _select_measured(self, options: Sequence[ROperator], binding: Binding) -> list[ROperator]:
        """Return the candidates to measure."""
        first = [*options[: MEASURED[self.level]]]
        return first + [o for o in self._lean_candidates(first[0], binding) if o not in first] if first else []

    def _measure_candidates(self, options: Sequence[ROperator], binding: Binding) -> tuple[RKernel, ...]:
        profiler, timed, lost = self.backend.profiler, list[RKernel](), list[tuple[ROperator, DeviceFailure]]()
        timer = self.timer or profiler.task_time
        for option in self._select_measured(options, binding):
            kernel = self.backend.kernel(option, binding)
            try:
                alone, crowded = timer(kernel, binding)
            except DeviceFailure as problem:  # only this candidate is lost
                lost.append((option, problem))
                continue
            origin = "simulated" if self.backend.vdevice.simulated else "measured"
            resources = profiler.resources(kernel, binding)
            timed.append(replace(kernel, alone=alone, crowded=crowded, origin=origin, compiled=resources))
            self.measured += 1
        if not timed:
            raise lost[-1][1]
        for option, reason in lost:
            print(f"rammer: warning: candidate left out: {option.head()}: {reason.what}", file=sys.stderr)
        veus = self.backend.vdevice.veus
        ranked = sorted(timed, key=lambda k: k.operator_time(veus))
        thrifty = min(timed, key=RKernel.busy_time)
        return tuple(dict.fromkeys([*ranked[: KEPT - 1], thrifty]))

    def _rebuild_kernel(self, operator: ROperator, binding: Binding, tuned: TunedKernel) -> RKernel:
        tiled = replace(operator, tile=tuned.tile, family=tuned.family, config=tuned.config)
        kernel = self.backend.kernel(tiled, binding)
        return replace(kernel, alone=tuned.alone, crowded=tuned.crowded, origin=tuned.origin, compiled=tuned.resources)


def _unfitting_error(operator: ROperator, device: VDevice) -> DeviceFailure:
    layer = device.layer("veu")
    return DeviceFailure(
        f"no tile of operator {operator.name} fits {layer.capacity} bytes of {layer.name}",
        where=operator.anchor.origin,
        hint="a device with more memory per unit is needed for this model",
    )


def _to_tuned_kernel(kernel: RKernel) -> TunedKernel:
    o = kernel.operator
    return TunedKernel(o.tile, o.family, o.config, kernel.resources, kernel.alone, kernel.crowded, kernel.origin)
