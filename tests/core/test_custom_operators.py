"""Operators declared by plugins: no pass confuses one with an ONNX operator of equal name, and errors name the faulty party."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import defs, parser

from rammer.compile_options import Request
from rammer.compiled.artifact import save_artifact
from rammer.compiled.artifact_reader import load_artifact
from rammer.device.custom_operators import CustomOperator, Use
from rammer.device.hooks import hookimpl
from rammer.device.loader import Registry
from rammer.errors import BadInput, DeviceFailure
from rammer.frontend.bind.binder import bind
from rammer.frontend.lower.graph_lowering import lower
from rammer.frontend.lower.lowering_registry import REGISTRY, Lowering
from rammer.frontend.read.reader import read_model
from rammer.ir import expr as ex
from rammer.ir.evaluate import run_graph
from rammer.ir.types import TensorType
from rammer.jit.session import open_executable
from rammer.passes.graph.convert_to_float16 import ConvertToFloat16
from rammer.passes.pass_pipeline import Pipeline, default_passes
from rammer.runtime.executable import Executable
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.conformance import registry_of

import rammer_toy

X = np.array([[-1.5, 0.25, 2], [3, -0.5, 1]], np.float32)


def same(use: Use) -> list[TensorType | None]:
    """Infer one result of the first operand's type."""
    return [use.inputs[0]]


def tripled(ctx: Lowering) -> None:
    """Lower to ``3 x + 1``, which no operator of ONNX computes."""
    axes = ctx.axes(ctx.input(0))
    x = ctx.load(ctx.input(0), *[a.name for a in axes])
    ctx.emit(axes, ex.Op("add", (ex.Op("mul", (x, ex.Const(3.0))), ex.Const(1.0))), into=0)


def softsign(ctx: Lowering) -> None:
    """Lower the operator of another plugin."""
    tripled(ctx)


def by_numpy(attributes: Mapping[str, Any], operands: Sequence[Any]) -> list[Any]:
    """Compute ``3 x + 1`` with NumPy."""
    return [3 * operands[0] + 1]


F = CustomOperator("acme", "F", same)
DEVICES = list(registry_of(*rammer_toy.rammer_devices()).points or ())


@dataclass(frozen=True)
class Point:
    """An entry point that is already loaded."""

    name: str
    plugin: object

    def load(self) -> object:
        return self.plugin


def plugin(
    operators: Sequence[CustomOperator] | None, lowerings: Mapping[tuple[str, str], Callable[[Lowering], None]] | None = None
) -> Any:
    """Make a plugin without a device."""
    made = {}
    if operators is not None:
        made["rammer_operators"] = hookimpl(lambda self: operators)
    if lowerings is not None:
        made["rammer_lowerings"] = hookimpl(lambda self: lowerings)
    return type("Plugin", (), made)()


def registry(*plugins: object) -> Registry:
    """Make a registry of the toy device and these plugins: one, two, ..."""
    names = ("one", "two", "six")
    return Registry([*DEVICES, *map(Point, names, plugins)])


def text(
    body: str, head: str = "float[2,3] x", result: str = "float[2,3] y", opset: int = 21, imports: str = '"acme" : 1'
) -> str:
    return f'<ir_version: 8, opset_import: ["" : {opset}, {imports}]> m ({head}) => ({result}) {{ {body} }}'


def opened(model: str, plugins: Registry, **more: Any) -> Executable:
    return open_executable(parser.parse_model(model), "toy", Request(**more), store=KernelStore(None), registry=plugins)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAMMER_CACHE", str(tmp_path))


# --- names ------------------------------------------------------------------------------------------

#: Every operator's name, and further names that occur in passes.
NAMES = sorted({s.name for s in defs.get_all_schemas_with_history() if not s.domain})
#: A chain that alternates ONNX operators of all kinds with the plugin's.
CHAIN = """{op}_a = acme.{op}(x)  {op}_b = MatMul({op}_a, w)  {op}_c = acme.{op}({op}_b)  {op}_d = Mul({op}_c, k)
    {op}_e = acme.{op}({op}_d)  {op}_f = Reshape({op}_e, s)  {op}_g = acme.{op}({op}_f)  {op}_h = Transpose({op}_g)
    {op}_i = acme.{op}({op}_h)  {op}_j = Add({op}_i, {op}_i)  {op}_y = acme.{op}({op}_j)"""
