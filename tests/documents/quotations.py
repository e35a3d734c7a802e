"""Quotations of the documents: the text of each one, regenerated from the program."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import click
import draw
import numpy as np
import pytest
from onnx import numpy_helper, parser

from rammer.cli.group import COMMANDS, LazyGroup
from rammer.cli.options import REGISTRIES
from rammer.compile_options import CompileOptions, Request, declaration_of, default_of, parameter_of
from rammer.compiled.segments import Compiled, ProgramSegment
from rammer.compiler.compiler import Compiler
from rammer.device.manifest import Backend, OpenOptions
from rammer.frontend.lower.contrib import FUNCTIONS, HOST_ONLY
from rammer.frontend.lower.emulated_types import DOMAIN
from rammer.frontend.lower.lowering_registry import REGISTRY
from rammer.frontend.lower.operators.gather import data_dependent
from rammer.frontend.read.reader import read_model
from rammer.frontend.read.schemas import MICROSOFT
from rammer.ir.device import MemoryLayer, VDevice
from rammer.ir.fold_rows import fold
from rammer.ir.launches import make_launches
from rammer.ir.program import RProgram, waves
from rammer.report.stage_text import STAGES
from rammer.tuning.kernel_store import KernelStore
from rammer.verify.verifier import VerifyError, verify
from rammer_testing.interface import GROUPS, MEMBERS, names_of, optional_members
from rammer_testing.nonempty import some
from rammer_testing.walkthrough import model

from rammer_ipu_sim.device import SimulatorBackend
from rammer_ipu_sim.executor import LoadedProgram
from rammer_rocm.families import OpenClKernels

ROOT = Path(__file__).parents[2]

#: An example CPU: two cores of 3 GHz with 8 lanes and 1 MiB of L2.
CPU = VDevice(
    "opencl_cpu",
    "two cores",
    2,
    (
        MemoryLayer("dram", "device", 8 << 30, 47e9),
        MemoryLayer("cache", "veu", 1 << 20, 192e9),
        MemoryLayer("register", "thread", 1024, 384e9, 32),
    ),
    flops=48e9,
    launch=3e-6,
    vector=8,
    resident=2,
)


class PaperCpu(OpenClKernels):
    """The rocm plugin's kernels for ``CPU``, without compiling or running them."""

    fingerprint = "paper"
    profiler = None


@cache
def backend(device: str) -> Backend:
    made: Any = PaperCpu(CPU) if device == "rocm" else SimulatorBackend(OpenOptions(options={"tiles": "8"}))
    return made  # type: ignore[no-any-return]


@cache
def compiled(device: str) -> Compiled:
    return Compiler(backend(device), store=KernelStore(None)).compile_model(read_model(model()), {})


def segment(device: str) -> ProgramSegment:
    (found,) = compiled(device).segments
    assert isinstance(found, ProgramSegment)
    return found


def program(device: str) -> RProgram:
    return segment(device).program


def stage(name: str, device: str = "ipu_sim") -> str:
    return fenced(STAGES[name](compiled(device), backend(device).vdevice))


#: Attention with an open length, and a recurrent layer of a long sequence.
ATTENTION = """<ir_version: 9, opset_import: ["" : 21]>
attention (float[seq,4] q, float[seq,4] k) => (float[seq,4] y) {
  t = Transpose <perm = [1,0]> (k) s = MatMul (q, t) p = Softmax <axis = -1> (s) y = MatMul (p, k) }"""
RECURRENT = """<ir_version: 9, opset_import: ["" : 21]>
recurrent (float[640,1,4] x) => (float[640,1,1,8] y) { y, h = RNN <hidden_size = 8> (x, w, r) }"""


def ranged_lines(*words: str) -> str:
    """The lines of attention's program for a range of lengths that start with one of ``words``."""
    compiler, proto = Compiler(backend("ipu_sim"), store=KernelStore(None)), parser.parse_model(ATTENTION)
    (only,) = compiler.compile_range(read_model(proto), {"q": (64, 4), "k": (64, 4)}, {"seq": (1, 64)}).programs
    return fenced("\n".join(n for n in str(only).splitlines() if " ".join(n.split()[:2]) in words or n.split()[0] in words))


