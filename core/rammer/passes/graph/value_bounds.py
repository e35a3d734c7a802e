"""Bounds on the values of a graph, from which ``convert_to_float16`` decides which tensors float16 can hold.

Activations are inputs of the graph, results of products with weights, and results of operators without a rule. The analysis
assumes that their magnitudes are at most ``ACTIVATION``. A value that may leave float16's range opens a chain. All values that
follow stay float32 until an operator closes the chain. This is a bounded function (Softmax, Tanh, Log, Clip), a normalisation, or
a product or quotient of the size of an activation. Rules do not depend on extents of axes, so that a model is narrowed alike at
every length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from rammer.frontend.op_traits import Trait, operators
from rammer.ir.graph import Graph, Node

#: Largest assumed magnitude of an activation: language models have channels of thousands.
ACTIVATION: Final = 1e4
#: Largest factor of an activation in the bound of a product with weights: a bias, and more, may follow.
LARGEST: Final = 4.0
#: Largest finite float16.
LIMIT: Final = 65504.0
#: Assumed number of terms of a sum.
COUNT: Final = 4096
#: Largest magnitude of a value divided by the root mean square of ``COUNT`` elements.
NORMALISED: Final = math.sqrt(COUNT)


@dataclass(frozen=True, slots=True)
class Magnitude:
    """The interval ``[low, high]`` of a value, and its derivation.

    A value of ``degree`` k is multiplied by s**k if all activations are multiplied by s. ``constant``: it depends on constants
    only. ``weighed``: it is a product with weights, except for a bias or a factor. ``statistic``: it is a sum or maximum of terms
    of one sign, or a power of such a sum. ``rows``: the sum of a row is 1. ``open``: it belongs to a chain that stays float32.
    """

    low: float = -ACTIVATION
    high: float = ACTIVATION
    degree: float = 1.0
    constant: bool = False
    weighed: bool = False
    statistic: bool = False
    rows: bool = False
    open: bool = False

    @property
    def bound(self) -> float:
        """Largest magnitude in the interval."""
        return max(abs(self.low), abs(self.high))

    @property
    def fits(self) -> bool:
        """True if float16 holds every such value, and it is not a reciprocal or power of an activation."""
        return self.bound <= LIMIT and 0 <= self.degree <= 1


def _symmetric_bound(bound: float, degree: float) -> Magnitude:
    return Magnitude(-bound, bound, degree)


#: Magnitude of results of operators without a rule.
ACTIVE: Final = Magnitude()
#: Products with weights -> the weight axes that are summed, by the rank of the weights.
_SUMMED: Final[Mapping[str, Callable[[Node, int], tuple[int, ...]]]] = {
    "MatMul": lambda _, rank: (max(rank - 2, 0),),
    "Gemm": lambda node, _: (1,) if node.attributes.get("transB", 0) else (0,),
    "Conv": lambda _, rank: tuple(range(1, rank)),
    "ConvTranspose": lambda _, rank: (0, *range(2, rank)),
    "DeformConv": lambda _, rank: tuple(range(1, rank)),
}
#: Operators that are one sum of products, which devices compute in float32.
PRODUCTS: Final = frozenset({*_SUMMED, "Einsum"} - {"DeformConv"})
#: Functions with a bounded result.
_BOUNDED: Final[Mapping[str, tuple[float, float]]] = {
    **{op: (0.0, 1.0) for op in ("Sigmoid", "HardSigmoid", "Hardmax")},
    **{op: (-1.0, 1.0) for op in ("Tanh", "Erf", "Softsign", "Sin", "Cos", "Sign")},
    **{op: (-4.0, 4.0) for op in ("Asin", "Acos", "Atan")},
    **{op: (-128.0, 128.0) for op in ("Log", "Asinh", "Acosh", "Atanh", "ReduceLogSum")},
}
#: Activations of recurrent operators with a bounded result, in lower case.
_SATURATING: Final = frozenset(("tanh", "sigmoid", "hardsigmoid", "softsign"))
#: Operators that move values.
_MOVES: Final = frozenset((*operators(Trait.MOVES | Trait.FILLS), "Dropout", "TopK"))
#: Functions whose result is about as large as their operand.
_ALIKE: Final = frozenset(
    (
        *("Neg", "LeakyRelu", "Elu", "Selu", "Celu", "Gelu", "Mish", "Swish", "HardSwish", "Shrink"),
        *("Floor", "Ceil", "Round", "Mod", "Resize", "Upsample", "GridSample", "RoiAlign"),
    )
)
_NONNEGATIVE: Final = frozenset(("Abs", "Relu", "Softplus", "ThresholdedRelu"))
#: Averages and extremes: a statistic if their operands are nonnegative.
_JOINING: Final = frozenset(
    (
        *("ReduceMean", "ReduceMax", "ReduceMin", "Max", "Min", "Mean", "MaxPool", "GlobalMaxPool"),
        *("AveragePool", "GlobalAveragePool"),
    )
)
#: Sums of powers along an axis: operator -> exponent of the terms, and exponent of the whole sum.
_SUMS: Final[Mapping[str, tuple[float, float]]] = {
    **dict.fromkeys(
        ("ReduceSum", "ReduceL1", "CumSum", "Col2Im", "ScatterElements", "ScatterND", "Sum", "DFT", "STFT"), (1.0, 1.0)
    ),
    "ReduceSumSquare": (2.0, 1.0),
    **dict.fromkeys(("ReduceL2", "LpPool", "GlobalLpPool"), (2.0, 0.5)),
}
_POSITIVE_SUMS: Final = frozenset(("ReduceL1", "ReduceL2", "ReduceSumSquare", "LpPool", "GlobalLpPool"))
_CLOSING: Final = frozenset(
    ("Softmax", "LogSoftmax", "ReduceLogSumExp", *_BOUNDED, *operators(Trait.RECURRENT | Trait.NORMALISATION), *PRODUCTS)
)


class Magnitudes:
    """The magnitude of every value of a graph, by name."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.made: dict[str, Node] = {o: n for n in graph.nodes for o in n.outputs if o}
        self.known: dict[str, Magnitude] = {}
        for node in graph.nodes:
            for output in filter(None, node.outputs):
                self.known[output] = self._bound_result(node, output)

    def of(self, name: str) -> Magnitude:
        """Return the magnitude of a value."""
        if name not in self.known:
            value = self.graph.constants.get(name)
            self.known[name] = _of_type(self.graph.types[name].dtype) if value is None else _of_constant(value)
        return self.known[name]

    def _bound_result(self, node: Node, output: str) -> Magnitude:
        operands = [self.of(n) for n in node.inputs if n]
        floats = [self.of(n) for n in node.inputs if n and _is_float(self.graph.types[n].dtype)]
        dtype = self.graph.types[output].dtype
        if operands and all(o.constant for o in operands):
            return replace(_symmetric_bound(max(o.bound for o in operands), 0), constant=True)
        if not _is_float(dtype):
            return _of_type(dtype)
        if node.op == "Cast":
            source = self.graph.types[node.inputs[0]].dtype
            return replace(operands[0], open=operands[0].open and dtype != "float16") if floats else _of_type(source)
        if not floats:
            return ACTIVE
        result = self._apply_rule(node, floats)
        follows = any(o.open for o in floats) and not self._is_chain_end(node, result)
        return replace(result, open=result.open or not result.fits or follows)

    def _is_chain_end(self, node: Node, result: Magnitude) -> bool:
        """Return True if ``node`` ends the chain of its operands, provided that its result fits."""
        if node.op in ("Mul", "Div"):
            return not result.statistic
        return node.op in _CLOSING or (node.op == "Clip" and result.bound < self.of(node.inputs[0]).bound)

    def _apply_rule(self, node: Node, operands: Sequence[Magnitude]) -> Magnitude:
        op, first = node.op, operands[0]
        if op in _BOUNDED:
            return Magnitude(*_BOUNDED[op], degree=0)
        if op in PRODUCTS:
            return self._product(node)
        if op in _SUMS:
            return _bound_reduction(op, operands)
        if op in _RULES:
            return _RULES[op](self, node)
        if op in ("LogSoftmax", "ReduceLogSumExp"):
            return _symmetric_bound(2 * first.bound + 10, first.degree)
        low, high = min(o.low for o in operands), max(o.high for o in operands)
        joined = Magnitude(low, high, max(o.degree for o in operands), statistic=all(o.statistic or o.constant for o in operands))
        if op in _MOVES:
            return replace(joined, rows=first.rows, weighed=first.weighed)
        if op in _ALIKE:
            factor = max(1.0, *(abs(float(node.attributes.get(name, 1.0))) for name in ("alpha", "gamma")))
            return replace(_symmetric_bound(joined.bound * factor, joined.degree), weighed=first.weighed)
        if op in _NONNEGATIVE:
            return replace(joined, low=0.0, high=joined.bound + 1, weighed=first.weighed)
        if op in _JOINING:
            return replace(joined, statistic=low >= 0)
        # Unknown operators, and functions without bounds (Tan, ReduceProd, Det).
        return ACTIVE if not any(o.open for o in operands) and op not in _UNBOUNDED else _symmetric_bound(math.inf, math.inf)

    # --- arithmetic ---------------------------------------------------------------------------

    def _bound_sum(self, node: Node) -> Magnitude:
        a, b = (self.of(n) for n in node.inputs)
        low, high = (a.low - b.high, a.high - b.low) if node.op == "Sub" else (a.low + b.low, a.high + b.high)
        degree, fixed = max(a.degree, b.degree), a.constant or b.constant
        statistic = node.op == "Add" and (a.statistic or a.constant) and (b.statistic or b.constant)
        if node.op == "Sub" and self._is_largest(node.inputs[1], node.inputs[0]):
            high = 0.0
        elif (a.weighed or b.weighed) and not fixed and a.fits and b.fits:
            # A residual connection: the sum has the size of an activation, regardless of the number of terms.
            low, high = min(a.low, -b.bound), max(a.high, b.bound)
        return Magnitude(low, high, degree, statistic=statistic, weighed=fixed and (a.weighed or b.weighed))

    def _is_largest(self, name: str, of: str) -> bool:
        node = self.made.get(name)
        return node is not None and node.op == "ReduceMax" and node.inputs[0] == of

    def _bound_multiplication(self, node: Node) -> Magnitude:
        a, b = (self.of(n) for n in node.inputs)
        degree = _add_degrees(a.degree, b.degree)
        statistic = (a.statistic or a.constant) and (b.statistic or b.constant)
        if node.inputs[0] == node.inputs[1]:
            return Magnitude(0.0, _multiply_or_zero(a.bound, a.bound), degree, statistic=statistic)
        if not statistic and any(o.statistic and o.degree < 0 for o in (a, b)):
            return _normalised_magnitude(degree)
        corners = [_multiply_or_zero(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
        weighed = (a.weighed and b.degree == 0) or (b.weighed and a.degree == 0)
        return Magnitude(min(corners), max(corners), degree, statistic=statistic, weighed=weighed)

    def _bound_slope(self, node: Node) -> Magnitude:
        """Return the magnitude of PRelu: that of its operand, or of the product with the slope."""
        product, data = self._bound_multiplication(node), self.of(node.inputs[0])
        return replace(_symmetric_bound(max(product.bound, data.bound), max(product.degree, data.degree)), weighed=data.weighed)

    def _bound_division(self, node: Node) -> Magnitude:
        return self._bound_quotient(node, self.of(node.inputs[0]), node.inputs[1])

    def _bound_reciprocal(self, node: Node) -> Magnitude:
        return self._bound_quotient(node, Magnitude(1, 1, 0, constant=True), node.inputs[0])

    def _bound_quotient(self, node: Node, a: Magnitude, divisor: str) -> Magnitude:
        b = self.of(divisor)
        degree = _add_degrees(a.degree, -b.degree)
        smallest = _smallest_magnitude(self.graph.constants.get(divisor)) if b.constant else max(b.low, 0.0)
        bound = a.bound / smallest if smallest else math.inf
        least = 0.0 if a.low >= 0 and b.low >= 0 else -bound
        if a.constant and b.statistic:
            return Magnitude(least, bound, degree, statistic=True)
        if b.statistic and not b.constant:
            total = self.made.get(divisor)
            if total is not None and total.op == "ReduceSum" and total.inputs[0] == node.inputs[0] and a.low >= 0:
                return Magnitude(0, 1, 0, rows=True)
            return _normalised_magnitude(degree)
        if not b.constant and bound <= LIMIT:
            degree = max(a.degree, 0.0) if a.degree <= 1 else degree
        return Magnitude(least, bound, degree, statistic=a.statistic and b.constant)

    def _bound_power(self, node: Node) -> Magnitude:
        base, exponent = self.of(node.inputs[0]), self.graph.constants.get(node.inputs[1])
        if exponent is None or exponent.size != 1:
            return Magnitude(0.0 if base.low >= 0 else -math.inf, math.inf, math.inf)
        p = float(exponent.reshape(()))
        if p == 0.5:
            return self._bound_sqrt(node)
        bound = _power_or_inf(base.bound, p) if p >= 0 else _power_or_inf(base.low, p) if base.low > 0 else math.inf
        least = 0.0 if base.low >= 0 or p % 2 == 0 else -bound
        return Magnitude(least, bound, base.degree * p, statistic=base.statistic)

    def _bound_sqrt(self, node: Node) -> Magnitude:
        a = self.of(node.inputs[0])
        return Magnitude(math.sqrt(max(a.low, 0.0)), math.sqrt(a.bound), a.degree / 2, statistic=a.statistic)

    def _bound_exponential(self, node: Node) -> Magnitude:
        operand = self.of(node.inputs[0])
        high = operand.high if node.op == "Exp" else operand.bound
        bound = math.exp(high) if high < 11 else math.inf
        return Magnitude(-bound if node.op == "Sinh" else 0.0, bound, 0 if bound <= LIMIT else math.inf)

    def _bound_clip(self, node: Node) -> Magnitude:
        operand = self.of(node.inputs[0])
        limits = [_scalar_value(self.graph.constants.get(n)) for n in (*node.inputs[1:3], "", "")[:2]]
        low, high = (sign * math.inf if v is None or abs(v) > LIMIT else v for v, sign in zip(limits, (-1, 1), strict=True))
        ends = max(operand.low, low), min(operand.high, high)
        degree = 0.0 if max(abs(low), abs(high)) <= LIMIT else operand.degree
        return Magnitude(min(ends), max(ends), degree, statistic=operand.statistic)

    # --- products -----------------------------------------------------------------------------

    def _product(self, node: Node) -> Magnitude:
        """Return the magnitude of a product. Products with weights have the size of an activation; sums of other products have
        ``COUNT`` terms."""
        names = node.inputs if node.op == "Einsum" else node.inputs[:2]
        data = [self.of(n) for n in names if not self.of(n).constant]
        if len(data) == 1 and len(names) > 1:
            weights = next(n for n in names if self.of(n).constant)
            return _bound_weighed(data[0], *self._weight_gains(node, weights))
        bound, degree = 1.0, 0.0
        for operand in data:
            bound, degree = _multiply_or_zero(bound, operand.bound), _add_degrees(degree, operand.degree)
        return _symmetric_bound(bound if any(d.rows for d in data) else _multiply_or_zero(bound, COUNT), degree)

    def _bound_deformable(self, node: Node) -> Magnitude:
        """Return the magnitude of DeformConv: a convolution of samples, which a mask may scale."""
        product = self._product(node)
        mask = self.of(node.inputs[4]) if len(node.inputs) > 4 and node.inputs[4] else Magnitude(0, 1, 0)
        bound = _multiply_or_zero(product.bound, max(mask.bound, 1.0))
        return replace(product, low=-bound, high=bound, degree=_add_degrees(product.degree, mask.degree))

    def _bound_batch_normalisation(self, node: Node) -> Magnitude:
        """Return the magnitude of BatchNormalization: a product with weights if scale and variance are constants."""
        data, scale, variance = (self.of(node.inputs[i]) for i in (0, 1, 4))
        epsilon, known = float(node.attributes.get("epsilon", 1e-5)), self.graph.constants
        if node.inputs[1] in known and node.inputs[4] in known:
            gains = np.abs(known[node.inputs[1]]) / np.sqrt(np.maximum(known[node.inputs[4]], 0) + epsilon)
            return _bound_weighed(data, *_norms(gains[:, None].astype(np.float32), (1,)))
        gain = scale.bound / math.sqrt(max(variance.low, 0.0) + epsilon)
        return _symmetric_bound(_multiply_or_zero(data.bound, gain), _add_degrees(data.degree, scale.degree))

    def _bound_codes(self, node: Node) -> Magnitude:
        """Return the magnitude of codes of 8 bits times a constant scale; other codes are of activations."""
        codes, scale = _LARGEST.get(self.graph.types[node.inputs[0]].dtype), self.of(node.inputs[1])
        return _symmetric_bound(codes * scale.bound, 1) if codes and scale.constant else ACTIVE

    def _weight_gains(self, node: Node, weights: str) -> tuple[float, float]:
        """Return the root mean square and the maximum of the Euclidean norms of the weights per result."""
        value, axes = self.graph.constants.get(weights), _SUMMED.get(node.op)
        if value is None or axes is None or weights != node.inputs[1]:
            return 1.0, 1.0
        return _norms(value, axes(node, value.ndim))

    def _bound_recurrence(self, node: Node) -> Magnitude:
        """Return the magnitude of the states. The chain stays float32 if a sum before an activation may become NaN.

        An infinite sum of the input's products saturates like a large one. The difference of two infinite sums is NaN, and so is
        Softsign of one. Products of the states must therefore fit, and with Softsign those of the input."""
        names = [*node.inputs, "", "", ""]
        states = [self.of(n).bound for n in names[5:7] if n]
        activations = {str(a).lower() for a in node.attributes.get("activations") or ()}
        high = max([1.0, *states]) if activations <= _SATURATING else math.inf
        total = self._bound_gates(names[2], high)
        if "softsign" in activations:
            total += self._bound_gates(names[1], min(self.of(names[0]).bound, ACTIVATION))
        return replace(_symmetric_bound(high, 0), open=total > LIMIT)

    def _bound_gates(self, weights: str, size: float) -> float:
        """Return the bound of products of gate weights ``[directions, gates, terms]`` with values of a size."""
        value = self.graph.constants.get(weights)
        return COUNT * size if value is None else _multiply_or_zero(size, _norms(value, (2,))[0])

    def _bound_normalisation(self, node: Node) -> Magnitude:
        scale, shift = (self.of(n).bound if n else 0.0 for n in (*node.inputs[1:3], "", "")[:2])
        return _symmetric_bound(NORMALISED * max(scale, 1.0) + shift, 0)

    def _bound_softmax(self, node: Node) -> Magnitude:
        return Magnitude(0, 1, 0, rows=True)


_RULES: Final[Mapping[str, Callable[[Magnitudes, Node], Magnitude]]] = {
    "Add": Magnitudes._bound_sum,
    "Sub": Magnitudes._bound_sum,
    "Mul": Magnitudes._bound_multiplication,
    "Div": Magnitudes._bound_division,
    "Reciprocal": Magnitudes._bound_reciprocal,
    "Pow": Magnitudes._bound_power,
    "Sqrt": Magnitudes._bound_sqrt,
    **dict.fromkeys(("Exp", "Sinh", "Cosh"), Magnitudes._bound_exponential),
    "Clip": Magnitudes._bound_clip,
    "PRelu": Magnitudes._bound_slope,
    **dict.fromkeys(operators(Trait.RECURRENT), Magnitudes._bound_recurrence),
    "Softmax": Magnitudes._bound_softmax,
    "BatchNormalization": Magnitudes._bound_batch_normalisation,
    "DeformConv": Magnitudes._bound_deformable,
    "DequantizeLinear": Magnitudes._bound_codes,
    **dict.fromkeys(operators(Trait.NORMALISATION), Magnitudes._bound_normalisation),
}
#: Functions whose result is unbounded regardless of the size of their operand.
_UNBOUNDED: Final = frozenset(("Tan", "ReduceProd", "CumProd", "Det", "LinearAttention"))
#: Largest values of short types that are converted to floats.
_LARGEST: Final = {"bool": 1.0, "int8": 128.0, "uint8": 255.0}


def _is_float(dtype: str) -> bool:
    return dtype in ("float16", "float32")


def _of_type(dtype: str) -> Magnitude:
    return ACTIVE if dtype.startswith("float") else _symmetric_bound(_LARGEST.get(dtype, ACTIVATION), 0)


def _of_constant(value: np.ndarray) -> Magnitude:
    if not value.size or value.dtype.kind not in "fiub":
        return Magnitude(0, 0, 0, constant=True)
    return Magnitude(float(np.min(value)), float(np.max(value)), 0, constant=True)


def _scalar_value(value: np.ndarray | None) -> float | None:
    return None if value is None or value.size != 1 else float(value.reshape(()))


def _norms(value: np.ndarray, over: tuple[int, ...]) -> tuple[float, float]:
    """Return the root mean square and the maximum of the Euclidean norms along the axes ``over``."""
    if not value.size:
        return 1.0, 1.0
    every = list(range(value.ndim))
    with np.errstate(over="ignore"):
        squares = np.einsum(value, every, value, every, [d for d in every if d not in over], dtype=np.float32)
    return float(np.sqrt(np.mean(squares))), float(np.sqrt(np.max(squares)))


def _smallest_magnitude(value: np.ndarray | None) -> float:
    return float(np.min(np.abs(value))) if value is not None and value.size else 0.0


def _bound_weighed(data: Magnitude, mean: float, most: float) -> Magnitude:
    """Return the magnitude of a product of ``data`` with weights of a mean and a largest gain.

    Activations do not grow from layer to layer: a product with weights again has the size of an activation, unless the weights
    are large. The result is then float32, and still a float16 operand of the next product."""
    bound = _multiply_or_zero(data.bound, most)
    if not data.fits:
        return replace(_symmetric_bound(bound, data.degree), weighed=True)
    large = min(data.bound, ACTIVATION) * mean > LIMIT
    bound = min(bound, ACTIVATION * (1.0 if large else max(1.0, min(most, LARGEST))))
    return replace(_symmetric_bound(bound, data.degree), weighed=True, open=large)


def _bound_reduction(op: str, operands: Sequence[Magnitude]) -> Magnitude:
    power, root = _SUMS[op]
    low, high = min(o.low for o in operands), max(o.high for o in operands)
    bound = _power_or_inf(_multiply_or_zero(_power_or_inf(max(-low, high), power), COUNT), root)
    positive = op in _POSITIVE_SUMS or low >= 0
    degree = max(o.degree for o in operands) * power * root
    return Magnitude(0.0 if positive else -bound, bound, degree, statistic=positive or not degree)


def _normalised_magnitude(degree: float) -> Magnitude:
    """Return the magnitude of a value divided by a statistic."""
    return _symmetric_bound(ACTIVATION if 0 < degree <= 1 else NORMALISED if degree == 0 else math.inf, degree)


def _add_degrees(a: float, b: float) -> float:
    """Return the degree of a product; infinite degrees cancel."""
    return 0.0 if math.isinf(a) and a == -b else a + b


def _multiply_or_zero(a: float, b: float) -> float:
    return 0.0 if not a or not b else a * b


def _power_or_inf(base: float, power: float) -> float:
    try:
        return float(base**power)
    except OverflowError:
        return math.inf
