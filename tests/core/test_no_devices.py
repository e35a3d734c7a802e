"""Independence of devices: the core and the test kit contain neither device names nor device-specific terms. The tests of the
core use no device."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest
from reading import Search

import rammer
import rammer_testing
from rammer.device.loader import Registry
from rammer_testing.nonempty import some

#: The packages of the core and the test kit.
PACKAGES = [Path(str(package.__file__)).parent for package in (rammer, rammer_testing)]
#: Devices, their languages and vendors, and packages that drive them.
WORDS = re.compile(r"cuda|cupy|nvidia|nvrtc|rocm|opencl|pocl|\bamd|\bhip|ipu|poplar|gpu|\bsm_\d", re.IGNORECASE)

#: Permitted occurrences, with the reason.
ALLOWED = {
    ("rammer/device/arrays.py", "__cuda_array_interface__"): "a protocol of arrays; libraries without a GPU speak it, too",
    ("rammer/compile_options.py", "sm_90a"): "an example in a help text",
    ("rammer/compile_options.py", "gpu."): "an example in a help text",
    ("rammer/cli/compile.py", "sm_90a,"): "an example in a help text",
    (
        "rammer/onnxruntime_api/ort_value.py",
        "__cuda_array_interface__",
    ): "a protocol of arrays; libraries without a GPU speak it, too",
    ("rammer/onnxruntime_api/ort_value.py", "gpu"): "a kind of hardware",
    ("rammer/onnxruntime_api/providers.py", "gpu"): "a kind of hardware",
    ("rammer/onnxruntime_api/providers.py", "GPU"): "ONNX Runtime's name of a kind of hardware",
    ("rammer_testing/fusion.py", "ipu_sim"): "a default that a user may change",
    ("rammer_testing/strided_ranges.py", "rocm"): "a default that a user may change",
    ("rammer_testing/many_sizes.py", "rocm"): "a default that a user may change",
    ("rammer_testing/browser.py", "--disable-gpu"): "an option of the browser",
    ("rammer_testing/sandbox.py", "PYOPENCL_NO_CACHE"): "a package's pickles would look like a deed of the file under test",
    ("rammer_testing/mutants/__main__.py", "ipu_sim"): "a default that a user may change",
    ("rammer_testing/mutants/__main__.py", "OpenCL"): "in a help text",
    **{
        ("rammer_testing/mutants/campaign.py", name): "must not be imported before a fork"
        for name in ("pyopencl", "cuda", "cupy", "pocl", "rammer_rocm", "rammer_cuda")
    },
}


def named(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Yield identifiers and words of strings that name a device. Docstrings may give examples."""
    explained = {id(n.value) for n in nodes if isinstance(n, ast.Expr)}
    for node in nodes:
        said = [value for kind, value in ast.iter_fields(node) if kind != "value" and isinstance(value, str)]
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in explained:
            said += node.value.split()
        yield from (s for s in said if WORDS.search(s))


FILES = {f: str(f.relative_to(p.parent)) for p in PACKAGES for f in sorted(p.rglob("*.py")) if "plugin-template" not in f.parts}
NAMED = Search(__file__, FILES, lambda file: {*named(file.nodes)})


@pytest.mark.slow
def test_the_core_names_no_device() -> None:
    found = {(FILES[f], word) for f, words in NAMED.found().items() for word in words}
    assert found == {*ALLOWED}, "a device in the core, or an exception that nothing needs"


@pytest.mark.parametrize(
    "code",
    [
        "KNOWN = {'cuda': 1}",
        "if device == 'rocm': pass",
        "OPENCL = 1",
        "import pyopencl",
        "f(gpu=1)",
        "x = f'{y} on sm_90'",
        "from a import cuda_text",
        "def on_gpu(): pass",
    ],
)
def test_the_search_finds(code: str) -> None:
    text = f'"""An example for cuda."""\n# for cuda\n{code}\n'
    assert len({*named([*ast.walk(ast.parse(text))])}) == 1


def used(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield plugins that a test file imports in any way or opens: a string equal to a device's name."""
    names = "cuda|rocm|ipu_sim"
    for node in nodes:
        modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        texts = [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []
        yield from (m for m in modules if re.match(rf"rammer_({names})\b", m))
        yield from (t for t in texts if re.fullmatch(rf"rammer_({names})(\.\w+)*|({names})(:\d+)?", t))


#: Without this file, which contains the names.
TESTS = [f for f in sorted(Path(__file__).parent.rglob("*.py")) if f.name != Path(__file__).name]
USED = Search(__file__, TESTS, lambda file: {*used(file.nodes)})


def test_the_cores_tests_use_no_plugin() -> None:
    users = {f.name: plugins for f, plugins in some(USED.found().items()) if plugins}
    assert not users, "it belongs into that plugin's tests, or into tests/devices"
    assert {s.name for s in Registry().statuses() if s.state != "disabled"} == {"toy"}


@pytest.mark.parametrize(
    "code",
    [
        "from rammer_cuda.gpu import Gpu",
        "import rammer_rocm.plugin as p",
        "def f():\n    from rammer_ipu_sim import chip",
        "pytest.importorskip('rammer_ipu_sim.plugin')",
        "rammer.compile(m, device='rocm')",
        "Registry().open('cuda:1', target='sm_90a')",
    ],
)
def test_the_search_for_plugins_finds(code: str) -> None:
    assert len({*used(ast.walk(ast.parse(f'"""Not of rocm."""\n{code}\n')))}) == 1
