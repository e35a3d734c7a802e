"""Programs over several chips: a memory and supersteps for each chip, and one clock synchronised by transfers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rammer.device.manifest import Array
from rammer.errors import DeviceFailure
from rammer.ir.program import Buffer, RProgram
from rammer.verify.multi_device import TRANSFER

from rammer_ipu_sim.chip import Chip
from rammer_ipu_sim.cycles import StepCycles
from rammer_ipu_sim.links import Traffic
from rammer_ipu_sim.memory import NONE, Home, HomeMemory, plan_homes

if TYPE_CHECKING:
    from rammer_ipu_sim.cycles import Accountant
    from rammer_ipu_sim.supersteps import Batch


def over_chips(program: RProgram, chip: Chip) -> bool:
    """Return True if each device of the program is a chip; False if one chip runs all devices. Raises DeviceFailure if the
    program needs more chips or tiles."""
    several = chip.chips > 1 and len(program.homes) > 1
    if several and len(program.homes) > chip.chips:
        hint = f"--option chips={len(program.homes)}"
        raise DeviceFailure(f"the program is for {len(program.homes)} devices, there are {chip.chips} chips", program.name, hint)
    rows = [0] * max(1, len(program.homes))
    moving = {o.name for o in program.operators if o.family == TRANSFER}
    for home, row in zip(program.row_homes, program.rows, strict=True):
        rows[home] += not (several and row and all(t.operator in moving for t in row))
    need = max(rows) if several else program.veus
    if need > chip.tiles:
        raise DeviceFailure(f"the program has {need} rows, the chip {chip.tiles} tiles", program.name, "fold it first")
    return several


def homes_of(buffers: Sequence[Buffer], chip: Chip, several: bool) -> dict[str, Home]:
    """Return the home of every buffer in the tiles; with ``several``, each chip is planned separately."""
    result: dict[str, Home] = {}
    for number in sorted({b.home for b in buffers}) if several else [None]:
        result |= plan_homes([b for b in buffers if number is None or b.home == number], chip.tiles)
    return result


class ChipMemories:
    """The memory of every chip, by buffer names."""

    def __init__(self, chip: Chip, homes: Mapping[str, Home], constants: Mapping[str, Array] = NONE) -> None:
        self.homes: dict[str, Home] = {}
        self._of: dict[str, HomeMemory] = {}
        for number in sorted({h.buffer.home for h in homes.values()}):
            own = {n: h for n, h in homes.items() if h.buffer.home == number}
            memory = HomeMemory(chip, own, {n: v for n, v in constants.items() if n in own})
            self.homes |= memory.homes
            self._of |= dict.fromkeys(own, memory)
        self._streamed = {n: v for n, v in constants.items() if n not in self._of}

    def read(self, name: str) -> Array:
        """Return a flat copy of a buffer."""
        return self._of[name].read(name) if name in self._of else self._streamed[name]

    def write(self, name: str, values: Array) -> None:
        """Write a buffer in its chip's memory."""
        self._of[name].write(name, values)

    def poison(self, name: str) -> None:
        """Mark a buffer's contents as invalid."""
        self._of[name].poison(name)


@dataclass(frozen=True)
class ChipStep:
    """A superstep of every chip that has tasks in it: cycles, operators, and departing transfers."""

    cycles: Mapping[int, StepCycles]
    operators: Mapping[int, tuple[str, ...]]
    transfers: tuple[str, ...]

    @property
    def slowest(self) -> StepCycles:
        """The cycles of the slowest chip."""
        return max(self.cycles.values(), key=lambda c: c.total, default=StepCycles((), 0, 0, 0, 0, 0, 0))


@dataclass
class Played:
    """The times of a simulated run, in seconds. ``whole``: the last chip has finished and the last transfer has arrived. ``busy``
    and ``steps``: compute time and supersteps of each chip. ``arrived``: arrival of each transfer."""

    whole: float = 0.0
    busy: dict[int, float] = field(default_factory=dict)
    steps: dict[int, list[StepCycles]] = field(default_factory=dict)
    arrived: dict[str, float] = field(default_factory=dict)


