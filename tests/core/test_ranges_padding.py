"""Padding in programs for ranges: it starts at the end of the tensor, and unpadded axes need no length."""

from __future__ import annotations

import numpy as np
import pytest
from ranged_models import RangedModel, parsed
from ranged_programs import lowered, program_of, same_at

from rammer.frontend.ranges.anti_unify import NoRange
from rammer_testing.nonempty import some

#: Ranges of the axes of an image that may be open. Two windows of any kind fit into the least image.
OPEN = {"batch": (1, 5), "rows": (16, 21), "columns": (16, 20)}


def _windows(rng: np.random.Generator, open_ones: tuple[str, ...]) -> RangedModel:
    """Return two padding operators on an image with these open dimensions. Their kinds, strides, dilations and padding are
    random."""
    extents = [name if name in open_ones else str(n) for name, n in zip(OPEN, (2, 17, 16), strict=True)]

    def drawn(number: int) -> str:
        kernel, step, apart = (rng.integers(1, n, 2).tolist() for n in (4, 3, 3))
        pads = rng.integers(0, 3, 4).tolist()
        kind = str(rng.choice(["Conv", "Conv", "ConvTranspose", "MaxPool", "AveragePool", "Pad"]))
        if kind == "Pad":
            return f"Pad(t{number}, p)"
        if kind.endswith("Pool"):  # padding less than the window
            pads = [min(p, k - 1) for p, k in zip(pads, kernel * 2, strict=True)]
            counted = ", count_include_pad = 1" if kind == "AveragePool" else ""
            return f"{kind}<kernel_shape = {kernel}, strides = {step}, pads = {pads}{counted}>(t{number})"
        weights = f"w{kernel[0]}{kernel[1]}"
        return f"{kind}<kernel_shape = {kernel}, strides = {step}, dilations = {apart}, pads = {pads}>(t{number}, {weights})"

    proto = parsed(
        f"""padded (float[{extents[0]}, 2, {extents[1]}, {extents[2]}] t0) => (float[a, 3, b, c] t3) {{
            t1 = {drawn(0)}  t2 = Relu(t1)  t3 = {drawn(2)}
        }}""",
        p=np.array([0, 0, *rng.integers(0, 3, 2), 0, 0, *rng.integers(0, 3, 2)]),
        **{f"w{k}{n}": rng.standard_normal((2, 2, k, n)).astype(np.float32) for k in (1, 2, 3) for n in (1, 2, 3)},
    )
    return RangedModel(proto, {name: OPEN[name] for name in open_ones})


@pytest.mark.sampled(6)
@pytest.mark.parametrize("number", range(60))
def test_operators_at_an_open_batch_ask_for_no_length(number: int, rng: np.random.Generator) -> None:
    """Check that kernel families see the same expressions as at a fixed batch."""
    model = _windows(rng, ("batch",))
    found = program_of(model)
    length = found.ranged.lengths["batch"]
    assert not any(length in c.reads for c in some(found.graph.computes))
    whole = {c.name: c.kind for c in lowered(model, {"batch": OPEN["batch"][1]}).computes}
    assert {c.name: c.kind for c in found.graph.computes} == whole


@pytest.mark.sampled(6)
@pytest.mark.parametrize("number", range(60))
def test_padding_begins_where_the_tensor_ends(number: int, rng: np.random.Generator) -> None:
    names = rng.permutation(list(OPEN))[: rng.integers(1, 3)]
    model = _windows(rng, tuple(str(n) for n in names))
    try:
        found = program_of(model)
    except NoRange:  # half of an open number of rows is not a sum of lengths
        return
    for _ in some(range(4)):
        same_at(model, found, {n: int(rng.integers(low, high + 1)) for n, (low, high) in model.spans.items()}, rng)