def loop_lines() -> str:
    """The loop of the recurrent layer's program."""
    proto = parser.parse_model(RECURRENT)
    for name, shape in (("w", (1, 8, 4)), ("r", (1, 8, 8))):
        proto.graph.initializer.append(numpy_helper.from_array(np.ones(shape, np.float32), name))
    found = Compiler(backend("ipu_sim"), store=KernelStore(None)).compile_model(read_model(proto), {})
    (loop,) = [p for p in found.programs if p.repeat is not None]
    return fenced("\n".join(line for line in str(loop).splitlines() if line.split()[0] in ("repeat", "move")))


def fenced(text: str, language: str = "") -> str:
    return f"```{language}\n{text.rstrip()}\n```\n"


# --- quotations -------------------------------------------------------------------------------


def element_wise(layout: str = "keep") -> ProgramSegment:
    """Return the model with ``--fusion elementwise``, in which the pooling operator is separate."""
    options = CompileOptions(layout=layout, fusion="elementwise")
    (found,) = Compiler(backend("ipu_sim"), options, KernelStore(None)).compile_model(read_model(model()), {}).segments
    assert isinstance(found, ProgramSegment)
    return found


def source() -> str:
    """Return the codelet of the pooling operator without the helper functions that all codelets share."""
    text = (element_wise().kernels or {})["p"][0].source
    return fenced(text[text.index("static void rm_") :], "cpp")


def lines_of(device: str, *words: str) -> str:
    """Return the lines of a program's text that start with one of ``words``."""
    return fenced("\n".join(line for line in str(program(device)).splitlines() if line.split()[0] in words))


def moved_lines() -> str:
    """Return the storages that ``--layout nhwc`` changes."""
    before, changed = (str(element_wise(layout).program).splitlines() for layout in ("keep", "nhwc"))
    return fenced("\n".join(n for n in changed if n.split()[0] == "storage" and n not in before))


def compute_lines(*names: str) -> str:
    """The Computes of these names."""
    lines = STAGES["compute"](compiled("ipu_sim"), backend("ipu_sim").vdevice).splitlines()
    found = [line for line in lines if line.split()[0] == "compute" and line.split()[1].removesuffix(":") in names]
    return fenced("\n".join(found))


def storage_lines(*tensors: str) -> str:
    """The storages of these tensors, and their buffers."""
    found = program("ipu_sim")
    buffers = {found.storage[t].buffer for t in tensors}
    lines = [line for line in str(found).splitlines() if line.split()[0] in ("buffer", "storage")]
    names = {"buffer": buffers, "storage": set(tensors)}
    return fenced("\n".join(line for line in lines if line.split()[1].removesuffix(":") in names[line.split()[0]]))


def kernels_of(operator: str) -> str:
    """The kernels of one operator."""
    lines = STAGES["kernels"](compiled("ipu_sim"), backend("ipu_sim").vdevice).splitlines()
    first = lines.index(f"operator {operator}")
    return fenced("\n".join(lines[first : first + 1 + len(segment("ipu_sim").kernels[operator])]))


def operators_of(device: str) -> str:
    found = STAGES["tile"](compiled(device), backend(device).vdevice).splitlines()
    return fenced("\n".join(line for line in found if line.split()[0] in ("layer", "operator")))


def verified() -> str:
    return fenced(str(verify(program("ipu_sim"), backend("ipu_sim").vdevice)))


def faulty() -> str:
    """Return the verifier's message after one wait is removed from the text."""
    text = str(program("ipu_sim")).replace("wait(d>=8) y", "y", 1)
    assert text != str(program("ipu_sim"))
    with pytest.raises(VerifyError) as caught:
        verify(RProgram.parse(text))
    return fenced(str(caught.value))


def wave_table() -> str:
    lines = []
    for number, wave in enumerate(waves(program("ipu_sim"))):
        counts: dict[str, int] = {}
        for placed in wave:
            counts[placed.task.operator] = counts.get(placed.task.operator, 0) + 1
        lines.append(f"wave {number}: " + ", ".join(f"{n} tasks of {name}" for name, n in counts.items()))
    return fenced("\n".join(lines))


