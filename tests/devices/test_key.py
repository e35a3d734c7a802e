"""Keys of operators: equal keys are one operator to a device, for any names and addresses of tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import families
import numpy as np
import onnx
import products
import pytest
from onnx_models import model, tensor

from rammer.compile_options import CompileOptions
from rammer.compiler.compiler import Compiler
from rammer.device.loader import Registry
from rammer.device.manifest import ALIGNED_ELEMENTS, Backend, Binding
from rammer.errors import DeviceFailure
from rammer.frontend.read.reader import read_model
from rammer.ir.compute import Compute
from rammer.ir.operator import ROperator
from rammer.ir.parts import Storage
from rammer.tuning.kernel_probe import probe_program
from rammer.tuning.kernel_store import KernelStore
from rammer.tuning.tuner import Tuner
from rammer_testing.nonempty import some

Case = tuple[ROperator, Binding]
#: Facts about a stored tensor or the operator in a key; some device's choice depends on each.
FACTS = {
    "constant": r" constant",
    "reused": r" reused",
    "alignment": r" from \d+",
    "strides": r" strides \[[^]]*\]",
    "precision": r" (float32|tf32)$",
}
DEVICES = {"cuda": "sm_90a", "ipu_sim": "", "rocm": ""}


def backend_of(device: str) -> Backend:
    registry = Registry()
    if device == "cuda":
        pytest.importorskip("cuda.bindings")
    target = DEVICES[device]
    if not target and not any(s.name == device and s.state in ("ok", "no-hardware") for s in registry.statuses()):
        pytest.skip(f"{device} does not work here")
    return registry.open(device, target=target, options={"tiles": "64"} if device == "ipu_sim" else {})


def base_cases() -> list[Case]:
    """Return one operator of each kind, of sizes where families have a choice."""
    rows = [families.softmax(12, 128), families.layer_norm(9, 96), families.channel_softmax(9, 24), families.taken(6, 5, 24)]
    others = [families.depthwise(6, 12, 3, 1), families.max_pool(5, 14, 7), families.scale_shift(6, 8), families.turned(24, 16)]
    vectors = [families.matvec(1, 256, 64), families.matvec(4, 128, 32), families.matvec(2, 128, 32, turned=True)]
    matrices = [
        products.matmul(64, 64, 64, False),
        products.matmul(32, 128, 48, True),
        products.conv(16, 16, 9, 3),
        products.conv(32, 32, 6, 1),
        products.normalised(16, 32, 8, 1),
    ]
    found = [*rows, *others, *vectors, *matrices, *families.HALVES.values(), lstm_cell(64, 96)]
    return [(operator.renamed(f"operator_{n}"), binding) for n, (operator, binding) in enumerate(found)]


def lstm_cell(hidden: int, depth: int) -> Case:
    """Return the gates of a cell of one row, and its new state."""
    g, j = "g:4", f"j:{hidden}"
    return families.operator(
        [
            f"a: f32[{g}, n:1, {j}] = sum[k:{depth}] x[n, k] * w[g, j, k]",
            f"b: f32[{g}, n:1, {j}] = sum[k:{hidden}] h[n, k] * r[g, j, k]",
            f"s: f32[{g}, n:1, {j}] = a[g, n, j] + b[g, n, j]",
            f"y: f32[n:1, {j}] = s[0, n, j] * tanh(s[1, n, j])",
        ],
        {"x": (1, depth), "h": (1, hidden), "w": (4, hidden, depth), "r": (4, hidden, hidden)},
        "wr",
    )


def altered(case: Case, rng: Random, facts: Sequence[str] = tuple(FACTS)) -> Case:
    """Return the same expressions on tensors that differ in one to three of ``facts``."""
    operator, binding = case
    for _ in range(rng.randint(1, 3)):
        name = rng.choice([*operator.inputs, *operator.outputs])
        change = rng.choice(facts)
        storage = binding.storages[name]
        if change == "precision":
            binding = replace(binding, precision=rng.choice(("float32", "tf32")))
        elif change == "alignment":
            moved = replace(storage, offset=storage.offset + rng.choice((1, 2, 4, 8, 16, 32)))
            binding = replace(binding, storages={**binding.storages, name: moved})
        elif change == "strides":
            binding = replace(binding, storages={**binding.storages, name: spread(storage, rng)})
        elif change == "constant" and name in operator.inputs:
            binding = replace(binding, constants=binding.constants ^ {name}, reused=binding.reused - {name})
        elif change == "reused" and name in binding.constants:
            binding = replace(binding, reused=binding.reused ^ {name})
    return operator, binding


def spread(storage: Storage, rng: Random) -> Storage:
    """Return a storage of the tensor as a part of a larger one, or in another order."""
    strides = [s * rng.choice((1, 1, 2, 3)) if n > 1 else s for s, n in zip(storage.strides, storage.shape, strict=True)]
    if rng.random() < 0.3:
        order = sorted(range(len(strides)), key=lambda _: rng.random())
        step = 1
        for d in order:
            strides[d], step = step, step * storage.shape[d]
    return replace(storage, strides=tuple(strides))


def twin(case: Case, rng: Random) -> Case:
    """Return the case with other names, buffers and offsets of equal alignment."""
    operator, binding = case
    inside = [c.name for c in operator.computes]
    fresh = [f"v{n}" for n in rng.sample(range(10_000), len(operator.inputs) + len(inside))]
    names = dict(zip((*operator.inputs, *inside), fresh, strict=True))
    computes = tuple(replace(Compute.parse(c.text_with(names)), origin=f"node {rng.random()}") for c in operator.computes)
    links = tuple(replace(e, producer=names[e.producer], consumer=names[e.consumer]) for e in operator.connections)
    outputs = tuple(names[o] for o in operator.outputs)
    storages = {}
    for n, s in binding.storages.items():
        offset = s.offset + ALIGNED_ELEMENTS * rng.randint(0, 9)
        storages[names[n]] = replace(s, tensor=names[n], buffer=f"b{rng.randrange(1 << 30)}", offset=offset)
    types = {names[n]: t for n, t in binding.types.items() if n in names}
    kept = [frozenset(names[n] for n in found if n in names) for found in (binding.constants, binding.reused)]
    moved = replace(operator, name=f"operator_{rng.randrange(1 << 30)}", computes=computes, connections=links, outputs=outputs)
    return moved, Binding(types, storages, *kept, binding.precision)


def outcome(backend: Backend, case: Case, kernels: int = 2) -> list[Any]:
    """Return a device's candidates and first few kernels for an operator, without names."""
    operator, binding = case
    options = list(backend.candidates(operator, binding))
    result: list[Any] = [(o.tile, o.family, o.config) for o in options]
    for option in options[:kernels]:
        try:
            k = backend.kernel(option, binding)
        except DeviceFailure as problem:
            result.append(type(problem).__name__)
            continue
        text = re.sub(r"//[^\n]*", "", k.source).replace(operator.name, "operator")  # comments name tensors
        result.append((text, k.resources, k.alone, k.crowded, k.origin))
    return result


