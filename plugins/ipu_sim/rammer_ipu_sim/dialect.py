"""Codelet C++ as a dialect."""

from __future__ import annotations

from rammer.codegen.dialects import BITS, STANDARD, helpers
from rammer.codegen.target import CTarget

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
    + helpers("static inline", STANDARD, overloaded=False),
    restrict="__restrict__",
)