def superstep_table() -> str:
    values = segment("ipu_sim").constants
    chip = backend("ipu_sim").chip  # type: ignore[attr-defined]
    return fenced(LoadedProgram(program("ipu_sim"), values, chip).report())


def launch_table() -> str:
    lines = [
        f"launch {i}: {len(launch.tasks)} blocks of {launch.operator}, after {list(launch.after)}"
        for i, launch in enumerate(make_launches(program("ipu_sim")))
    ]
    return fenced("\n".join(lines))


def folded() -> str:
    text = str(fold(program("ipu_sim"), 2))
    return fenced("\n".join(line for line in text.splitlines() if line.split()[0] in ("counter", "row")))


def toy_plugin() -> str:
    text = (ROOT / "core/rammer/plugin-template/rammer_toy/__init__.py").read_text()
    assert len(text.splitlines()) <= 150
    return fenced(text, "python")


def c_plugin() -> str:
    return fenced((ROOT / "tests/c_plugin/rammer_c/__init__.py").read_text(), "python")


def toy_project() -> str:
    return fenced((ROOT / "core/rammer/plugin-template/pyproject.toml").read_text(), "toml")


def operators() -> str:
    names = {f"{domain}.{op}" if domain else op: function for (domain, op), function in REGISTRY.items() if domain != DOMAIN}
    hosted = sorted(name for name, function in names.items() if function is data_dependent)
    lowered = sorted(names.keys() - set(hosted))
    head = f"These {len(lowered)} operators become tensor expressions, and so kernels on every device:\n\n"
    tail = (
        "\n\nIn rare forms they run on the host instead: MaxPool with its Indices, a scatter of many updates,\n"
        "Dropout in training mode, operators whose operands must be constants and are not.\n"
        f"\nThese always run on the host: {', '.join(hosted)}. So does an\n"
        "operator that is not listed. Operators on the host are counted and named in the output.\n"
    )
    theirs = sorted(op for domain, op in FUNCTIONS if domain == MICROSOFT and op not in HOST_ONLY)
    count = f"\nThese {len(theirs)} of ONNX Runtime's own (`com.microsoft`)"
    functions = f"{count} are functions over those, and so on every device, too:\n\n"
    classical = sorted(op for domain, op in FUNCTIONS if domain not in ("", MICROSOFT) and op != "SVMClassifier")
    more = (
        f"\n\nSo are these {len(classical)} for classical models (`ai.onnx.ml`):\n\n{textwrap.fill(', '.join(classical), 110)}\n"
    )
    words = f"\n\nThese {len(HOST_ONLY)} of them always run on the host: {', '.join(sorted(HOST_ONLY))}."
    ours = textwrap.fill(", ".join(theirs), 110) + words
    return head + textwrap.fill(", ".join(lowered), 110) + tail + functions + ours + more


def commands() -> str:
    """Return every command with the first sentence of its help and its example."""
    group = LazyGroup()
    rows = ["| command | what it does | example |", "|---|---|---|"]
    for name in some(COMMANDS):
        command = group.get_command(click.Context(group), name)
        assert command is not None
        assert command.help, f"{name} has no help"
        text, _, example = inspect.cleandoc(command.help).partition("Example: ")
        assert example, f"{name} has no example"
        rows.append(f"| `{name}` | {text.strip().splitlines()[0]} | `{example.splitlines()[0].strip()}` |")
    return "\n".join(rows) + "\n"


def options() -> str:
    """Return every option with its help and the commands that share it."""
    group, takes = LazyGroup(), dict[tuple[str, str], list[str]]()
    for name, command in walked(group, ""):
        for given in command.params:
            if isinstance(given, click.Option) and not given.hidden:
                spelled, text = given.get_help_record(click.Context(command)) or ("", "")
                takes.setdefault((spelled, re.sub(r"\s+", " ", text)), []).append(name)
    rows = [
        f"| `{spelled.replace('|', ' or ')}` | {text.replace('|', ' or ')} | {', '.join(names)} |"
        for (spelled, text), names in takes.items()
    ]
    return "\n".join(["| option | what it does | commands |", "|---|---|---|", *rows]) + "\n"


