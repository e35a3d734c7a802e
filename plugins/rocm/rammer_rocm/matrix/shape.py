"""The group of waves that computes a task's tile: its sizes, from a tile and an operator's config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rammer.codegen import Unsuited

from rammer_rocm.matrix.matrix_instruction import DEPTH, THREADS, MatrixInstruction

#: Groups that a unit should hold, so that one multiplies while another waits at a barrier.
RESIDENT = 2
#: Registers of a lane besides sums, fragments and copies: addresses and the epilogue.
OTHERS = 64


@dataclass(frozen=True, slots=True)
class MatrixShape:
    """A group of ``high x wide`` waves, each with ``tm x tn`` fragments. A step has ``bk`` products. ``split_k`` groups share a
    sum."""

    instruction: MatrixInstruction
    tm: int
    tn: int
    high: int
    wide: int
    bk: int
    split_k: int

    @property
    def bm(self) -> int:
        """The rows of the tile, padding included."""
        return self.high * self.tm * self.instruction.side

    @property
    def bn(self) -> int:
        """The columns of the tile, padding included."""
        return self.wide * self.tn * self.instruction.side

    @property
    def waves(self) -> int:
        """The waves that multiply."""
        return self.high * self.wide

    @property
    def band(self) -> int:
        """The rows that the epilogue writes to local memory at a time: one fragment of every wave."""
        return self.high * self.instruction.side

    @property
    def local(self) -> int:
        """Bytes of local memory: two buffers of both operands, or a band of sums."""
        return max(2 * (self.bm + self.bn) * self.bk * self.instruction.item, 4 * self.band * self.bn)

    @property
    def registers(self) -> int:
        """The estimated registers of a lane: sums, fragments of two steps with all their addresses, copies of the next block, and
        others. The compiler computes addresses once a task, so each takes a register."""
        i = self.instruction
        fragment, addresses = DEPTH // i.groups // 2, 4 * self.bk // DEPTH // i.groups
        copies = -(-(self.bm + self.bn) * self.bk * i.source // (4 * THREADS))
        return self.tm * self.tn * i.sums + 2 * (self.tm + self.tn) * fragment + addresses + copies + OTHERS

    def resident(self, shared: int) -> int:
        """Return the groups that a unit with ``shared`` bytes of local memory holds, at most ``RESIDENT``."""
        i = self.instruction
        waves = -(-i.waves // i.simds)
        return min(RESIDENT, shared // self.local, i.registers // (waves * self.registers))

    def room(self, shared: int) -> int:
        """Return the registers that a lane may have so that a unit holds ``resident`` groups."""
        i = self.instruction
        return min(i.most, i.registers // (-(-i.waves // i.simds) * self.resident(shared)))

    def check(self, shared: int) -> None:
        """Raise Unsuited if the shape is impossible on a unit with ``shared`` bytes of local memory."""
        i = self.instruction
        if not 0 < self.waves <= i.waves or self.bk % DEPTH or self.registers > i.most or self.resident(shared) < 1:
            raise Unsuited(f"{self.waves} waves of {self.registers} registers, {self.local} bytes of local memory")
        if any(n not in (1, 2, 4) for n in (self.tm, self.tn)) or self.bk & (self.bk - 1):
            raise Unsuited(f"fragments {self.tm} x {self.tn}, blocks of {self.bk}")


def shape_of(i: MatrixInstruction, rows: int, width: int, config: Mapping[str, int]) -> MatrixShape:
    """Return the shape of a task of ``rows x width`` under an operator's config."""
    tm, tn = config.get("tm", 1), config.get("tn", 1)
    high, wide = -(-rows // (i.side * tm)), -(-width // (i.side * tn))
    return MatrixShape(i, tm, tn, high, wide, config.get("bk", 32), config.get("split_k", 1))
