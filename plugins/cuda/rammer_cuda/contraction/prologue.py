"""The maps of a staged operand as a lambda (``rammer.codegen.products.operand_maps``)."""

from __future__ import annotations

from rammer.codegen import Operand, Text
from rammer.codegen.products import OperandMaps
from rammer.device.manifest import Binding

from rammer_cuda.dialect import CUDA


class OperandPrologue(OperandMaps):
    """The maps of one operand in CUDA C++."""

    zeros = "make_float4(0.0f, 0.0f, 0.0f, 0.0f)"

    def declare(self, text: Text, offset: int) -> None:
        """Declare the tables, ``offset`` bytes (a multiple of 16) from the start of shared memory, and one element's maps."""
        self.place_tables(text, offset)
        lines, value = self.body()
        with text.block(f"auto {self.name}maps = [&](float staged{''.join(f', int {z}' for z in self.places)})", "};"):
            text.all([*lines, f"return {value};"])

    def call(self, value: str, places: str) -> str:
        """Return a call of the lambda."""
        return f"{value} = {self.name}maps({value}{places});"


def prologue_of(name: str, operand: Operand, binding: Binding) -> OperandPrologue | None:
    """Return the writer of an operand's prologue, or None without a prologue."""
    return None if operand.prologue is None else OperandPrologue(name, operand, operand.prologue, binding, CUDA)