def arguments() -> str:
    """Return the keyword parameters of ``rammer.compile`` with their defaults and help texts."""
    rows = ["| argument | default | what it does |", "|---|---|---|"]
    for entry in some(fields(Request)):
        declared, default = declaration_of(entry), default_of(entry)
        text = declared.help.replace("{names}", ", ".join(REGISTRIES[declared.listed]())) if declared.listed else declared.help
        listed = f" One of {', '.join(f'`{c}`' for c in declared.choices)}." if declared.choices else ""
        shown = f"`{default}`" if default or default == () else "none"
        rows.append(f"| `{parameter_of(entry)}` | {shown} | {text}{listed} |")
    return "\n".join(rows) + "\n"


def capabilities() -> str:
    """Return the members of a plugin's objects that have a default, with their first sentence and that of the default."""
    rows = ["| member | meaning | default |", "|---|---|---|"]
    for (kind, name), text in some(optional_members().items()):
        sentences = re.split(r"(?<=[.:]) (?=[A-Z])", text)
        default = next(s for s in sentences if "default" in s)
        rows.append(f"| `{kind}.{name}` | {sentences[0].replace('``', '`')} | {default.replace('``', '`')} |")
    return "\n".join(rows) + "\n"


def walked(group: click.Group, before: str) -> Iterator[tuple[str, click.Command]]:
    """Yield every runnable command with its words."""
    for name in some(group.list_commands(click.Context(group))):
        command = group.get_command(click.Context(group), name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from walked(command, f"{before}{name} ")
        else:
            yield before + name, command


def results() -> str:
    """Return one line per model and precision of the committed summary."""
    rows = ["| model | precision | rammer, ms | best peer, ms | which | faster by |", "|---|---|---|---|---|---|"]
    for row in draw.rows_of(draw.SUMMARY):
        cells = [row[head] for head in ("model", "precision", "rammer ms", "best peer ms", "which", "faster by")]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def interface() -> str:
    """Return the public modules with their names."""
    rows = list[str]()
    for group, modules in GROUPS.items():
        rows += ["", f"### {group}", "", "| module | names |", "|---|---|"]
        rows += [f"| `{m}` | {', '.join(f'`{n}`' for n in names_of(m))} |" for m in modules]
    rows += [
        "",
        "### Members",
        "",
        "Of these classes only the members named here. The first two are imported, of the others users",
    ]
    rows += ["are given instances.", ""]
    rows += ["| class | members |", "|---|---|"]
    rows += [f"| `{path}` | {', '.join(f'`{m}`' for m in members)} |" for path, members in MEMBERS.items()]
    return "\n".join(rows).strip() + "\n"


QUOTED: dict[str, Callable[[], str]] = {
    "graph": lambda: stage("graph"),
    "schedule": lambda: stage("schedule"),
    "computes": lambda: compute_lines("p", "d", "b", "f", "y_max", "y_exp"),
    "storages": lambda: storage_lines("p", "d", "f"),
    "operators on ipu_sim": lambda: operators_of("ipu_sim"),
    "operators on rocm": lambda: operators_of("rocm"),
    "kernels": lambda: kernels_of("d"),
    "source": source,
    "layouts": moved_lines,
    "masks": lambda: ranged_lines("compute s:", "skip", "reduce_bound"),
    "loop": loop_lines,
    "rows": lambda: lines_of("ipu_sim", "counter", "row"),
    "rows on rocm": lambda: lines_of("rocm", "counter", "row"),
    "verified": verified,
    "faulty": faulty,
    "waves": wave_table,
    "supersteps": superstep_table,
    "launches": launch_table,
    "folded": folded,
    "toy plugin": toy_plugin,
    "toy project": toy_project,
    "c plugin": c_plugin,
    "operators": operators,
    "commands": commands,
    "arguments": arguments,
    "capabilities": capabilities,
    "options": options,
    "results": results,
    "interface": interface,
}
