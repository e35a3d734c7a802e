"""Facts about ONNX operators, in one table with one row for each operator.

A property that several modules need is a ``Trait``, and is named here only. The source of a fact is the operator's ONNX
specification. ``tests/core/test_op_traits.py`` derives the facts again, from shape inference and from the lowerings.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Flag, auto
from functools import cache
from typing import Final

from rammer.ir.graph import Node


class Trait(Flag):
    """Properties that an operator of the standard domain has for all attributes."""

    #: An element of the one result depends on the element of every operand at the same index, with operands broadcast.
    ELEMENTWISE = auto()
    #: The result has the elements of the first operand in the same order.
    RESHAPES = auto()
    #: Every element of the results is an element of a moved operand, at a place that no moved value determines.
    MOVES = auto()
    #: As ``MOVES``, except for elements that are 0 or a parameter.
    FILLS = auto()
    #: It is defined for all values of its operands.
    TOTAL = auto()
    #: It is defined for all values of floats; integers may be divided by zero.
    TOTAL_OF_FLOATS = auto()
    #: The order of its two operands changes no bit of the result. Of Max and Min, it decides between 0.0 and -0.0.
    COMMUTATIVE = auto()
    #: It combines elements along the axes in operand 1.
    REDUCTION = auto()
    #: It multiplies matrices; operand 1 may be weights.
    MATRIX_PRODUCT = auto()
    #: It is a convolution; operand 1 may be weights.
    CONVOLUTION = auto()
    #: It divides elements by a statistic of them.
    NORMALISATION = auto()
    #: It is a recurrent layer. Initial states start at input 5, last states at output 1.
    RECURRENT = auto()
    #: Two runs with equal operands may differ.
    RANDOM = auto()
    #: Its result depends only on the type of its operand.
    TYPE_ONLY = auto()


_MOVES: Final = Trait.MOVES | Trait.TOTAL
_FILLS: Final = Trait.FILLS | Trait.TOTAL
_MAP: Final = Trait.ELEMENTWISE | Trait.TOTAL
#: Roles of operands: ``x`` is moved to the results, ``s`` is a size, and ``a`` is an axis, bound or scale. Values of ``s`` and
#: ``a`` determine extents, ranks or axes. ``.`` is any other operand. Concat moves all its operands.
TABLE: Final[tuple[tuple[str, Trait, str], ...]] = (
    ("Abs Acos Acosh Asin Asinh Atan Atanh BitCast BitwiseNot Cast Ceil Celu Clip Cos Cosh Elu Erf Exp Floor Gelu", _MAP, ""),
    ("HardSigmoid HardSwish IsInf IsNaN LeakyRelu Log Mish Neg Not Relu Round Selu Shrink Sigmoid Sign Sin Sinh", _MAP, ""),
    ("Softplus Softsign Sqrt Swish Tan Tanh ThresholdedRelu", _MAP, ""),
    ("Greater GreaterOrEqual Less LessOrEqual Max Min PRelu Sub", _MAP, ""),
    ("Add And BitwiseAnd BitwiseOr BitwiseXor Equal Mean Mul Or Sum Xor", _MAP | Trait.COMMUTATIVE, ""),
    ("Div Mod Pow Reciprocal", Trait.ELEMENTWISE | Trait.TOTAL_OF_FLOATS, ""),
    ("BitShift", Trait.ELEMENTWISE, ""),
    ("CastLike Softmax LogSoftmax", Trait.TOTAL, ""),
    ("Where", _MAP | Trait.MOVES, ".xx"),
    ("Identity", _MAP | _MOVES | Trait.RESHAPES, "x"),
    ("Reshape", _MOVES | Trait.RESHAPES, "xs"),
    ("Squeeze Unsqueeze", _MOVES | Trait.RESHAPES, "xa"),
    ("Flatten", _MOVES | Trait.RESHAPES, "x"),
    ("DepthToSpace SpaceToDepth Transpose", _MOVES, "x"),
    ("Expand Split Tile", _MOVES, "xs"),
    ("Slice", _MOVES, "xaaaa"),
    ("Concat", _MOVES, "x"),
    ("Compress Gather GatherElements GatherND ReverseSequence", Trait.MOVES, "x"),
    ("TensorScatter", Trait.MOVES, "xx"),
    ("CenterCropPad", _FILLS, "xs"),
    ("Pad", _FILLS, "xs.a"),
    ("Trilu", _FILLS, "xa"),
    ("MaxUnpool", Trait.FILLS, "x.s"),
    ("Constant", _FILLS, ""),
    ("ConstantOfShape", _FILLS, "s"),
    ("OneHot", _FILLS, ".sx"),
    ("Shape Size", Trait.TYPE_ONLY | Trait.TOTAL, ""),
    ("ReduceSum ReduceMean ReduceMax ReduceMin ReduceProd", Trait.REDUCTION | Trait.TOTAL, ".a"),
    ("ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceSumSquare", Trait.REDUCTION | Trait.TOTAL, ".a"),
    ("MatMul Gemm", Trait.MATRIX_PRODUCT | Trait.TOTAL, ""),
    ("Conv ConvTranspose ConvInteger QLinearConv", Trait.CONVOLUTION, ""),
    ("LayerNormalization RMSNormalization GroupNormalization InstanceNormalization", Trait.NORMALISATION, ""),
    ("LpNormalization MeanVarianceNormalization", Trait.NORMALISATION, ""),
    ("LSTM GRU RNN", Trait.RECURRENT, ""),
    ("Bernoulli Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike", Trait.RANDOM, ""),
    ("AffineGrid SplitToSequence TopK", Trait(0), ".s"),
    ("BlackmanWindow HammingWindow HannWindow", Trait(0), "s"),
    ("Col2Im", Trait(0), ".ss"),
    ("CumProd CumSum Upsample", Trait(0), ".a"),
    ("DFT", Trait(0), ".sa"),
    ("MelWeightMatrix", Trait(0), "sssaa"),
    ("Range", Trait(0), "aaa"),
    ("Resize", Trait(0), ".aas"),
    ("STFT", Trait(0), ".s.s"),
)
#: Operator -> its traits and the roles of its operands.
_ROWS: Final[Mapping[str, tuple[Trait, str]]] = {op: (traits, roles) for ops, traits, roles in TABLE for op in ops.split()}


@cache
def operators(traits: Trait) -> tuple[str, ...]:
    """Return the operators with at least one of ``traits``, in the order of the table."""
    return tuple(op for op, (own, _) in _ROWS.items() if own & traits)


@cache
def _operator_set(traits: Trait) -> frozenset[str]:
    return frozenset(operators(traits))


def has_trait(node: Node, traits: Trait) -> bool:
    """Return True if ``node`` is an operator of the standard domain with at least one of ``traits``."""
    return not node.domain and node.op in _operator_set(traits)


def moved_operands(node: Node) -> tuple[int, ...]:
    """Return the positions of the operands of ``node`` whose elements its results contain."""
    return tuple(range(len(node.inputs))) if node.op == "Concat" else _with_role(node.op, "x")


def size_operands(op: str) -> tuple[int, ...]:
    """Return the positions of operands that are sizes."""
    return _with_role(op, "s")


def shape_operands(op: str) -> tuple[int, ...]:
    """Return the positions of operands whose values determine extents, ranks or axes: sizes, axes, bounds and scales."""
    return _with_role(op, "sa")


@cache
def _with_role(op: str, roles: str) -> tuple[int, ...]:
    return tuple(i for i, role in enumerate(_ROWS.get(op, (Trait(0), ""))[1]) if role in roles)
