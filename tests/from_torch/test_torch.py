"""``torch.compile(backend="rammer")`` and ``rammer.torch.compile``: tiny modules against eager torch."""

from __future__ import annotations

import importlib.metadata
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import rammer
from rammer.errors import BadInput
from rammer_testing.nonempty import some

torch = pytest.importorskip("torch", reason="needs torch: pip install rammer-core[torch]")
pytest.importorskip("onnxscript", reason="needs onnxscript: pip install rammer-core[torch]")
nn: Any = torch.nn
forms: Any = pytest.importorskip("rammer.torch.onnx_form")
calls: Any = pytest.importorskip("rammer.torch.tensor_calls")

DEVICES = ("rocm", "ipu_sim")
SIMULATED = {"tiles": "8"}


@pytest.fixture(autouse=True)
def fresh_dynamo(seed: int) -> Iterator[None]:
    """Seed torch, forget compiled graphs, and turn a graph that is left to torch into an error."""
    torch.manual_seed(seed)
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="rammer leaves")
        yield


class Net(nn.Module):
    """A small network with a convolution, a batch normalisation with random statistics, and a dense layer."""

    def __init__(self, features: int = 6) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.dense = nn.Linear(8, features)
        nn.init.uniform_(self.norm.running_var, 0.5, 1.5)

    def forward(self, x: Any) -> Any:
        return self.dense(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


def compiled(module: Any, device: str = "rocm", **options: Any) -> Any:
    """Return ``module`` through the backend."""
    more = {"options": SIMULATED} if device == "ipu_sim" else {}
    return torch.compile(module, backend="rammer", options={"device": device, **more, **options})


def assert_equal(found: Any, want: Any) -> None:
    """Fail unless the tensors of two results are equal within 1e-4."""
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


def test_the_backend_is_an_entry_point() -> None:
    """Torch lists the backend without an import of rammer."""
    assert "rammer" in {e.name for e in importlib.metadata.entry_points(group="torch_dynamo_backends")}
    assert "rammer" in torch.compiler.list_backends()


@pytest.mark.parametrize("device", DEVICES)
def test_equals_eager(device: str) -> None:
    """A network has the results of eager torch on inputs that it was not compiled with."""
    module = Net().eval()
    made = compiled(module, device)
    with torch.no_grad():
        for _ in range(2):
            x = torch.randn(2, 3, 8, 8)
            assert_equal(made(x), module(x))


def test_outputs_belong_to_the_caller() -> None:
    """A later run does not overwrite an earlier result."""
    module = nn.Linear(4, 4).eval()
    made, x = compiled(module), torch.randn(2, 4)
    with torch.inference_mode():
        first = made(x)
        want = first.clone()
        made(torch.randn(2, 4))
        assert torch.equal(first, want)


def test_written_parameters_are_seen() -> None:
    """A parameter that is written to gets a new program."""
    module = nn.Linear(4, 4).eval()
    made, x = compiled(module), torch.randn(2, 4)
    with torch.no_grad():
        before = made(x)
        module.weight.mul_(2.0)
        assert_equal(made(x), module(x))
        assert not torch.allclose(made(x), before)


def test_equal_layers_share_a_graph_but_not_parameters() -> None:
    """A graph that dynamo reuses for another module has that module's parameters."""
    first, second = nn.Linear(4, 4).eval(), nn.Linear(4, 4).eval()
    run = compiled(lambda layer, x: layer(x).relu())
    x = torch.randn(2, 4)
    with torch.no_grad():
        for layer in (first, second, first):
            assert_equal(run(layer, x), layer(x).relu())


def test_gradients_are_refused() -> None:
    """A call that torch records gradients for raises an error with the remedy."""
    with pytest.raises(Exception, match=r"compiles for inference[\s\S]*torch.no_grad"):
        compiled(nn.Linear(4, 4))(torch.randn(2, 4))
    with pytest.raises(BadInput, match="training mode"):
        rammer.torch.compile(nn.Dropout(), (torch.randn(2),), "rocm")


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: x + torch.rand_like(x).round() * 0, "rand_like"),
        (lambda x: torch.linalg.matrix_exp(x) + 1, "matrix_exp"),
    ],
)
def test_refused_operators_stay_with_torch(function: Any, name: str) -> None:
    """A graph with an operator that is refused runs in torch, with a warning that names the operator."""
    x = torch.randn(3, 3)
    warnings.filterwarnings("always", message="rammer leaves")
    with pytest.warns(RuntimeWarning, match=rf"rammer leaves a graph[\s\S]*{name}"):
        found = compiled(function)(x)
    assert_equal(found, function(x))


def test_standardisation_is_no_training() -> None:
    """A batch normalisation without running statistics, which standardises weights, is compiled."""
    weight = nn.Parameter(torch.randn(4, 6))

    def function(x: Any) -> Any:
        scaled = nn.functional.batch_norm(weight.reshape(1, 4, 6), None, None, training=True)
        return nn.functional.linear(x, scaled.reshape(4, 6))

    x = torch.randn(2, 6)
    with torch.no_grad():
        assert_equal(compiled(function)(x), function(x))