def collisions(backend: Backend, cases: Sequence[Case], key: Callable[[str], str] = str) -> list[str]:
    """Return the first differing part of each pair of cases. The pairs have equal ``key`` of their keys, but the device
    distinguishes them."""
    found, seen = list[str](), dict[str, list[Any]]()
    for operator, binding in cases:
        made = outcome(backend, (operator, binding))
        first = seen.setdefault(key(binding.key(operator)), made)
        if first != made:
            parts = [(a, b) for a, b in zip(first, made, strict=False) if a != b] or [(len(first), len(made))]
            found.append(f"{binding.key(operator)}\n{parts[0][0]}\n{parts[0][1]}")
    return found


def drawn(rng: Random, each: int) -> list[Case]:
    """Return every kind of operator, altered ``each`` times, each with a twin."""
    cases = [c for base in base_cases() for c in (base, *(altered(base, rng) for _ in range(each)))]
    return [t for c in cases for t in (c, twin(c, rng))]


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("device", DEVICES)
def test_operators_of_equal_keys_have_equal_kernels(device: str, seed: int) -> None:
    backend = backend_of(device)
    cases = drawn(Random(seed), 1)
    assert not collisions(backend, cases), f"seed {seed}"
    pairs = list(zip(cases[::2], cases[1::2], strict=True))
    assert all(a[1].key(a[0]) == b[1].key(b[0]) for a, b in some(pairs)), f"seed {seed}: names or places are in the key"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("device", DEVICES)
