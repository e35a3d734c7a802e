"""Small models with fusible operators: chains of products, attention, maps before a convolution."""

from __future__ import annotations

from rammer_testing.small_models import SmallModel

ROWS, WIDTH = 96, 8
WEIGHTS = "float[6] f, float[6] g, float[8,6,{k},{k}] w_0, float[4,8,3,3] w_1"


def mlp(layers: int, rows: int = ROWS, width: int = WIDTH) -> SmallModel:
    """Make ``layers`` products of ``width x width`` with bias and ReLU."""
    weights = ", ".join(f"float[{width},{width}] w_{i}, float[{width}] w_b{i}" for i in range(layers))
    lines = (f"    m{i} = MatMul(r{i}, w_{i})\n    a{i} = Add(m{i}, w_b{i})\n    r{i + 1} = Relu(a{i})" for i in range(layers))
    body = "\n".join(lines)
    text = f"(float[{rows},{width}] r0, {weights}) => (float[{rows},{width}] r{layers}) {{\n{body}\n}}"
    return SmallModel("mlp", text)


def attention(
    rows: int = 24, keys: int = 20, softmax: str = "Softmax<axis=-1>(a)", kept: bool = False, before: str = ""
) -> SmallModel:
    """Make two attention heads: scaled, masked scores, row-wise work and context. ``kept`` makes the probabilities an output,
    too; ``before`` is a map on the queries."""
    return SmallModel(
        "attention",
        f"""(float[1,2,{rows},8] q, float[1,2,8,{keys}] k, float[1,2,{keys},6] v,
        float[1,1,1,{keys}] mask)
        => (float[1,2,{rows},6] c{f", float[1,2,{rows},{keys}] p" if kept else ""}) {{
        scale = Constant<value_float=0.25>()
        {f"qb = {before}(q)" if before else ""}
        s = MatMul({"qb" if before else "q"}, k)
        m = Mul(s, scale)
        a = Add(m, mask)
        p = {softmax}
        c = MatMul(p, v)
    }}""",
    )


def block(kernel: int = 1, more: str = "", out: str = "") -> SmallModel:
    """Make a dense layer: maps that cannot be folded into weights, a convolution, ReLU, and a padded convolution. The shift is
    chosen so that the maps do not give 0 for padding."""
    pads = f"pads = [{', '.join([str(kernel // 2)] * 4)}]"
    return SmallModel(
        "block",
        f"""(float[1,6,7,5] x, {WEIGHTS.format(k=kernel)}) => (float[1,4,7,5] y{out}) {{
        fs = Constant <value = float[6,1,1] {{0.5, 1.5, -1.0, 2.0, 1.0, -0.5}}> ()
        gs = Constant <value = float[6,1,1] {{1.0, 0.5, 2.0, 0.25, 1.5, 3.0}}> ()
        a = Mul(x, fs)
        b = Add(a, gs)
        r = Relu(b)
        c = Conv <{pads}> (r, w_0)
        d = Relu(c)
        y = Conv <pads = [1, 1, 1, 1]> (d, w_1)
        {more}
    }}""",
    )