CONSTANTS = "float[3,3] w = {1,0,2,-1,1,0,0.5,0,1}, float[1] k = {1}, int64[2] s = {3,2}"


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("opset", [9, 21])
def test_no_step_takes_an_operator_for_onnxs_of_its_name(opset: int) -> None:
    w = np.array([[1, 0, 2], [-1, 1, 0], [0.5, 0, 1]], np.float32)
    t = 3 * X + 1
    t = 3 * (t @ w) + 1
    t = 3 * t + 1
    t = 3 * t.reshape(3, 2) + 1
    t = 3 * t.T + 1
    want = 3 * (2 * t) + 1
    assert len(NAMES) > 180
    results = ", ".join(f"float {op}_y" for op in NAMES)
    proto = parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : {opset}, "acme" : 1]> m (float[2,3] x) => ({results}, float old) <{CONSTANTS}> '
        f"{{ old = Clip(x) {' '.join(CHAIN.format(op=op) for op in NAMES)} }}"
    )
    lowerings = {**REGISTRY, **{("acme", op): tripled for op in NAMES}}
    operators = {("acme", op): CustomOperator("acme", op, same) for op in NAMES}
    read = read_model(proto, operators)
    assert read.opset == 21 and not read.notes
    graph = bind(read, {}, lowerings)
    graph, _ = Pipeline((*default_passes(), ConvertToFloat16(lowerings), *default_passes())).run(graph)
    counts = Counter(n.op for n in graph.nodes)
    assert all(counts[f"acme.{op}"] == 6 for op in NAMES)
    values = run_graph(lower(graph, lowerings), {"x": X})
    for op in NAMES:
        np.testing.assert_allclose(values[f"{op}_y"], want, rtol=2e-2, err_msg=op)


# --- invalid uses ---------------------------------------------------------------------------------------

DECLARED = (
    CustomOperator("acme", "F", same, inputs=(1, 2), outputs=(1, 2), attributes={"must": int, "may": 1.0, "word": "no"}),
    CustomOperator("acme", "Young", same, since=3),
)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("y = acme.F<must = 1>()", "acme.F has 0 inputs, where it needs 1 to 2"),
        ("y, a, b = acme.F<must = 1>(x)", "acme.F has 3 outputs, where it needs 1 to 2"),
        ("y = acme.F<must = 1>(, x)", "acme.F is not given its input 0"),
        ("y = acme.F(x)", "acme.F lacks the attribute must"),
        ("y = acme.F<must = 1.0>(x)", "attribute must of acme.F is float, not int"),
        ("y = acme.F<must = 1, may = 1>(x)", "attribute may of acme.F is int, not float"),
        ("y = acme.F<must = 1, word = [1, 2]>(x)", "attribute word of acme.F is tuple, not str"),
        ("y = acme.F<must = 1, other = 1>(x)", "acme.F has no attribute 'other'"),
        ("y = acme.Young(x)", "acme.Young is used, but the model imports version 1 of domain acme"),
        ("y = acme.G(x)", "unknown operator G in domain acme, opset 1"),
        ("y = other.F(x)", "unknown operator F in domain other"),
    ],
)
def test_a_wrong_use_is_bad_input(body: str, words: str) -> None:
    with pytest.raises(BadInput) as caught:
        opened(text(body, imports='"acme" : 1, "other" : 1'), registry(plugin(DECLARED)))
    assert caught.value.what.startswith(words) and caught.value.where and caught.value.hint
    assert ("plugin one" in caught.value.hint) == ("other" not in body or "acme" in body)


def test_a_domain_that_is_not_imported_is_named() -> None:
    with pytest.raises(BadInput, match="but the model imports no version of domain acme"):
        opened(text("y = acme.F<must = 1>(x)", imports='"ai.onnx.ml" : 3'), registry(plugin(DECLARED)))


def test_defaults_reach_inference_and_lowering() -> None:
    seen = list[Any]()

    def infer(use: Use) -> list[TensorType | None]:
        seen.append((use.op, use.version, use.attr("may"), use.inputs[0], use.value(1) if use.has(1) else None))
        return same(use)

    def lowered(ctx: Lowering) -> None:
        seen.append(ctx.attr("may"))
        tripled(ctx)

    made = CustomOperator("acme", "F", infer, inputs=(1, 2), attributes={"may": (1, 2)})
    model = text("k = Constant<value_ints = [4, 5]>()  y = acme.F(x, k)", imports='"acme" : 7')
    assert opened(model, registry(plugin([made], {("acme", "F"): lowered}))).run({"x": X})["y"].tolist() == (3 * X + 1).tolist()
    op, version, may, kind, known = seen[0]
    assert (op, version, may, kind) == ("acme.F", 7, (1, 2), TensorType("float32", (2, 3)))
    assert known.tolist() == [4, 5] and (1, 2) in seen[1:]


