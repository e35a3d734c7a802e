"""Codelet text of an rKernel: a Poplar-style vertex around the emitted function."""

from __future__ import annotations

from rammer.codegen.emit import emit
from rammer.device.manifest import Binding
from rammer.ir.operator import ROperator

from rammer_ipu_sim.dialect import IPU


def codelet(operator: ROperator, binding: Binding) -> tuple[str, int]:
    """The vertex's C++ text and its bytes of scratch memory. Raises DeviceFailure as ``emit`` does."""
    function = emit(operator, binding, IPU)
    fields = []
    for number, (tensor, written) in enumerate(function.arguments):
        direction = "Output" if written else "Input"
        spelling = IPU.types[binding.types[tensor].dtype]
        fields.append(f"  poplar::{direction}<poplar::Vector<{spelling}>> p{number};  // {tensor}")
    arguments = ", ".join(f"&p{n}[0]" for n in range(len(function.arguments)))
    lines = [
        "#include <poplar/Vertex.hpp>",
        IPU.preamble + function.text,
        f"class {operator.name} : public poplar::Vertex {{",
        "public:",
        *fields,
        f"  char scratch[{max(function.scratch, 1)}];",
        "  int task;",
        "  bool compute() {",
        f"    {function.name}({arguments}, scratch, task);",
        "    return true;",
        "  }",
        "};",
    ]
    return "\n".join(lines) + "\n", function.scratch