def test_the_first_kernel_alone_is_that_of_all(device: str, seed: int) -> None:
    """Check that the predicted time of an operator does not depend on the search for its other kernels."""
    backend, random = backend_of(device), Random(seed)
    alone, tuner = (Tuner(backend, KernelStore(None)) for _ in range(2))
    cases = [altered(c, random) for c in random.sample(base_cases(), 6)]
    for operator, binding in some(cases):
        seconds = tuner.kernels(operator, binding)[0].operator_time(backend.vdevice.veus)
        assert alone.first(operator, binding) == tuner.first(operator, binding) == seconds, operator.head()


@pytest.mark.parametrize(("device", "fact"), [*(("cuda", f) for f in FACTS), ("rocm", "constant"), ("rocm", "strides")])
def test_a_key_without_one_fact_is_found_out(device: str, fact: str) -> None:
    """Check that the search above detects each fact: a key without it makes different kernels equal."""
    rng, backend = Random(7), backend_of(device)
    bases = base_cases()
    for _ in range(4):
        for base in bases:
            other = altered(base, rng, (fact,))
            differ = base[1].key(base[0]) != other[1].key(other[0])
            if differ and collisions(backend, [base, other], lambda key: re.sub(FACTS[fact], "", key, flags=re.MULTILINE)):
                return
    pytest.fail(f"nothing on {device} depends on {fact}, or nothing drawn shows it")


@pytest.mark.parametrize("constant_first", [True, False])
def test_products_that_differ_in_a_constant_weight_get_kernels_of_their_own(
    constant_first: bool, rng: np.random.Generator
) -> None:
    """Check both orders.

    In one, the computed product had no valid kernel; in the other, the constant one got the slower family."""
    families_of = {}
    for names in (("constant",), ("computed",), ("constant", "computed") if constant_first else ("computed", "constant")):
        compiler = Compiler(backend_of("cuda"), CompileOptions(), KernelStore(None))
        compiled = compiler.compile_model(read_model(two_products(rng, names)), {})
        found = {k.operator.name: k.operator.family for k in compiler.resources(compiled)}
        assert all(families_of.setdefault(name, found[name]) == found[name] for name in names)


def two_products(rng: np.random.Generator, names: Sequence[str]) -> onnx.ModelProto:
    """Return products of 4096 x 256 x 256, with a constant weight or with a computed one."""
    weights = {"w": rng.standard_normal((256, 256)).astype(np.float32)} if "constant" in names else {}
    factors = {"constant": "w", "computed": "v"}
    nodes = [onnx.helper.make_node("MatMul", [f"x_{n}", factors[n]], [n], name=n) for n in names]
    inputs = [tensor(f"x_{n}", (4096, 256)) for n in names] + ([tensor("v", (256, 256))] if "computed" in names else [])
    return model(nodes, inputs, list(names), constants=weights)


def test_a_kernel_is_measured_with_its_alignment() -> None:
    """Check that an operator in a probe program has its key from the model, so that the same kernel is measured."""
    operator, binding = families.scale_shift(6, 8)
    tiled = replace(operator, tile=(1, 1, 8, 8))
    for offset in (0, 1, 3, 8, 23):
        moved = {
            n: replace(s, offset=offset, strides=tuple(-x for x in s.strides)) if n == "x" else replace(s, offset=offset)
            for n, s in binding.storages.items()
        }
        moved["x"] = replace(moved["x"], offset=offset + 383)
        case = replace(binding, storages=moved)
        assert case.constants
        program, constants = probe_program(tiled, case, 2)
        assert constants.keys() == case.constants
        assert Binding.of(program, constants).key(tiled) == case.key(tiled)


def test_what_is_compiled_again_for_its_resources_is_what_was_chosen() -> None:
    """Check that constants with several readers are recognised if only the program is available."""
    compiler = Compiler(backend_of("cuda"), CompileOptions(precision="tf32"), KernelStore(None))
    seen = list[Binding]()
    make = compiler.backend.kernel
    compiler.backend.kernel = lambda o, b: seen.append(b) or make(o, b)  # type: ignore[method-assign,func-returns-value]
    w = np.ones((64, 64), np.float32)
    steps = [onnx.helper.make_node("MatMul", [x, "w"], [y], name=y) for x, y in (("x", "h"), ("h", "y"))]
    compiled = compiler.compile_model(read_model(model(steps, [tensor("x", (1, 64))], ["y"], constants={"w": w})), {})
    chosen = {(b.precision, b.reused & {"w"}) for b in seen}  # besides its other order, which is tried
    seen.clear()
    compiler.resources(compiled)
    assert {(b.precision, b.reused) for b in seen} == chosen == {("tf32", frozenset(("w",)))}
