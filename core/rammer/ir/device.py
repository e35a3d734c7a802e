"""VDevice: the compiler's description of hardware, as data. The core has no other information about a device."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final, TypeAlias

from rammer.ir.names import is_identifier

__all__ = ["MemoryLayer", "Scope", "VDevice"]

#: The sharers of one instance of a memory layer: one of ``SCOPES``, or a group of vEUs that the device names (a cluster).
Scope: TypeAlias = str
#: The scopes that every device may have, from the largest and slowest memory: the host and all devices, one device, one vEU, one
#: thread. Groups of vEUs stand between "device" and "veu".
SCOPES: Final[tuple[Scope, ...]] = ("host", "device", "veu", "thread")


@dataclass(frozen=True, slots=True)
class MemoryLayer:
    """A layer of the memory hierarchy (Welder, section 3); layers are ordered from lowest (largest, slowest).

    ``capacity`` is the bytes of one instance (0 = not modelled). ``bandwidth`` is the bytes per second that the whole device
    moves between this layer and the next higher one. ``transaction`` is the bytes of one coalesced access. ``lone`` is the
    bandwidth of one busy vEU on an idle device, as a multiple of its fair share: few cores saturate a memory controller.
    ``sharers`` is the number of vEUs that share one instance, of a layer whose scope the device names (else 0). A task may hold
    tiles in its equal share of it."""

    name: str
    scope: Scope
    capacity: int
    bandwidth: float
    transaction: int = 64
    source: str = ""
    lone: float = 4.0
    sharers: int = 0

    @property
    def share(self) -> int:
        """The bytes of one instance that one task may use (0 = not modelled)."""
        return self.capacity // max(self.sharers, 1)


@dataclass(frozen=True, slots=True)
class VDevice:
    """A virtual parallel device (Rammer, section 3.2): ``veus`` equal units over shared memory layers.

    - ``flops``: fp32 peak of one vEU (FLOP/s). ``map_flops``: that of operations outside products (0: the same).
    - ``launch``: seconds of one wave boundary. ``dispatch``: seconds to start one more task on a vEU.
    - ``threads``: hardware threads that cooperate on one task (1 for a CPU core). ``vector``: fp32 lanes of one thread.
    - ``resident``: number of vEUs guaranteed to run at once, the limit for spinning on counters.
    - ``staged``: a task can address only its vEU's memory: all its operands count towards the footprint, and arrive before it
      starts. Fewer elements than ``threads`` leave threads idle.
    - ``few_rows``: a product of constant weights is bound by their bytes if at most this many results share each weight. The
      device's kernels combine these products.
    - ``precisions``: those that a user may select (``rammer.compile_options``).
    - ``spills``: data of a task beyond its vEU's memory are stored in device memory, since on-chip memory is a cache.
    - ``dots``: peak of one vEU for products of bytes with 32-bit sums, in multiplications and additions per second. It is 0
      without an instruction for them.
    - ``doubt``: standard deviation between the predicted and the measured fraction of time that fusion saves. An operator with a
      smaller predicted gain may be slower.
    - ``start``: seconds of an operator's time that operators in one launch share.
    - ``sort_steps``: comparisons of the longest sort that runs on the device if its length is fixed. The host, which has the
      device's memory, is faster at longer sorts (0: at none).
    - ``channels``: values of float16 that its kernels read together. Images with fewer channels are padded to this number.
    - ``simulated``: times are never ranked with measured ones.
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
    map_flops: float = 0.0
    sort_steps: int = 0
    channels: int = 1

    def __post_init__(self) -> None:
        if self.veus < 1:
            raise ValueError(f"device {self.name}: needs at least one vEU, got {self.veus}")
        if not any(layer.scope == "device" for layer in self.layers):
            raise ValueError(f"device {self.name}: no memory layer has scope 'device'")
        if not any(layer.scope == "veu" for layer in self.layers):
            raise ValueError(f"device {self.name}: no memory layer has scope 'veu'")
        scopes = [layer.scope for layer in self.layers]
        between, known = [m for m in self.layers if m.scope not in SCOPES], [s for s in SCOPES if s in scopes]
        order = [*known[: known.index("veu")], *(m.scope for m in between), *known[known.index("veu") :]]
        if scopes != order or len(set(scopes)) < len(scopes):
            raise ValueError(
                f"device {self.name}: layers have the scopes {scopes}; those of {SCOPES} stand in order, others between 'device' "
                "and 'veu', each once"
            )
        for m in between:
            if not is_identifier(m.scope) or not 1 < m.sharers <= self.veus:
                raise ValueError(f"device {self.name}: {m.sharers} of {self.veus} vEUs share a layer of the scope {m.scope!r}")
        if any(one.sharers <= two.sharers for one, two in pairwise(between)):
            raise ValueError(f"device {self.name}: of {[m.scope for m in between]}, a later one is not shared by fewer vEUs")
        if any(m.sharers for m in self.layers if m.scope in SCOPES):
            raise ValueError(f"device {self.name}: only layers between 'device' and 'veu' have sharers, one of {SCOPES} has some")

    def layer(self, scope: Scope) -> MemoryLayer:
        """Return the highest layer of ``scope``; for "thread", devices without a register layer use the vEU layer."""
        for layer in reversed(self.layers):
            if layer.scope == scope:
                return layer
        if scope == "thread":
            return self.layer("veu")
        raise KeyError(f"device {self.name} has no memory layer of scope {scope!r}")

    @property
    def tile_layers(self) -> tuple[MemoryLayer, ...]:
        """The layers that hold tiles of a task, from the highest: that of the vEU, and those between it and the device's."""
        return tuple(m for m in reversed(self.layers) if m.scope not in ("host", "device", "thread"))

    def __str__(self) -> str:
        layers = " -> ".join(f"{m.name}<{m.scope}> {m.capacity}B {m.bandwidth / 1e9:.4g}GB/s" for m in self.layers)
        return f"vdevice {self.name}: {self.veus} vEUs x {self.flops / 1e9:.4g} GFLOP/s, {layers}"
