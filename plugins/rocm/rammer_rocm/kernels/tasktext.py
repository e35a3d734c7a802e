"""Common parts of writers of CPU task functions: text, tensor pointers, and the finished function."""

from __future__ import annotations

from rammer.codegen import Argument, Packing, Text, hash_of
from rammer.codegen.c_target import head_of
from rammer.device.manifest import Binding

from rammer_rocm.kernels.generic import CPU_DIALECT
from rammer_rocm.kernels.task import TaskFunction


class TaskText:
    """A task function under construction, with vectors of ``lanes``."""

    def __init__(self, binding: Binding, lanes: int) -> None:
        self.binding, self.lanes, self.text = binding, lanes, Text()
        self.arguments: dict[tuple[str, str], Argument] = {}

    def finished(self, family: str, scratch: int, helpers: str = "", stops: bool = False) -> TaskFunction:
        """Return the finished function with the written text."""
        arguments = tuple(self.arguments.values())
        types = tuple(CPU_DIALECT.types[self.stored(a.tensor, a.packing)] for a in arguments)
        pointers = [(t, a.written) for t, a in zip(types, arguments, strict=True)]
        body = f" {{\n{self.text}}}\n"
        name = f"{family}_" + hash_of(head_of(CPU_DIALECT, "", pointers) + body)
        text = head_of(CPU_DIALECT, name, pointers) + body
        return TaskFunction(name, text, arguments, types, scratch, helpers, stops=stops)

    def stored(self, tensor: str, packed: Packing | None = None) -> str:
        """Return the in-memory element type of a tensor, or of its packed form."""
        return packed.dtype if packed else self.binding.types[tensor].dtype

    def pointer(self, tensor: str, written: bool = False, packed: Packing | None = None) -> str:
        """Return the name of the parameter for ``tensor``."""
        key = (tensor, packed.key if packed else "")
        self.arguments.setdefault(key, Argument(tensor, written, packed))
        return f"p{list(self.arguments).index(key)}"
