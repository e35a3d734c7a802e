"""Whole-layer operators compared with their definition in float64. They are forms without a CPU kernel in ONNX Runtime, and forms
that must be refused."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest
from onnx import NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

import rammer
from rammer.errors import BadInput

MICROSOFT = "com.microsoft"


def node_of(op: str, operands: list[np.ndarray | None], outputs: int = 1, **attributes: Any) -> NodeProto:
    """Make a node of ONNX Runtime's domain whose operands are named by their positions."""
    names = [f"x{i}" if a is not None else "" for i, a in enumerate(operands)]
    return helper.make_node(op, names, [f"y{i}" for i in range(outputs)], domain=MICROSOFT, **attributes)


def computed(op: str, operands: list[np.ndarray | None], outputs: int = 1, **attributes: Any) -> list[np.ndarray]:
    """Run a model of one node."""
    given = {f"x{i}": a for i, a in enumerate(operands) if a is not None}
    ports = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in given.items()]
    results = [ValueInfoProto(name=f"y{i}") for i in range(outputs)]
    graph = helper.make_graph([node_of(op, operands, outputs, **attributes)], "g", ports, results)
    imports = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
    executable = rammer.compile(helper.make_model(graph, opset_imports=imports, ir_version=8), device="toy")
    found = executable.run(given)
    return [found[f"y{i}"] for i in range(outputs)]


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def routed(router: np.ndarray, k: int) -> list[list[tuple[int, float]]]:
    """Choose experts of each token, with the softmax over all experts; ties prefer the last expert."""
    shares = np.exp(router.astype(np.float64))
    shares /= shares.sum(1, keepdims=True)
    chosen = [sorted(range(len(row)), key=lambda e, row=row: (-row[e], -e))[:k] for row in router]
    return [[(e, float(shares[t, e])) for e in places] for t, places in enumerate(chosen)]


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize(("activation", "fusion"), [("silu", 0), ("swiglu", 0), ("swiglu", 1), ("swiglu", 2)])
def test_experts_with_gates(activation: str, fusion: int, tokens: int, rng: np.random.Generator) -> None:
    """Check a third projection, or its rows in the first one; few tokens gather weights."""
    hidden, inner, count, limit = 5, 4, 6, 0.8
    third = None if fusion else rng.normal(size=(count, inner, hidden)).astype(np.float32)
    rows = inner * (2 if fusion else 1)
    x, router = rng.normal(size=(tokens, hidden)).astype(np.float32), rng.normal(size=(tokens, count)).astype(np.float32)
    first, second = rng.normal(size=(count, rows, hidden)), rng.normal(size=(count, hidden, inner))
    bias, last = rng.normal(size=(count, rows)), rng.normal(size=(count, hidden))
    operands = [x, router, *(a.astype(np.float32) for a in (first, bias, second, last)), third, None]
    attributes = {"activation_type": activation, "k": 2, "normalize_routing_weights": 1, "swiglu_fusion": fusion}
    if activation == "swiglu":
        attributes |= {"activation_alpha": 1.7, "activation_beta": 1.0, "swiglu_limit": limit}
    want = np.zeros((tokens, hidden))
    for t, chosen in enumerate(routed(router, 2)):
        whole = sum(share for _, share in chosen)
        for e, share in chosen:
            gate = first[e] @ x[t] + bias[e]
            value = third[e] @ x[t] if third is not None else gate
            if fusion:
                gate, value = (gate[::2], gate[1::2]) if fusion == 1 else (gate[:inner], gate[inner:])
            if activation == "swiglu":
                gate, value = np.minimum(gate, limit), np.clip(value, -limit, limit)
                inside = gate * sigmoid(1.7 * gate) * (value + 1)
            else:
                inside = gate * sigmoid(gate) * value
            want[t] += share / whole * (second[e] @ inside + last[e])
    (have,) = computed("MoE", operands, **attributes)
    np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", [2, 8])