def test_what_comes_out_is_checked_where_it_goes_in() -> None:
    half = CustomOperator("acme", "F", lambda use: [replace(use.inputs[0], dtype="float16")])
    with pytest.raises(BadInput, match="Add has inputs of float16 and, as its 'B', float32"):
        opened(text("t = acme.F(x)  y = Add(t, x)"), registry(plugin([half], {("acme", "F"): tripled}))).run({"x": X})


def test_a_body_on_the_host_is_refused_and_a_known_branch_is_not() -> None:
    plugins = registry(plugin([F], {("acme", "F"): tripled}))
    branches = "then_branch = a () => (float[2,3] t) { t = acme.F(x) }, else_branch = b () => (float[2,3] e) { e = Neg(x) }"
    known = opened(text(f"c = Constant<value = bool {{1}}>()  y = If<{branches}>(c)"), plugins)
    assert known.run({"x": X})["y"].tolist() == (3 * X + 1).tolist()
    with pytest.raises(BadInput, match=r"acme.F is in a body of If, which is run on the host"):
        opened(text(f"y = If<{branches}>(c)", head="float[2,3] x, bool c"), plugins).run({"x": X, "c": np.array(True)})


def test_a_function_of_the_model_comes_first_and_may_call_what_is_declared() -> None:
    functions = """
        <domain: "acme", opset_import: ["" : 21]> F (a) => (b) { b = Neg(a) }
        <domain: "mine", opset_import: ["" : 21, "acme" : 1]> Twice <by> (a) => (c) {
            b = acme.G<by = @by>(a)  c = acme.G<by = 2.0>(b) }"""
    grown = CustomOperator("acme", "G", same, attributes={"by": 1.0})

    def lowered(ctx: Lowering) -> None:
        axes = ctx.axes(ctx.input(0))
        x = ctx.load(ctx.input(0), *[a.name for a in axes])
        ctx.emit(axes, ex.Op("mul", (x, ex.Const(ctx.attr("by")))), into=0)

    model = text("t = acme.F(x)  y = mine.Twice<by = 5.0>(t)", imports='"acme" : 1, "mine" : 1') + functions
    plugins = registry(plugin([F, grown], {("acme", "F"): tripled, ("acme", "G"): lowered}))
    assert opened(model, plugins).run({"x": X})["y"].tolist() == (-10 * X).tolist()


def test_shapes_that_are_known_at_run_time_reach_inference() -> None:
    """Check the device and the host: operators after a NonZero are bound when its result is available."""
    seen, hosted = list[tuple[int, ...]](), replace(F, name="H", reference=by_numpy)

    def infer(use: Use) -> list[TensorType | None]:
        seen.append(use.shape())
        return same(use)

    plugins = registry(plugin([replace(F, infer=infer), hosted], {("acme", "F"): tripled}))
    body = "h = acme.H(x)  n = NonZero(h)  f = Cast<to = 1>(n)  y = acme.F(f)  z = acme.H(y)"
    exe = opened(text(body, head="float[3] x", result="float[R,K] y, float z"), plugins)
    for x, places in ((np.array([-1 / 3, 0, 5], np.float32), [1, 2]), (np.array([1, 2, 3], np.float32), [0, 1, 2])):
        have, places_ = exe.run({"x": x}), np.array([places])
        assert have["y"].tolist() == (3 * places_ + 1).tolist() and have["z"].tolist() == (9 * places_ + 4).tolist()
        assert seen[-1] == (1, len(places))


# --- the host -------------------------------------------------------------------------------------------


def test_a_use_without_a_lowering_runs_on_the_host_by_the_reference(tmp_path: Path) -> None:
    model = text("t = Neg(x)  y = acme.F(t)")
    plugins = registry(plugin([replace(F, reference=by_numpy)]))
    exe = opened(model, plugins)
    assert exe.run({"x": X})["y"].tolist() == (1 - 3 * X).tolist()
    (special,) = exe.cache.values()
    (hosted,) = special.compiled.host_nodes
    assert hosted.why == "acme.F has no lowering; its results are those of the plugin's reference"
    file = tmp_path / "m.rammer"
    save_artifact(file, exe.artifact(special.compiled))
    again = open_executable(file, "", registry=plugins)
    assert again.run({"x": X})["y"].tolist() == (1 - 3 * X).tolist()
    with pytest.raises(BadInput, match="unknown operator F in domain acme"):
        load_artifact(file)
    with pytest.raises(BadInput, match=r"acme.F cannot run: no lowering supports this use, and it has no reference"):
        opened(model, registry(plugin([F]))).run({"x": X})


# --- attribution of faults --------------------------------------------------------------------------------


