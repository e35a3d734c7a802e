"""What plugins can add to the core: policies, passes and lowerings; and what happens when such a hook fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
import pytest
from onnx import parser

from rammer.device.hooks import hookimpl
from rammer.device.loader import Registry
from rammer.device.manifest import Device
from rammer.errors import BadInput, DeviceFailure
from rammer.frontend.lowering import Lowering, LoweringFn
from rammer.ir import expr as ex
from rammer.ir.device import VDevice
from rammer.ir.graph import Graph
from rammer.profile.store import KernelStore
from rammer.runtime.executable import Executable
from rammer.runtime.session import open_executable
from rammer.schedule.policy import OperatorGraph, Policy, Schedule
from rammer.schedule.sequential import Sequential

from rammer_ipu_sim.plugin import DEVICE

MODEL = '<ir_version: 9, opset_import: ["" : 21]> m (float[4] x) => (float[4] y) { t = Abs(x) y = Relu(t) }'


@dataclass(frozen=True)
class Reluctant:
    """The sequential policy under another name."""

    name: ClassVar[str] = "reluctant"

    def __call__(self, graph: OperatorGraph, device: VDevice) -> Schedule:
        return Sequential()(graph, device)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Witness:
    """A pass that changes nothing and remembers what it has seen."""

    seen: list[str]
    name: ClassVar[str] = "witness"

    def __call__(self, graph: Graph) -> Graph:
        self.seen.append(graph.name)
        return graph

    def __str__(self) -> str:
        return self.name


def negated(ctx: Lowering) -> None:
    """Abs, wrong on purpose, so that one sees who lowered it."""
    axes = ctx.axes(ctx.input(0))
    ctx.emit(axes, ex.Op("neg", (ctx.load(ctx.input(0), *[a.name for a in axes]),)), output=0)


class Extending:
    """A plugin with a device and every extension."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    @hookimpl
    def rammer_devices(self) -> Sequence[Device]:
        return [DEVICE]

    @hookimpl
    def rammer_policies(self) -> Sequence[Policy]:
        return [Reluctant()]

    @hookimpl
    def rammer_passes(self) -> Sequence[Any]:
        return [Witness(self.seen)]

    @hookimpl
    def rammer_lowerings(self) -> Mapping[tuple[str, str], LoweringFn]:
        return {("", "Abs"): negated}


class Failing:
    """A plugin whose hook raises."""

    @hookimpl
    def rammer_devices(self) -> Sequence[Device]:
        return [DEVICE]

    @hookimpl
    def rammer_passes(self) -> Sequence[Any]:
        raise RuntimeError("no passes today")


@dataclass(frozen=True)
class Point:
    """An entry point that is already loaded."""

    name: str
    plugin: object

    def load(self) -> object:
        return self.plugin


def opened(plugin: object, policy: str = "wavefront") -> Executable:
    model: onnx.ModelProto = parser.parse_model(MODEL)
    return open_executable(model, "ipu_sim", policy=policy, options={"tiles": "4"}, store=KernelStore(None),
                           registry=Registry([Point("extra", plugin)]))  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAMMER_CACHE", str(tmp_path))


def test_lowerings_and_passes_of_plugins_are_used() -> None:
    plugin = Extending()
    x = np.array([-2, -1, 1, 2], np.float32)
    assert opened(plugin).run({"x": x})["y"].tolist() == [2, 1, 0, 0]
    assert plugin.seen


def test_policies_of_plugins_are_known_by_name() -> None:
    exe = opened(Extending(), "reluctant")
    x = np.array([-2, -1, 1, 2], np.float32)
    exe.run({"x": x})
    (special,) = exe.cache.values()
    assert special.compiled.programs[0].policy == "reluctant"
    with pytest.raises(BadInput, match="unknown policy 'reluctant'"):
        opened(Plain(), "reluctant").run({"x": x})


class Plain:
    """A plugin with a device only."""

    @hookimpl
    def rammer_devices(self) -> Sequence[Device]:
        return [DEVICE]


def test_a_failing_hook_is_named() -> None:
    with pytest.raises(DeviceFailure, match="plugin extra fails in rammer_passes: no passes today") as caught:
        opened(Failing()).run({"x": np.zeros(4, np.float32)})
    assert "RAMMER_DISABLE=extra" in caught.value.hint


def test_extensions_are_part_of_the_key_of_compiled_programs() -> None:
    assert Registry([Point("extra", Extending())]).extension_key() == "extra="
    assert Registry([Point("extra", Plain())]).extension_key() == ""