def test_integer_experts_in_blocks(bits: int, rng: np.random.Generator) -> None:
    """Check against ONNX Runtime, which rounds the input of blockwise experts to 8 bits."""
    hidden, inner, count, block, tokens = 32, 16, 3, 16, 4
    x, router = rng.normal(size=(tokens, hidden)).astype(np.float32), rng.normal(size=(tokens, count)).astype(np.float32)
    operands: list[np.ndarray | None] = [x, router]
    numbers, zeros = [], list[np.ndarray]()
    for rows, columns in ((inner, hidden), (hidden, inner)):
        codes = rng.integers(0, 1 << bits, (count, rows, columns)).astype(np.uint8)
        points = rng.integers(0, 1 << bits, (count, rows, columns // block)).astype(np.uint8)
        scales = rng.uniform(0.01, 0.1, points.shape).astype(np.float32)
        numbers.append((codes - np.repeat(points, block, 2).astype(np.float64)) * np.repeat(scales, block, 2))
        operands += [packed(codes, bits), scales, None]
        zeros.append(packed(points, bits))
    want = np.zeros((tokens, hidden))
    for t, chosen in enumerate(routed(router, 2)):
        whole = sum(share for _, share in chosen)
        for e, share in chosen:
            want[t] += share / whole * (numbers[1][e] @ np.maximum(numbers[0][e] @ x[t], 0))
    attributes = {"expert_weight_bits": bits, "block_size": block, "k": 2}
    (have,) = computed("QMoE", [*operands, None, None, None, *zeros], **attributes)
    np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-4)


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack integers along the last axis into bytes, the first one into the lowest bits."""
    each = 8 // bits
    whole = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % each)])
    parts = whole.reshape(*codes.shape[:-1], -1, each).astype(np.int64) << (np.arange(each) * bits)
    return parts.sum(-1).astype(np.uint8)


def test_forms_of_experts_that_are_refused() -> None:
    x, router = np.ones((2, 4), np.float32), np.ones((2, 3), np.float32)
    weights = [np.ones((3, 4, 4), np.float32), None, np.ones((3, 4, 4), np.float32)]
    for attributes, what in (
        ({"k": 4}, "k is 4, of 3 experts"),
        ({"activation_type": "mish"}, "the activation 'mish' is unknown"),
        ({"activation_type": "swiglu"}, "swiglu_fusion is 0 without a third projection"),
        ({"use_sparse_mixer": 1}, "the sparse mixer needs k=2"),
    ):
        with pytest.raises(BadInput, match=what):
            computed("MoE", [x, router, *weights], **attributes)


@pytest.mark.slow
@pytest.mark.parametrize("length", [2, 5])
@pytest.mark.parametrize("last", [0, 1])
def test_a_window_of_convolution_states_has_those_of_each_prefix(length: int, last: int, rng: np.random.Generator) -> None:
    """Check against the states of each prefix: ONNX Runtime has windows only on GPUs. Other forms are compared elsewhere."""
    batch, channels, size, window = 2, 3, 4, 3
    state = (batch, size - 1, channels) if last else (batch, channels, size - 1)
    x = rng.normal(size=(batch, length, channels) if last else (batch, channels, length)).astype(np.float32)
    weight, past = rng.normal(size=(channels, 1, size)).astype(np.float32), rng.normal(size=(window, *state)).astype(np.float32)
    attributes = {"channels_last": last, "activation": "silu"}
    y, states = computed("CausalConvWithState", [x, weight, None, past], 2, state_window=window, **attributes)
    want = []
    for end in range(length - window + 1, length + 1):
        if end < 1:
            want.append(np.zeros(state, np.float32))
            continue
        part = x[:, :end] if last else x[:, :, :end]
        whole, found = computed("CausalConvWithState", [part, weight, None, past[-1]], 2, **attributes)
        want.append(found)
    np.testing.assert_allclose(y, whole, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(states, np.stack(want), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("length", [2, 5])
def test_a_window_of_attention_states_has_those_of_each_prefix(length: int, rng: np.random.Generator) -> None:
    batch, heads, depth, width, window = 2, 2, 3, 4, 3
    query, key, decay = (rng.uniform(-1, 0, (batch, length, heads * depth)).astype(np.float32) for _ in range(3))
    value, beta = rng.normal(size=(batch, length, heads * width)), rng.uniform(0, 1, (batch, length, heads))
    state = (batch, heads, depth, width)
    past = rng.normal(size=(window, *state)).astype(np.float32)
    operands = [query, key, value.astype(np.float32), past, decay, beta.astype(np.float32)]
    attributes = {"q_num_heads": heads, "kv_num_heads": heads}
    y, states = computed("LinearAttention", operands, 2, state_window=window, **attributes)
    want = []
    for end in range(length - window + 1, length + 1):
        if end < 1:
            want.append(np.zeros(state, np.float32))
            continue
        parts = [a if a is past else a[:, :end] for a in operands]
        parts[3] = past[-1]
        whole, found = computed("LinearAttention", parts, 2, **attributes)
        want.append(found)
    np.testing.assert_allclose(y, whole, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(states, np.stack(want), rtol=1e-5, atol=1e-6)


def test_weights_of_four_bits_as_they_are(rng: np.random.Generator) -> None:
    """Check that transB=0 multiplies with [N, K], as ONNX Runtime's documentation says; its CPU kernel differs."""
    rows, depth = 3, 5
    codes, scales = rng.integers(0, 256, 8).astype(np.uint8), rng.uniform(0.5, 1, 1).astype(np.float32)
    attributes = {"N": rows, "K": depth, "block_size": 16, "quant_type": 1}
    (turned,) = computed("MatMulBnb4", [np.eye(depth, dtype=np.float32), codes, scales], **attributes)
    (plain,) = computed("MatMulBnb4", [np.eye(rows, dtype=np.float32), codes, scales], transB=0, **attributes)
    np.testing.assert_array_equal(plain, turned.T)


def test_prefix_states_of_hashes_are_the_states_after_each_prefix(rng: np.random.Generator) -> None:
    """Check that present states of whole requests equal those of one call per prefix. The rest is compared with ONNX Runtime."""
    lengths, size, capacity, taken = (3, 5), 4, 4, (2, 9)
    ids, past = rng.integers(0, 9, sum(lengths)), rng.integers(0, 9, (2, size - 1))
    factors, sizes = rng.integers(1, 99, size), rng.integers(3, 99, size - 1)
    bounds = np.cumsum([0, *lengths]).astype(np.int32)
    attributes = {"max_ngram_size": size, "n_head_per_ngram": 1, "pad_id": 7, "state_update_capacity": capacity}
    operands = [ids, factors, sizes, bounds, past, None, None, None, None, np.array(taken, np.int32)]
    node = node_of("VarlenNGramHashMapping", operands, 4, **attributes)
    node.output[2] = ""
    given = {f"x{i}": a for i, a in enumerate(operands) if a is not None}
    ports = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in given.items()]
    graph = helper.make_graph([node], "g", ports, [ValueInfoProto(name="y3")])
    imports = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=8)
    have = rammer.compile(model, device="toy").run(given)["y3"]
    want = np.full((2, capacity, size - 1), 7)
    for r, (begin, end) in enumerate(pairwise(bounds)):
        for c in range(min(taken[r], lengths[r], capacity)):
            want[r, c] = np.concatenate([past[r], ids[begin:end][: c + 1]])[-(size - 1) :]
    np.testing.assert_array_equal(have, want)


