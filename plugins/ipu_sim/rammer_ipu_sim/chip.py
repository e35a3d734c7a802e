"""The simulated chip as data: every figure with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rammer.device.manifest import Hardware, OpenOptions, Option
from rammer.errors import BadInput
from rammer.ir.device import MemoryLayer, VDevice

#: The source of each figure of ``Chip``.
SOURCES: Mapping[str, str] = {
    "tiles": "arXiv 1912.03413, section 1: 1,216 tiles",
    "sram": "arXiv 1912.03413, section 1: 256 KiB of local memory a tile, 304 MiB a chip",
    "threads": "arXiv 1912.03413, section 1: 6 threads a tile, issued in turn",
    "clock": "arXiv 1912.03413, section 1: 1.6 GHz",
    "matrix_flops": "arXiv 1912.03413: 31.1 TFLOP/s fp32 peak / (1,216 tiles x 1.6 GHz) = 16 FLOP a "
    "cycle, by the accumulating matrix product unit only",
    "vector_flops": "tile instruction set: one issue a cycle over 64-bit vectors, so two fp32 lanes",
    "local_bytes": "arXiv 1912.03413: 45 TB/s aggregate / (1,216 tiles x 1.6 GHz) = 23 bytes a cycle",
    "exchange_bytes": "Graphcore poplibs (exchangeBytesPerCycle = 4); 4 B x 1.6 GHz x 1,216 = "
    "7.8 TB/s, the vendor's '8 TB/s IPU-Exchange'",
    "sync_cycles": "Graphcore poplibs' IPU model, globalSyncCycles = 500: an upper bound for one chip",
    "launch_cycles": "assumed: 6 cycles a thread to start 6 workers, once round the issue slots",
    "chips": "as asked for; how they are joined: Graphcore poplibs' IPU model of GC2, addGlobalExchangeConstraints",
    "link_bytes": "Graphcore poplibs' IPU model of GC2: links of 128 Gibit/s one way, 0.85 of it reached",
    "hop_seconds": "Graphcore poplibs' IPU model of GC2, setGlobalSyncLatency: 15 ns a hop, each way",
    "host_bytes": "PCIe 4.0 x16 (GC2 launch data), one way: 16 GT/s x 16 lanes x 128/130 / 8 = 31.5 GB/s",
}


@dataclass(frozen=True, slots=True)
class Chip:
    """A bulk-synchronous chip of equal tiles. Rates are per tile and cycle unless stated otherwise.

    ``tiles``: number; ``sram``: bytes per tile; ``threads``: hardware threads per tile; ``clock``: Hz; ``matrix_flops``: FLOP of
    contractions; ``vector_flops``: FLOP of other operations; ``local_bytes``: bytes to and from local memory; ``exchange_bytes``:
    bytes received, and also sent, over the exchange; ``sync_cycles``: one chip-wide barrier; ``launch_cycles``: starting one
    task; ``host_bytes``: bytes per second from host memory to the whole chip. ``chips``: number of chips; ``link_bytes``: bytes
    per second of one link between two chips, one way; ``hop_seconds``: signal latency from chip to chip. Sources: ``SOURCES``.
    """

    name: str = "GC2"
    tiles: int = 1216
    sram: int = 256 * 1024
    threads: int = 6
    clock: float = 1.6e9
    matrix_flops: int = 16
    vector_flops: int = 2
    local_bytes: float = 45e12 / (1216 * 1.6e9)
    exchange_bytes: int = 4
    sync_cycles: int = 500
    launch_cycles: int = 36
    host_bytes: float = 16e9 * 16 * 128 / 130 / 8
    chips: int = 1
    link_bytes: float = 128 * 2**30 / 8 * 0.85
    hop_seconds: float = 15e-9

    def __str__(self) -> str:
        size = f"{self.tiles} tiles x {self.sram / 1024:g} KiB"
        count = f"{self.chips} x " if self.chips > 1 else ""
        return f"{count}{self.name}, {size} at {self.clock / 1e9:g} GHz (simulated)"

    @property
    def one(self) -> str:
        """The name of one chip among all chips."""
        return f"{replace(self, chips=1)}{f', one of {self.chips} chips' if self.chips > 1 else ''}"


GC2 = Chip()

#: Maximum number of chips that are simulated at once.
MOST_CHIPS = 64
#: Maximum tiles of a chip, and bytes of a tile: tables have one row per tile.
MOST_TILES, MOST_SRAM = 1 << 16, 1 << 40
#: The options of the device.
TILES = Option("tiles", GC2.tiles, "Tiles of a chip.", least=1, most=MOST_TILES)
SRAM = Option("sram", GC2.sram, "Bytes of a tile, a multiple of 8.", least=1, most=MOST_SRAM)
CHIPS = Option("chips", 1, "Chips that run one model together.", least=1, most=MOST_CHIPS)
NO_STREAM = Option("no_stream", False, "Refuse programs whose constants do not fit in the tiles.")
OPTIONS = (TILES, SRAM, CHIPS, NO_STREAM)
#: Fraction of a tile's memory that one task may use; the rest holds the homes of the program's buffers.
TASK_SHARE = 0.5


def configure_chip(options: Mapping[str, str], base: Chip = GC2) -> Chip:
    """Return ``base`` with the values of its options. Raises BadInput for a malformed value."""
    given = OpenOptions(options=options)
    values = {o.name: given.value(o) for o in (TILES, SRAM, CHIPS) if o.name in options}
    if values.get("sram", 8) % 8:
        raise BadInput(f"option sram={options['sram']}: not a multiple of 8 bytes", "ipu_sim")
    if not values:
        return base
    name = f"{base.name} variant" if values.keys() & {"tiles", "sram"} else base.name
    return replace(base, name=name, **values)


def make_vdevice(chip: Chip) -> VDevice:
    """Return the chip as the compiler's device: one vEU per tile, homes in remote tiles, tasks in local memory."""
    total = chip.tiles * chip.clock
    homes = int(chip.tiles * chip.sram * (1 - TASK_SHARE))
    exchange, local = chip.exchange_bytes * total, chip.local_bytes * total
    layers = (
        MemoryLayer("host", "host", 0, chip.host_bytes, 64, SOURCES["host_bytes"]),
        MemoryLayer("remote", "device", homes, exchange, 4, SOURCES["exchange_bytes"], lone=1.0),
        MemoryLayer("local", "veu", int(chip.sram * TASK_SHARE), local, 8, SOURCES["local_bytes"]),
    )
    return VDevice(
        name="ipu_sim",
        description=chip.one,
        veus=chip.tiles,
        layers=layers,
        flops=chip.matrix_flops * chip.clock,
        map_flops=chip.vector_flops * chip.clock,
        launch=2 * chip.sync_cycles / chip.clock,
        dispatch=chip.launch_cycles / chip.clock,
        threads=chip.threads,
        vector=2,
        resident=chip.tiles,
        staged=True,
        simulated=True,
        source=SOURCES["matrix_flops"],
        precisions=("float32", "float16"),
    )


def make_hardware(chip: Chip = GC2) -> Hardware:
    """Return the simulated hardware, which has no physical counterpart."""
    return Hardware(0, chip.one, "simulator", chip.tiles * chip.sram, dict(SOURCES))