class ChipClock:
    """A clock of the supersteps of each chip. A chip starts a superstep after the previous one, when all transfers that its
    operators wait for have arrived. A transfer departs when its producers have finished; chips do not wait for its departure."""

    def __init__(self, program: RProgram, chip: Chip) -> None:
        self.program, self.chip = program, chip
        homes = program.row_homes
        self.first = {h: homes.index(h) for h in dict.fromkeys(homes)}
        self.chip_of = {t.operator: homes[v] for v, row in enumerate(program.rows) for t in row}
        self.moving = {o.name for o in program.operators if o.family == TRANSFER}
        feeds = {c.name: c.operator for c in program.counters}
        self.needs: dict[str, set[str]] = {}
        for row in program.rows:
            for task in row:
                self.needs.setdefault(task.operator, set()).update(feeds[w.counter] for w in task.waits)

    def step(self, batches: Sequence[Batch], accountant: Accountant, streamed: Iterable[str]) -> ChipStep:
        """Return the cycles of a superstep's batches by chip; the buffers ``streamed`` come from the host."""
        moved: dict[int, int] = {}
        for name in streamed:
            buffer = self.program.buffer[name]
            moved[buffer.home] = moved.get(buffer.home, 0) + buffer.nbytes
        of: dict[int, list[Batch]] = {}
        for b in batches:
            if b.operator.name not in self.moving:
                home = self.chip_of[b.operator.name]
                of.setdefault(home, []).append(replace(b, veus=b.veus - self.first[home]))
        cycles = {home: accountant.superstep(part, moved.get(home, 0)) for home, part in of.items()}
        names = {home: tuple(dict.fromkeys(b.operator.name for b in part)) for home, part in of.items()}
        return ChipStep(cycles, names, tuple(b.operator.name for b in batches if b.operator.name in self.moving))

    def play(self, steps: Sequence[ChipStep], runs: int = 1) -> Played:
        """Simulate ``runs`` runs in flight. The superstep or transfer with the earliest start is next; ties prefer the oldest
        run."""
        traffic, now, result = Traffic(self.chip), dict[int, float](), Played()
        flights = [Flight(self, steps) for _ in range(runs)]
        while True:
            found = [(when, k, kind, what) for k, f in enumerate(flights) for when, kind, what in f.ready(now)]
            if not found:
                break
            when, k, kind, what = min(found)
            flight = flights[k]
            if kind:
                flight.moved(what, when, traffic, result)
            else:
                flight.computed(int(what), when, now, result)
        result.whole = max([*now.values(), *result.arrived.values()], default=0.0)
        return result


class Flight:
    """A run in flight: remaining supersteps of each chip, pending transfers, and completion times."""

    def __init__(self, clock: ChipClock, steps: Sequence[ChipStep]) -> None:
        self.clock, self.done = clock, dict[str, float]()
        self.left: dict[int, list[tuple[StepCycles, tuple[str, ...]]]] = {}
        for step in reversed(steps):
            for home, cycles in step.cycles.items():
                self.left.setdefault(home, []).append((cycles, step.operators[home]))
        self.transfers = [name for step in steps for name in step.transfers]

    def ready(self, now: Mapping[int, float]) -> Iterator[tuple[float, bool, str]]:
        """Yield the earliest start of each chip's next superstep and of each transfer, by chip number or transfer name."""
        for home, left in self.left.items():
            if left:
                waits = {n for name in left[-1][1] for n in self.clock.needs[name] & self.clock.moving}
                if waits <= self.done.keys():
                    yield max([now.get(home, 0.0), *(self.done[n] for n in waits)]), False, str(home)
        for name in self.transfers:
            if self.clock.needs[name] <= self.done.keys():
                yield max([self.done[n] for n in self.clock.needs[name]], default=0.0), True, name

    def computed(self, home: int, when: float, now: dict[int, float], result: Played) -> None:
        """Execute a chip's next superstep, starting at ``when``."""
        cycles, names = self.left[home].pop()
        seconds = cycles.total / self.clock.chip.clock
        now[home] = when + seconds
        result.busy[home] = result.busy.get(home, 0.0) + seconds
        result.steps.setdefault(home, []).append(cycles)
        self.done |= {n: now[home] for n in names if all(n not in later for _, later in self.left[home])}

    def moved(self, name: str, when: float, traffic: Traffic, result: Played) -> None:
        """Send a transfer that departs at ``when``."""
        program = self.clock.program
        operator = program.operator[name]
        target = program.buffer[program.storage[operator.anchor.name].buffer].home
        arrived = traffic.carry(when, self.clock.chip_of[name], target, operator.anchor.type.nbytes)
        self.done[name] = result.arrived[name] = arrived
        self.transfers.remove(name)


def chips_report(clock: ChipClock, played: Played) -> str:
    """Return a report of each chip's work in a run and the arrival times of its transfers."""
    lines = [
        str(clock.chip),
        f"{'chip':>5} {'steps':>7} {'compute':>10} {'exchange':>10} {'sync':>8} {'stream':>10} {'busy us':>9}",
    ]
    for home, own in sorted(played.steps.items()):
        sums = [sum(getattr(c, name) for c in own) for name in ("compute", "exchange", "sync", "stream")]
        figures = " ".join(f"{v:>{w}}" for v, w in zip(sums, (10, 10, 8, 10), strict=True))
        lines.append(f"{home:>5} {len(own):>7} {figures} {played.busy[home] * 1e6:>9.1f}")
    for name, when in played.arrived.items():
        nbytes = clock.program.operator[name].anchor.type.nbytes
        lines.append(f"{name}: {nbytes} bytes from chip {clock.chip_of[name]}, there at {when * 1e6:.1f} us")
    return "\n".join([*lines, f"{played.whole * 1e6:.1f} us simulated"])
