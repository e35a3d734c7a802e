"""Plugin extensions of the core: policies, passes and lowerings, and failures of these hooks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
import pytest
from onnx import parser
from plugin_points import DEVICE, Point

from rammer.compile_options import CompileOptions, Request
from rammer.compiler.compiler import Compiler
from rammer.device.code_hash import code_hash
from rammer.device.hooks import hookimpl
from rammer.device.loader import EXTENSIONS, Registry
from rammer.device.manifest import Binding, Device, OpenOptions
from rammer.errors import BadInput, DeviceFailure
from rammer.frontend.lower.lowering_registry import Lowering, LoweringFn
from rammer.fusion.tile_graph import TileGraph
from rammer.ir import expr as ex
from rammer.ir.compute import ComputeGraph
from rammer.ir.device import VDevice
from rammer.ir.graph import Graph
from rammer.ir.operator import ROperator
from rammer.jit.session import open_executable
from rammer.passes.pass_pipeline import ComputePass, ComputeTarget
from rammer.report.stage_text import STAGES
from rammer.runtime.executable import Executable
from rammer.schedule.baselines import Sequential
from rammer.schedule.policy import OperatorGraph, Policy, Schedule
from rammer.schedule.policy_registry import Auto, parse_policy
from rammer.schedule.wavefront import Wavefront
from rammer.tuning.kernel_store import KernelStore

import rammer_toy

MODEL = '<ir_version: 9, opset_import: ["" : 21]> m (float[4] x) => (float[4] y) { t = Abs(x) y = Relu(t) }'


@dataclass(frozen=True)
class Reluctant(Policy):
    """The sequential policy under another name."""

    name: ClassVar[str] = "reluctant"

    def __call__(self, graph: OperatorGraph, device: VDevice) -> Schedule:
        return Sequential()(graph, device)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Witness:
    """A pass that changes nothing and records the graphs."""

    seen: list[str]
    name: ClassVar[str] = "witness"

    def __call__(self, graph: Graph) -> Graph:
        self.seen.append(graph.name)
        return graph

    def __str__(self) -> str:
        return self.name


def negated(ctx: Lowering) -> None:
    """Lower Abs wrongly on purpose, which identifies the lowering."""
    axes = ctx.axes(ctx.input(0))
    ctx.emit(axes, ex.Op("neg", (ctx.load(ctx.input(0), *[a.name for a in axes]),)), into=0)


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
        return [Witness(self.seen), ComputePass("acme_computes", self._watched)]

    def _watched(self, graph: ComputeGraph, target: ComputeTarget) -> ComputeGraph:
        self.seen.append(f"{len(graph.computes)} computes for {target.device.name}")
        return replace(graph)

    @hookimpl
    def rammer_lowerings(self) -> Mapping[tuple[str, str], LoweringFn]:
        return {("", "Abs"): negated}


class OneDevice(Reluctant):
    """A policy that ``auto`` tries."""

    in_auto = True

    def __call__(self, graph: OperatorGraph, device: VDevice) -> Schedule:
        return replace(super().__call__(graph, device), stages=((),))


class ForToy:
    """A plugin that contributes for device toy only."""

    @hookimpl
    def rammer_policies(self, device: str) -> Sequence[Policy]:
        return [OneDevice()] if device == "toy" else []

    @hookimpl
    def rammer_lowerings(self, device: str) -> Mapping[tuple[str, str], LoweringFn]:
        return {("", "Abs"): negated} if device == "toy" else {}


def test_contributions_for_one_device_stay_there() -> None:
    registry = Registry([Point("extra", ForToy())])
    assert [p.name for p in registry.policies("toy")] == ["reluctant"] and [*registry.lowerings("toy")] == [("", "Abs")]
    assert not registry.policies("other") and not registry.lowerings("other") and not registry.policies()
    auto = parse_policy("auto{seconds=1}", registry.policies("toy"))
    assert isinstance(auto, Auto) and auto.others == (OneDevice(),) and str(auto) == "auto{seconds=1}"
    assert parse_policy("auto", [Reluctant()]) == Auto()
    proposed = auto.proposals(OperatorGraph({}, {}), DEVICE.open(OpenOptions()).vdevice)
    assert [type(p) for p, _ in proposed] == [Sequential, Wavefront, OneDevice]
    with pytest.raises(BadInput, match="no argument 'others'"):
        parse_policy("auto{others=1}", registry.policies("toy"))


def opened(plugin: object, policy: str = "wavefront") -> Executable:
    model: onnx.ModelProto = parser.parse_model(MODEL)
    return open_executable(
        model,
        "toy",
        Request(policy=policy),
        store=KernelStore(None),
        registry=Registry([Point("extra", plugin)]),
    )


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAMMER_CACHE", str(tmp_path))


def test_lowerings_and_passes_of_plugins_are_used() -> None:
    plugin = Extending()
    x = np.array([-2, -1, 1, 2], np.float32)
    exe = opened(plugin)
    assert exe.run({"x": x})["y"].tolist() == [2, 1, 0, 0]
    assert len(plugin.seen) > 1 and plugin.seen.count("2 computes for toy") == 1
    (special,) = exe.cache.values()
    assert "# pass acme_computes          computes 2 -> 2" in STAGES["compute"](special.compiled, exe.backend.vdevice)


class ReluctantToy(rammer_toy.ToyBackend):
    """The toy with a default policy of its own."""

    default_policy = "reluctant"


def test_a_device_has_a_default_policy() -> None:
    class Own:
        @hookimpl
        def rammer_devices(self) -> Sequence[Device]:
            return [replace(DEVICE, open=ReluctantToy)]

        @hookimpl
        def rammer_policies(self, device: str) -> Sequence[Policy]:
            return [Reluctant()] if device == "toy" else []

    model, registry = parser.parse_model(MODEL), Registry([Point("own", Own())])
    for policy, want in {"": "reluctant", "sequential": "sequential"}.items():
        exe = open_executable(model, "toy", Request(policy=policy), store=KernelStore(None), registry=registry)
        special = exe.specialise({"x": (4,)})
        assert special.compiled.programs[0].policy == want == exe.artifact(special.compiled).record["policy"]
        exe.close()
    plain = Compiler(DEVICE.open(OpenOptions()), CompileOptions(), KernelStore(None))
    assert plain.policy == Wavefront() and plain.options.policy == "wavefront"


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


def failing(hook: str, problem: BaseException | None, result: Any = None) -> object:
    """Make a plugin without a device whose ``hook`` raises ``problem``, or returns ``result``."""

    def fill(self: object) -> Any:
        if problem is not None:
            raise problem
        return result

    def fill_kernels(self: object, device: str, operator: ROperator, binding: Binding) -> Any:
        return fill(self)

    return type("Bad", (), {hook: hookimpl(fill_kernels if hook == "rammer_kernels" else fill)})()


#: A hook and an invalid return value.
WRONG: tuple[tuple[str, Any, str], ...] = (
    ("rammer_policies", ["wavefront"], "'wavefront' is not a callable with a name"),
    ("rammer_passes", [lambda graph: graph], "is not a callable with a name"),
    ("rammer_lowerings", {"Abs": negated}, "is not a function by (domain, operator)"),
    ("rammer_lowerings", [negated], "is not a mapping of functions"),
    ("rammer_kernels", ["fast"], "'fast' is not an ROperator"),
    ("rammer_kernels", 5, "TypeError: "),
    ("rammer_fusion_rules", [lambda tile, device: []], "is not a callable with a name"),
)


@pytest.mark.parametrize(
    ("hook", "problem", "result", "words"),
    [
        *((hook, kind("no"), None, f"{kind.__name__}: no") for hook in EXTENSIONS for kind in (RuntimeError, SystemExit)),
        *((hook, None, result, words) for hook, result, words in WRONG),
    ],
)
def test_a_hook_that_fails_is_named_and_the_others_go_on(
    hook: str, problem: BaseException | None, result: Any, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    good = Extending()
    points = [Point("bad", failing(hook, problem, result)), Point("extra", good)]
    registry = Registry(points)
    exe = open_executable(
        parser.parse_model(MODEL),
        "toy",
        Request(policy="reluctant"),
        store=KernelStore(None),
        registry=registry,
    )
    key = registry.extension_key()
    assert exe.run({"x": np.array([-2, -1, 1, 2], np.float32)})["y"].tolist() == [2, 1, 0, 0]
    assert good.seen and next(iter(exe.cache.values())).compiled.programs[0].policy == "reluctant"
    warnings = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert len(warnings) == 1  # once, however often the hook is called
    assert f"plugin bad fails in {hook} and is skipped there: " in warnings[0] and words in warnings[0]
    assert "RAMMER_DISABLE=bad" in warnings[0]
    # A program compiled without a failed hook has a separate cache key.
    assert re.fullmatch(r"bad=\+\w* extra=\+\w* bad!" + hook, registry.extension_key())
    assert key in (registry.extension_key().removesuffix(" bad!" + hook), registry.extension_key())


@dataclass(frozen=True)
class Rule:
    """A fusion rule with the proposals of ``propose``."""

    propose: Any
    name: ClassVar[str] = "rule"

    def __call__(self, tile: TileGraph, device: VDevice) -> Sequence[ROperator]:
        return self.propose(tile)  # type: ignore[no-any-return]


def raises(*args: object) -> Any:
    """Raise the error of a pass, a policy or a lowering that fails when called."""
    raise KeyError("not today")


@pytest.mark.parametrize(
    ("hook", "value"),
    [
        ("rammer_passes", [type("Fails", (Witness,), {"__call__": raises})([])]),
        ("rammer_policies", [type("Fails", (Reluctant,), {"__call__": raises})()]),
        ("rammer_lowerings", {("", "Abs"): raises}),
        ("rammer_fusion_rules", [Rule(raises)]),
    ],
)
def test_what_a_plugin_added_is_named_where_it_fails(hook: str, value: Any, capsys: pytest.CaptureFixture[str]) -> None:
    registry = Registry([Point("bad", failing(hook, None, value)), Point("extra", Plain())])
    policy = "reluctant" if hook == "rammer_policies" else "wavefront"
    exe = open_executable(
        parser.parse_model(MODEL),
        "toy",
        Request(policy=policy),
        store=KernelStore(None),
        registry=registry,
    )
    with pytest.raises(DeviceFailure, match="plugin bad fails: KeyError: 'not today'") as caught:
        exe.run({"x": np.zeros(4, np.float32)})
    assert caught.value.hint == "leave it out: RAMMER_DISABLE=bad"
    assert not capsys.readouterr().err


@dataclass(frozen=True)
class Breaking(Witness):
    """A pass that makes an invalid graph."""

    def __call__(self, graph: Graph) -> Graph:
        return replace(graph, nodes=graph.nodes[1:])


@dataclass(frozen=True)
class Restless(Witness):
    """A pass that never settles."""

    def __call__(self, graph: Graph) -> Graph:
        return replace(graph)


@dataclass(frozen=True)
class Forgetful(Reluctant):
    """A policy that omits tasks."""

    def __call__(self, graph: OperatorGraph, device: VDevice) -> Schedule:
        made = Sequential()(graph, device)
        return replace(made, rows=tuple(() for _ in made.rows))


def emits_nothing(ctx: Lowering) -> None:
    """Lower without emitting a result."""


@pytest.mark.parametrize(
    ("hook", "value", "words"),
    [
        ("rammer_passes", [Breaking([])], "pass: witness"),
        ("rammer_passes", [Restless([])], "pass witness still changes the graph after 16 rounds"),
        ("rammer_passes", [ComputePass("cut", lambda graph, _: replace(graph, computes=()))], "pass: cut"),
        ("rammer_passes", [ComputePass("port", lambda graph, _: replace(graph, outputs=()))], "inputs or outputs of the graph"),
        ("rammer_policies", [Forgetful()], ""),
        ("rammer_fusion_rules", [Rule(lambda tile: tile.operators)], "does not consist of several whole operators"),
        ("rammer_lowerings", {("", "Abs"): emits_nothing}, "the lowering of Abs gives None for output t"),
    ],
)
def test_what_a_plugin_made_and_cannot_be_is_the_plugins_fault(hook: str, value: Any, words: str) -> None:
    """Check that the core attributes the fault when no code of the plugin is running."""
    registry = Registry([Point("bad", failing(hook, None, value)), Point("extra", Plain())])
    request = Request(policy="reluctant" if hook == "rammer_policies" else "wavefront")
    exe = open_executable(parser.parse_model(MODEL), "toy", request, store=KernelStore(None), registry=registry)
    with pytest.raises(DeviceFailure, match="plugin bad fails: ") as caught:
        exe.run({"x": np.zeros(4, np.float32)})
    assert words in caught.value.what and caught.value.hint == "leave it out: RAMMER_DISABLE=bad"


def offering(change: Any) -> object:
    """Make a plugin that offers one candidate for every operator: ``change`` of a kernel with a single task."""

    def fill(self: object, device: str, operator: ROperator, binding: Binding) -> Any:
        return [change(replace(operator, tile=tuple(max(1, n) for n in operator.anchor.shape)))]

    return type("Bad", (), {"rammer_kernels": hookimpl(fill)})()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda o: replace(o, tile=()), "it offers the tile () for 1 axes"),
        (lambda o: replace(o, tile=(0,)), "it offers the tile (0,) for 1 axes"),
        (lambda o: replace(o, tile=(2.0,)), "it offers the tile (2.0,) for 1 axes"),
        (lambda o: o.renamed("other"), "it offers another operator than the requested one"),
        (lambda o: replace(o, family="nonsense", config=(("n", 1),)), ""),
        (lambda o: o, ""),
    ],
)
@pytest.mark.parametrize("tune", ["off", "quick"])
def test_a_candidate_that_is_none_is_passed_over(change: Any, words: str, tune: str, capsys: pytest.CaptureFixture[str]) -> None:
    registry = Registry([Point("bad", offering(change)), Point("extra", Plain())])
    request = Request(tune=tune)
    exe = open_executable(parser.parse_model(MODEL), "toy", request, store=KernelStore(None), registry=registry)
    assert exe.run({"x": np.array([-2, -1, 1, 2], np.float32)})["y"].tolist() == [2, 1, 1, 2]
    told = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert len(told) == bool(words) and all(words in line and "plugin bad fails in rammer_kernels" in line for line in told)


@pytest.mark.parametrize("hook", ["rammer_lowerings", "rammer_policies"])
def test_two_plugins_with_one_name_are_both_named(hook: str, capsys: pytest.CaptureFixture[str]) -> None:
    value = {"rammer_lowerings": {("", "Abs"): negated}, "rammer_policies": [Reluctant()]}[hook]
    registry = Registry([Point("one", failing(hook, None, value)), Point("two", failing(hook, None, value))])
    assert len(registry.lowerings() if hook == "rammer_lowerings" else registry.policies()) == 1
    assert f"plugin two fails in {hook} and is skipped there: ValueError: plugin one also has" in capsys.readouterr().err


def test_extensions_are_part_of_the_key_of_compiled_programs() -> None:
    assert re.fullmatch(r"extra=\+\w*", Registry([Point("extra", Extending())]).extension_key())
    assert Registry([Point("extra", Plain())]).extension_key() == ""


def test_an_edited_plugin_is_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check plugins with extensions and plugins with a device: cached programs of the old code are not used."""
    (tmp_path / "extending_here").mkdir()
    code, other = tmp_path / "extending_here" / "__init__.py", tmp_path / "extending_here" / "costs.py"
    code.write_text("def hook(): pass\n")
    other.write_text("COST = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = code_hash.__wrapped__(import_module("extending_here").__name__)
    other.write_text("COST = 2\n")
    after = code_hash.__wrapped__("extending_here")
    assert before and after and before != after
    opened = Registry([Point("extra", Plain())]).open("toy")
    assert opened.fingerprint.endswith(f", code {code_hash('rammer_toy')}") and code_hash("rammer_toy")
