"""The frame of GPU families whose work-items each compute elements: parameters, task origins, the finished function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from rammer.codegen import Argument, Block, FunctionContext, Place, Text, hash_of, spell_type, split_digits
from rammer.codegen.c_target import head_of
from rammer.device.manifest import Binding
from rammer.ir.compute import Compute
from rammer.ir.expr import Interval, Load, Ref, integer
from rammer.ir.operator import ROperator

from rammer_rocm.dialect import GPU_DIALECT
from rammer_rocm.kernels.task import TaskFunction

#: The wait for earlier kernels in shared writers: launches of OpenCL begin when those before them have ended.
_WAIT: Final = "#define rm_after()\n"


class GroupFrame:
    """A function under construction (the core's ``products.strips.Frame``): ``p0, p1, ...`` point at inputs, then at outputs."""

    def __init__(self, operator: ROperator, binding: Binding, inlined: Mapping[str, Compute], threads: int) -> None:
        self.operator, self.binding, self.threads = operator, binding, threads
        tensors = [(n, False) for n in operator.inputs] + [(n, True) for n in operator.outputs]
        self.arguments = tuple(Argument(n, written) for n, written in tensors)
        self.places = {a.tensor: place_of(a.tensor, f"p{k}", binding) for k, a in enumerate(self.arguments)}
        ranges: dict[str, Interval] = {}
        self.unit = FunctionContext(GPU_DIALECT, binding.types, dict(inlined), self.places, ranges)
        self.block = Block(self.unit)
        self.line("const int tid = rm_item();")
        places = zip(split_digits("task", operator.grid), operator.tile, operator.grid, strict=True)
        for d, (place, tile, count) in enumerate(places):
            self.line(f"const int o{d} = {'0' if count == 1 else f'{place} * {tile}'};")
            ranges[f"o{d}"] = (0, (count - 1) * tile)

    def line(self, text: str) -> None:
        """Write one statement to the function."""
        self.block.line(text)

    def variable(self, name: str, text: str, extent: int) -> Ref:
        """Define an integer variable in ``[0, extent)``."""
        self.line(f"const int {name} = {text};")
        self.unit.ranges[name] = (0, max(extent - 1, 0))
        return Ref(name)

    def constants(self, loads: Sequence[Load]) -> list[Load]:
        """Return the ``loads`` that read values known at compile time."""
        return [ld for ld in loads if ld.tensor in self.binding.constants]

    def kernel(self, prefix: str) -> TaskFunction:
        """Return the finished function; its name is ``prefix`` and a hash of the text."""
        types = tuple(spell_type(GPU_DIALECT, self.binding.types[a.tensor].dtype) for a in self.arguments)
        text = Text()
        text.all(line.lstrip() for line in self.block.lines)
        head = head_of(GPU_DIALECT, "@", [(t, a.written) for t, a in zip(types, self.arguments, strict=True)])
        tables = "".join(self.unit.tables.values())
        name = prefix + hash_of(f"{tables}{head}{text}")
        whole = f"{tables}{head.replace('@', name)} {{\n{text}}}\n"
        return TaskFunction(name, whole, self.arguments, types, 0, _WAIT, threads=self.threads)


def place_of(tensor: str, pointer: str, binding: Binding) -> Place:
    """Return the storage of the tensor that begins at ``pointer``."""
    kind = binding.types[tensor]
    zeros = (integer(0),) * len(kind.shape)
    return Place(pointer, kind.dtype, binding.storages[tensor].strides, zeros, kind.shape)