def test_graph_breaks_stay_with_torch() -> None:
    """A function with a graph break has the right result, from two graphs."""

    def function(x: Any) -> Any:
        y = x * 2
        torch._dynamo.graph_break()
        return y.cos() + 1

    x = torch.randn(5)
    assert_equal(compiled(function)(x), function(x))


def test_unknown_options_are_refused() -> None:
    """An option that ``rammer.compile`` does not have is an error that lists the options."""
    with pytest.raises(Exception, match=r"unknown option 'speed'[\s\S]*precision"):
        torch.compile(torch.relu, backend="rammer", options={"speed": "high"})(torch.randn(2))


def test_new_lengths_of_a_dynamic_graph() -> None:
    """A graph that dynamo makes dynamic is right at every length, also where a length is a number of the result."""

    def function(x: Any) -> tuple[Any, int]:
        return torch.softmax(x.reshape(x.shape[0] * 2, -1), 0), x.shape[0] + 1

    made = compiled(function)
    for n in (3, 5, 9, 12):
        x = torch.randn(n, 4)
        found, number = made(x)
        assert_equal(found, function(x)[0])
        assert number == n + 1


def test_inputs_that_are_written_to() -> None:
    """A cache that a module updates in place has the new content after a call."""

    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(4, 3))

        def forward(self, x: Any, at: Any) -> Any:
            self.cache.index_copy_(0, at, x)
            return self.cache.sum(0)

    module, other = Cache().eval(), Cache().eval()
    made = compiled(module)
    with torch.no_grad():
        for n in range(3):
            x, at = torch.randn(1, 3), torch.tensor([n])
            assert_equal(made(x, at), other(x, at))
    assert_equal(module.cache, other.cache)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
def test_element_types(dtype: Any) -> None:
    """Tensors of every element type keep it, and share memory with the arrays that rammer gets."""
    x = torch.randn(6).mul(4).to(dtype)
    assert_equal(compiled(lambda t: t.reshape(2, 3).t())(x), x.reshape(2, 3).t())
    array = calls.to_array(x)
    assert str(array.dtype) == str(dtype).removeprefix("torch.")
    assert array.ctypes.data == x.data_ptr() == calls.to_tensor(array).data_ptr()


def test_a_dim_is_a_range() -> None:
    """A ``torch.export.Dim`` becomes a range, whose lengths need no further program; results have the module's structure."""

    class Structured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = nn.Linear(4, 4)

        def forward(self, x: Any, scale: float, *, shift: Any) -> dict[str, Any]:
            return {"y": self.dense(x).mul(scale), "parts": [x + shift, None]}

    module, shift = Structured().eval(), torch.randn(4)
    length = torch.export.Dim("length", min=1, max=24)
    shapes = {"x": {0: length}, "scale": None, "shift": None}
    made = rammer.torch.compile(module, (torch.randn(7, 4), 2.0), "rocm", example_kwargs={"shift": shift}, dynamic_shapes=shapes)
    assert [*made.executable.lengths.spans.values()] == [(1, 24)]
    with torch.no_grad():
        for n in (24, 23, 11, 2, 1):
            x = torch.randn(n, 4)
            found, want = made(x, 2.0, shift=shift), module(x, 2.0, shift=shift)
            assert_equal(found["y"], want["y"])
            assert_equal(found["parts"][0], want["parts"][0])
            assert found["parts"][1] is None
    with pytest.raises(BadInput, match="structure"):
        made(torch.randn(2, 4), 2.0)
    made.close()


def test_weights_are_not_copied() -> None:
    """Large weights of the ONNX form are the parameters' memory."""
    module = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64)).eval()
    form = forms.to_onnx(forms.export_module(module, (torch.randn(2, 64),), {}, None))
    parameters = [calls.to_array(p) for p in module.parameters() if p.ndim == 2]
    assert all(any(np.shares_memory(w, p) for w in form.weights.values()) for p in some(parameters))
    assert not any(t.raw_data for t in some(form.proto.graph.initializer) if t.name in form.weights)


def test_equal_modules_have_equal_models() -> None:
    """Two exports of equal modules have the same digest, so that a later process uses the cached program."""
    found = []
    for _ in range(2):
        torch.manual_seed(1)
        module = rammer.torch.compile(Net().eval(), (torch.randn(1, 3, 4, 4),), "rocm")
        found.append(module.executable.source.digest)
        module.close()
    assert found[0] and found[0] == found[1]


@pytest.mark.parametrize("in_place", [True, False])
def test_calls_with_fixed_addresses(in_place: bool) -> None:
    """The bound calls that tensors of a GPU use are right on tensors of the host: in place, and by copies."""
    module = Net().eval()
    x = torch.randn(1, 3, 4, 4)
    made = rammer.torch.compile(module, (x,), "rocm")
    name = made.executable.head.inputs[0].name
    call = calls.DeviceCall.bind(made.executable, {name: x}, None, in_place)
    with torch.no_grad():
        for _ in range(3):
            given = x.normal_() if in_place else torch.randn(1, 3, 4, 4)
            (found,) = call.run({name: given}).values()
            assert_equal(found, module(given))
    call.bound.close()
    made.close()