def raises(*args: object) -> Any:
    raise KeyError("not today")


def beside(ctx: Lowering) -> None:
    """Read one element out of bounds."""
    axes = ctx.axes(ctx.input(0))
    places = [ex.Op("add", (ex.Ref(axes[0].name), ex.Const(1, "int64"))), *[a.name for a in axes[1:]]]
    ctx.emit(axes, ctx.load(ctx.input(0), *places), into=0)


def nothing(ctx: Lowering) -> None:
    """Lower without emitting a result."""


def unknown(ctx: Lowering) -> None:
    """Read a nonexistent tensor."""
    ctx.emit(ctx.axes(ctx.input(0)), ctx.load("nowhere"), into=0)


@pytest.mark.parametrize(
    ("operator", "lowered", "words"),
    [
        (replace(F, infer=raises), tripled, "KeyError: 'not today'"),
        (replace(F, infer=lambda use: None), tripled, "infer of acme.F gives None, not a TensorType for each of 1 outputs"),
        (replace(F, infer=lambda use: []), tripled, "infer of acme.F gives [], not a TensorType"),
        (replace(F, infer=lambda use: ["float32"]), tripled, "infer of acme.F gives ['float32'], not a TensorType"),
        (
            replace(F, infer=lambda use: [TensorType("float32", (6,))]),
            tripled,
            "the lowering of acme.F gives f32[2,3] for output y",
        ),
        (F, raises, "KeyError: 'not today'"),
        (F, nothing, "the lowering of acme.F gives None for output y"),
        (F, beside, "covers 1..2, the axis has 2"),
        (F, unknown, "KeyError: 'nowhere'"),
        (replace(F, reference=raises), None, "the reference of acme.F: KeyError: 'not today'"),
        (replace(F, reference=lambda a, x: []), None, "the reference of acme.F: ValueError: it gives 0 of 1 outputs"),
    ],
)
def test_the_plugin_at_fault_is_named(operator: CustomOperator, lowered: Any, words: str) -> None:
    good = plugin(None, {("", "Softsign"): softsign})
    plugins = registry(plugin([operator], {("acme", "F"): lowered} if lowered else None), good)
    with pytest.raises(DeviceFailure) as caught:
        opened(text("y = acme.F(x)", result="float y"), plugins).run({"x": X})
    assert caught.value.what.startswith("plugin one fails: ") and words in caught.value.what
    assert caught.value.hint == "leave it out: RAMMER_DISABLE=one"


def test_what_infer_refuses_is_the_users_fault() -> None:
    def refusing(use: Use) -> Any:
        raise BadInput("acme.F wants a vector")

    with pytest.raises(BadInput, match=r"acme.F wants a vector") as caught:
        opened(text("y = acme.F(x)"), registry(plugin([replace(F, infer=refusing)]))).run({"x": X})
    assert caught.value.where == "node computing y (F)"


@pytest.mark.parametrize(
    ("plugins", "words"),
    [
        (
            (plugin([F]), plugin([F])),
            "plugin two fails in rammer_operators and is skipped there: ValueError: plugin one also has acme.F",
        ),
        ((plugin([F, F]),), "plugin one fails in rammer_operators and is skipped there: ValueError: it declares acme.F twice"),
        ((plugin(["F"]),), "TypeError: 'F' is not a CustomOperator"),
        ((plugin(None, {("acme", "F"): tripled}),), "TypeError: it lowers acme.F, which no plugin declares"),
        (
            (plugin([F], {("acme", "F"): tripled}), plugin(None, {("acme", "F"): beside})),
            "plugin two fails in rammer_lowerings and is skipped there: ValueError: plugin one also has acme.F",
        ),
    ],
)
def test_declarations_that_do_not_go_together_name_their_plugins(plugins: tuple[object, ...], words: str) -> None:
    told = io.StringIO()
    with redirect_stderr(told):
        found = registry(*plugins)
        assert list(found.operators()) == [("acme", "F")] * (words.startswith("plugin two"))
        found.operators()
    assert told.getvalue().count("warning") == 1 and words in told.getvalue()


@pytest.mark.parametrize(
    "wrong",
    [
        {"domain": ""},
        {"domain": "ai.onnx"},
        {"domain": "ai.onnx.ml"},
        {"domain": "a\nb"},
        {"name": "a b"},
        {"inputs": (2, 1)},
        {"outputs": 0},
        {"attributes": {"a": None}},
        {"attributes": {"a": list}},
    ],
)
def test_a_declaration_that_cannot_be_is_refused_where_it_is_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"domain|operator name|inputs|outputs|attribute"):
        replace(F, **wrong)
