"""VDevice: what the compiler knows about hardware, as data. The core has no other knowledge of a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["MemoryLayer", "Scope", "VDevice"]

#: Who shares one instance of a memory layer: the host and all devices, one device, one vEU, one thread.
Scope: TypeAlias = Literal["host", "device", "veu", "thread"]


@dataclass(frozen=True, slots=True)
class MemoryLayer:
    """One layer of the memory hierarchy (Welder, section 3): lowest (largest, slowest) first.

    ``capacity`` is bytes of one instance (0 = not modelled); ``bandwidth`` bytes per second of the
    whole device moving into this layer from the one below; ``transaction`` the bytes of one coalesced
    access.
    """

    name: str
    scope: Scope
    capacity: int
    bandwidth: float
    transaction: int = 64
    source: str = ""


@dataclass(frozen=True, slots=True)
class VDevice:
    """A virtual parallel device (Rammer, section 3.2): ``veus`` equal units over shared memory layers.

    ``flops`` is the fp32 peak of one vEU (FLOP/s); ``launch`` the seconds of one wave boundary,
    ``dispatch`` those of starting one more task on a vEU;
    ``threads`` how many hardware threads cooperate on one task (1 for a CPU core); ``vector`` how many fp32 lanes
    one of them has; ``resident`` how many vEUs are guaranteed to run at once (spinning on counters is
    legal only up to it). On a ``staged`` device a task can address nothing but its vEU's memory, so
    everything it reads counts towards the footprint.
    A product of constant weights each of which at most ``few_rows`` results share is bound by its weights' bytes: the
    device's kernels take such products together, side by side.
    ``precisions`` are those that a user may ask for (``rammer.compiler.compile_options``).
    On one that ``spills``, what a task keeps beyond its vEU's memory lies in the device's: on chip it was in a cache.
    ``dots`` is the peak of one vEU for products of bytes summed in 32 bits, where it has an instruction for them
    (multiplications and additions a second; 0: none).
    ``doubt`` is the standard deviation of the predicted share of time that an operator saves beside its parts from the measured
    one: what is predicted to save less may be slower.
    ``start`` are the seconds of what an operator takes alone that it shares with others in one launch.
    ``simulated`` devices never have their times ranked with measured ones.
    """

    name: str
    description: str
    veus: int
    layers: tuple[MemoryLayer, ...]
    flops: float
    launch: float
    dispatch: float = 0.0
    threads: int = 1
    vector: int = 1
    resident: int = 0
    staged: bool = False
    simulated: bool = False
    source: str = ""
    precisions: tuple[str, ...] = ("float32",)
    few_rows: int = 8
    dots: float = 0.0
    spills: bool = False
    doubt: float = 0.0
    start: float = 0.0

    def __post_init__(self) -> None:
        if self.veus < 1:
            raise ValueError(f"device {self.name}: needs at least one vEU, got {self.veus}")
        if not any(layer.scope == "device" for layer in self.layers):
            raise ValueError(f"device {self.name}: no memory layer has scope 'device'")
        if not any(layer.scope == "veu" for layer in self.layers):
            raise ValueError(f"device {self.name}: no memory layer has scope 'veu'")

    def layer(self, scope: Scope) -> MemoryLayer:
        """The highest layer of ``scope``; a device without registers of its own uses its vEU layer."""
        for layer in reversed(self.layers):
            if layer.scope == scope:
                return layer
        if scope == "thread":
            return self.layer("veu")
        raise KeyError(f"device {self.name} has no memory layer of scope {scope!r}")

    def __str__(self) -> str:
        layers = " -> ".join(f"{m.name}<{m.scope}> {m.capacity}B {m.bandwidth / 1e9:.4g}GB/s" for m in self.layers)
        return f"vdevice {self.name}: {self.veus} vEUs x {self.flops / 1e9:.4g} GFLOP/s, {layers}"
