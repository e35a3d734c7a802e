"""Codelet C++: the dialect, and the text of an rKernel, a Poplar-style vertex around the emitted function."""

from __future__ import annotations

from rammer.codegen.c_target import CTarget
from rammer.codegen.dialects import BITS, STANDARD, helper_functions
from rammer.codegen.emit import emit_operator
from rammer.device.manifest import Binding
from rammer.ir.operator import ROperator

#: C++ codelet text for one worker thread of an IPU tile.
IPU = CTarget(
    name="ipu",
    function="static",
    global_="",
    local="",
    constant="static const",
    thread="0",
    threads="1",
    barrier="",
    types={**STANDARD, "float16": "half"},
    functions={
        "load:float16": "((float){p}[{i}])",
        "store:float16": "{p}[{i}] = (half)({v})",
        "round:float16": "((float)(half)({v}))",
        **BITS,
    },
    preamble="#include <cmath>\n#define RM_INF INFINITY\n#define RM_NAN NAN\n"
    + helper_functions("static inline", STANDARD, overloaded=False),
    restrict="__restrict__",
)


def emit_codelet(operator: ROperator, binding: Binding) -> tuple[str, int]:
    """Return the vertex's C++ text and its bytes of scratch memory. Raises DeviceFailure as ``emit_operator`` does."""
    function = emit_operator(operator, binding, IPU)
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