@pytest.mark.slow
@pytest.mark.parametrize("rotary", [0, 1])
@pytest.mark.parametrize("length", [1, 3, 20])
def test_sparse_attention_is_that_of_onnx_runtime(length: int, rotary: int, rng: np.random.Generator) -> None:
    """Check a prompt of 20, or tokens after 15 others, with bound buffers: ONNX Runtime's CPU kernel writes into its inputs."""
    batch, heads, shared, width, block, room = 2, 4, 2, 16, 16, 48
    total = 20 if length == 20 else length + 15
    layouts = np.array([[[1, 0, 0], [1, 1, 0], [1, 1, 1]], [[1, 0, 0], [0, 1, 0], [0, 1, 1]]])
    rows = np.concatenate([np.zeros((2, 1)), layouts.sum(2).cumsum(1)], axis=1).astype(np.int32)
    columns = np.full((2, 6), -1, np.int32)
    for filled, layout in zip(columns, layouts, strict=True):
        filled[: layout.sum()] = np.nonzero(layout)[1]
    query, key, value = (rng.normal(size=(batch, length, n * width)).astype(np.float32) for n in (heads, shared, shared))
    past = [rng.normal(size=(batch, shared, room, width)).astype(np.float32) for _ in range(2)]
    caches = [rng.uniform(-1, 1, (room, width // 2)).astype(np.float32) for _ in range(2)] if rotary else [None, None]
    ends = np.array([total, total], np.int32)
    operands = [query, key, value, *past, rows, columns, np.array([total], np.int32), ends, *caches]
    attributes = {"num_heads": heads, "kv_num_heads": shared, "sparse_block_size": block, "do_rotary": rotary}
    have = computed("SparseAttention", operands, 3, **attributes)
    want = bound_results("SparseAttention", operands, {1: 3, 2: 4}, **attributes)
    for a, b in zip(have, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    if length < 20:  # a row with fewer keys equals its separate run (ONNX Runtime's kernel computes it wrongly)
        mixed = [*operands[:8], np.array([total, total - 2], np.int32), *caches]
        alone = [a[1:] if a is not None and i < 5 else a for i, a in enumerate(operands)]
        alone[7:9] = [np.array([total - 2], np.int32)] * 2
        pairs = zip(
            computed("SparseAttention", mixed, 3, **attributes), computed("SparseAttention", alone, 3, **attributes), strict=True
        )
        for a, b in pairs:
            np.testing.assert_allclose(a[1:], b, rtol=1e-4, atol=1e-5)


def bound_results(op: str, operands: list[np.ndarray | None], shared: dict[int, int], **attributes: Any) -> list[np.ndarray]:
    """Return ONNX Runtime's results where output ``i`` is written into the memory of input ``shared[i]``."""
    given = {f"x{i}": a for i, a in enumerate(operands) if a is not None}
    ports = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in given.items()]
    results = [helper.make_tensor_value_info(f"y{i}", TensorProto.FLOAT, None) for i in range(3)]
    graph = helper.make_graph([node_of(op, operands, 3, **attributes)], "g", ports, results)
    imports = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=8)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    binding, values = session.io_binding(), {n: ort.OrtValue.ortvalue_from_numpy(a.copy()) for n, a in given.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for i in range(3):
        if i in shared:
            binding.bind_ortvalue_output(f"y{i}", values[f"x{shared[i]}"])
        else:
            binding.bind_output(f"y{i}")
    session.run_with_iobinding(binding)
    return [value.numpy().copy() for value in binding.get_outputs()]


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float4_e2m1fn"])
@pytest.mark.parametrize(("scales", "block"), [((5, 2), 16), ((1, 2), 16), ((5, 1), 0), ((1, 1), 0)])
def test_rows_of_short_floats_have_scales(kind: str, scales: tuple[int, int], block: int, rng: np.random.Generator) -> None:
    """Check scales per row or for all, in blocks or for a whole row; an index outside the table gives zeros."""
    table = rng.normal(size=(5, 32)).astype(getattr(ml_dtypes, kind))
    factors, places = rng.uniform(0.5, 2, scales).astype(np.float32), np.array([[0, 4], [-1, 7]])
    node = helper.make_node("GatherBlockQuantized", ["t", "i", "s"], ["y"], domain=MICROSOFT, block_size=block)
    ports = [helper.make_tensor_value_info("i", TensorProto.INT64, places.shape)], [ValueInfoProto(name="y")]
    constants = [numpy_helper.from_array(table, "t"), numpy_helper.from_array(factors, "s")]
    imports = [helper.make_opsetid("", 23), helper.make_opsetid(MICROSOFT, 1)]
    model = helper.make_model(helper.make_graph([node], "g", *ports, constants), opset_imports=imports, ir_version=11)
    want = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"i": places})[0]
    np.testing.assert_allclose(rammer.compile(model, device="toy").run({"i": places})["y"], want, rtol=1e-6)
