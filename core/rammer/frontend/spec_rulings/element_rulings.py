"""Decisions on elements, reductions, products and recurrent layers: all operators outside ``window_rulings``."""

from __future__ import annotations

from typing import Final

from rammer.frontend.op_traits import Trait, operators
from rammer.frontend.spec_rulings import operator_questions
from rammer.frontend.spec_rulings.operator_questions import Decision

ELEMENTS: Final[tuple[Decision, ...]] = (
    Decision(
        operators(Trait.RECURRENT),
        "direction is not forward, activations are given, or sequence_lens",
        operator_questions.unusual_cell,
        ("reference",),
        "direction: 'Specify if the RNN is forward, reverse, or bidirectional'; activations: 'A list of 3 (or 6 if "
        "bidirectional) activation functions'; sequence_lens: 'specifying lengths of the sequences in a batch'. The "
        "reference uses its own activations (some versions always run forward) and reads no lengths.",
    ),
    Decision(
        operators(Trait.RECURRENT),
        "clip or input_forget",
        operator_questions.has_attribute("clip", "input_forget"),
        ("reference",),
        "clip: 'Clipping bounds the elements of a tensor in the range of [-threshold, +threshold] and is applied to the "
        "input of activations'; input_forget: 'Couple the input and forget gates if 1'. The reference reads neither.",
    ),
    Decision(
        ("LpNormalization",),
        "p=1, or axis 0",
        lambda use: use.attr("p", 2) == 1 or use.attr("axis", -1) == 0,
        ("reference",),
        "'output = input / Lp_norm(input, axis)', and a norm sums magnitudes. The reference sums x^p with its sign, and "
        "takes axis 0 for an axis left out.",
    ),
    Decision(
        ("ArgMax", "ArgMin", "Hardmax", "MaxPool", "GlobalMaxPool", "ReduceMax", "ReduceMin", "Max", "Min"),
        "NaN among the elements",
        lambda use: use.nan,
        ("onnxruntime",),
        "ONNX is silent ('Computes the indices of the max elements of the input tensor's element'). As in NumPy and torch a NaN "
        "is the largest and the smallest element of its row: what is no number must not be lost. ONNX Runtime may pass over it.",
    ),
    Decision(
        ("Sign",),
        "NaN among the elements",
        lambda use: use.nan,
        ("onnxruntime",),
        "'If input > 0, output 1. if input < 0, output -1. if input == 0, output 0': NaN is none of them, and 0 least of all. As "
        "in NumPy, torch and the reference it stays NaN. ONNX Runtime gives 0.",
    ),
    Decision(
        ("Pow",),
        "minus infinity to the power of 0.5",
        operator_questions.infinite_root,
        ("reference",),
        "'f(x) = x^exponent', which C's pow and ONNX Runtime give as infinity for minus infinity. The reference takes the square "
        "root, NaN, where NumPy broadcasts an exponent of 0.5.",
    ),
    Decision(
        ("Hardmax",),
        "opsets up to 12",
        lambda use: use.version < 13,
        ("reference",),
        "'Input does not need to explicitly be a 2D vector; rather, it will be coerced into one.' The reference goes along axis.",
    ),
    Decision(
        ("Softmax", "LogSoftmax"),
        "opsets up to 12",
        lambda use: use.version < 13,
        ("reference",),
        "'Input does not need to explicitly be a 2D vector; rather, it will be coerced into one.' The reference goes along axis.",
    ),
    Decision(
        ("Unsqueeze",),
        "axes as an attribute",
        lambda use: use.version < 13,
        ("reference",),
        "'The order of values in axes does not matter and can come in any order'. In the reference it matters.",
    ),
    Decision(
        ("BatchNormalization",),
        "opsets up to 13",
        lambda use: use.version < 14,
        ("reference",),
        "'epsilon: The epsilon value to use to avoid division by zero.' The reference does not read it.",
    ),
    Decision(
        ("MeanVarianceNormalization",),
        "means of one element",
        lambda use: all(n == 1 for d, n in enumerate(use.shape()) if d in use.attr("axes", (0, 2, 3))),
        ("onnxruntime",),
        "'(X-EX)/sqrt(E(X-EX)^2)', whose body in ONNX adds 1e-9 to the root: 0. ONNX Runtime divides 0 by 0.",
    ),
    Decision(
        ("Dropout",),
        "the mask up to opset 11",
        lambda use: use.version < 12 and any(use.wanted[1:]),
        ("onnxruntime",),
        "'output = scale * data * mask': the mask of a plain copy is true everywhere. ONNX Runtime gives false.",
    ),
    Decision(
        operators(Trait.REDUCTION),
        "tensors without elements",
        lambda use: use.empty,
        ("onnxruntime",),
        "'Reduction over an empty set of values yields 0' (or the like), in a result of 'the same rank as the input'. ONNX "
        "Runtime reduces all axes where only some are named, and for some element types keeps extents of 0 that are reduced.",
    ),
    Decision(
        ("GroupNormalization",),
        "all",
        operator_questions.is_any_use,
        ("reference",),
        "'y = scale * (x - mean) / sqrt(variance + epsilon) + bias'. The reference takes a variance that cancels.",
    ),
    Decision(
        ("LayerNormalization",),
        "the other outputs",
        lambda use: any(use.wanted[1:]) and use.dtype() != "float32",
        ("reference",),
        "'stash_type: Type of Mean and InvStdDev', float32 by default; the reference keeps the type of the input.",
    ),
    Decision(
        ("MeanVarianceNormalization",),
        "all",
        operator_questions.is_any_use,
        ("reference",),
        "'(X-EX)/sqrt(E(X-EX)^2)' over the given axes. The reference takes E(X^2)-(EX)^2, which cancels.",
    ),
    Decision(
        ("ReduceSumSquare",),
        "integers",
        lambda use: "int" in use.dtype(),
        ("reference",),
        "The output has the type of the input; the reference widens it.",
    ),
    Decision(
        operators(Trait.RECURRENT),
        "ThresholdedRelu without its alpha",
        lambda use: "ThresholdedRelu" in (use.attr("activations") or ()) and not use.attr("activation_alpha"),
        ("onnxruntime",),
        "'Default values are the same as of corresponding ONNX operators', and ThresholdedRelu's is 1. ONNX Runtime takes 0.",
    ),
    Decision(
        operators(Trait.RECURRENT),
        "ThresholdedRelu at its threshold, where clip puts elements",
        lambda use: "ThresholdedRelu" in (use.attr("activations") or ()) and bool(use.attr("clip")),
        ("onnxruntime",),
        "'ThresholdedRelu(x) - x if x >= alpha else 0', and clip 'is applied to the input of activations': what is clipped to "
        "alpha stays. ONNX Runtime compares as the operator of that name does, 'y = x for x > alpha'.",
    ),
    Decision(
        operators(Trait.RECURRENT),
        "Softplus among the activations",
        lambda use: "Softplus" in (use.attr("activations") or ()),
        ("onnxruntime",),
        "'Softplus(x) - log(1 + e^x)', which is x for a large x. ONNX Runtime takes e^x in float32, infinite above 88, and gives "
        "infinity, or NaN where a gate multiplies it by 0.",
    ),
    Decision(
        operators(Trait.RECURRENT),
        "sequences without steps, and an initial state",
        operator_questions.has_empty_sequence,
        ("onnxruntime",),
        "sequence_lens: 'specifying lengths of the sequences in a batch'; initial_h: 'Optional initial value of the hidden'; "
        "Y_h: 'The last output value of the hidden', before the first step the initial one. ONNX Runtime gives 0.",
    ),
    Decision(
        (
            "MatMul",
            "QLinearMatMul",
            "MatMulInteger",
            "Gemm",
            "Conv",
            "ConvTranspose",
            "ConvInteger",
            "QLinearConv",
            "RNN",
            "GRU",
            "LSTM",
        ),
        "products over nothing",
        lambda use: use.empty,
        ("onnxruntime",),
        "'Matrix product that behaves like numpy.matmul', where a sum over nothing is 0. ONNX Runtime leaves in the result what "
        "was in its memory, under a bias or in the gates, too; GRU ends its process.",
    ),
    Decision(
        ("Shrink",),
        "integers of more than 16 bits",
        lambda use: use.dtype().removeprefix("u") in ("int32", "int64"),
        ("onnxruntime",),
        "'If x < -lambd, y = x + bias; If x > lambd, y = x - bias; Otherwise, y = 0', of 'T: tensor(int64), ...'. ONNX Runtime "
        "computes in float32, which rounds integers above 2^24.",
    ),
    Decision(
        ("Slice",),
        "negative steps from before the front",
        operator_questions.is_backward_slice,
        ("reference",),
        "'starts[axes[i]] is clamped to the range [0, dims[axes[i]]] for positive stepping, or [0, dims[axes[i]]-1] for negative "
        "stepping': a start before the front is the first element. The reference slices as Python does, which gives nothing.",
    ),
    Decision(
        ("ReduceL2", "ReduceSumSquare", "ReduceL1"),
        "integers of 8 or 16 bits",
        lambda use: use.dtype().removeprefix("u") in ("int8", "int16"),
        ("reference",),
        "'Computes the L2 norm of the input tensor's elements'. The reference squares in the element type, which wraps.",
    ),
    Decision(
        ("ReduceL2",),
        "any integers",
        lambda use: "int" in use.dtype(),
        ("reference",),
        "As above: the squares of large 32-bit integers wrap as well.",
    ),
    Decision(
        ("ReduceLogSum",),
        "integers",
        lambda use: "int" in use.dtype(),
        ("reference",),
        "Opsets up to 27 allow integers; the reference refuses them.",
    ),
    Decision(
        ("DynamicQuantizeLinear",),
        "nothing but zeros",
        operator_questions.is_zero_input,
        ("onnxruntime", "reference"),
        "'y_scale = (maximum(0, max(x)) - minimum(0, min(x))) / (qmax - qmin)', which the operator's body in ONNX computes by "
        "Sub and Div without a condition: 0. ONNX Runtime says 1 and the reference 1 / 255.",
    ),
    Decision(
        ("QuantizeLinear", "QLinearConv", "QLinearMatMul"),
        "a scale of 0",
        operator_questions.has_zero_scale,
        ("onnxruntime", "reference"),
        "'y = saturate((x / y_scale) + y_zero_point)', of a quotient by 0 nothing. Ours takes 0 / 0 for 0; others turn NaN into "
        "an integer, which is whatever the processor makes of it.",
    ),
    Decision(
        ("QuantizeLinear",),
        "quotients that 32 bits do not hold",
        operator_questions.has_int32_overflow,
        ("reference",),
        "'y = saturate((x / y_scale) + y_zero_point)'. The reference goes through int32, where a large number becomes the least.",
    ),
    Decision(
        ("QuantizeLinear",),
        "quotients that 32 bits do not hold, by blocks",
        lambda use: bool(use.attr("block_size")) and operator_questions.has_int32_overflow(use),
        ("onnxruntime",),
        "As above: so does ONNX Runtime where a scale belongs to a block.",
    ),
    Decision(
        ("QLinearConv", "QLinearMatMul"),
        "an odd zero point of the result",
        operator_questions.has_odd_zero_point,
        ("reference",),
        "'For (x / y_scale), it is rounding to nearest ties to even', and then it is moved. The reference adds first.",
    ),
    Decision(
        ("QLinearConv", "ConvInteger"),
        "scales or zero points of channels, in other than two spatial dimensions",
        operator_questions.by_channel,
        ("reference",),
        "'If it's a 1-D tensor, its number of elements should be equal to the number of output channels (M)'. The reference "
        "makes axes of two spatial dimensions of it.",
    ),
    Decision(
        ("LogSoftmax",),
        "elements far below the largest",
        operator_questions.is_any_use,
        ("reference",),
        "'LogSoftmax(input, axis) = Log(Softmax(input, axis=axis))', which is x - max - log(sum(exp(x - max))) also where the "
        "softmax is too small for its type. The reference takes the logarithm of what it rounded to 0.",
    ),
    Decision(
        ("ReduceMean",),
        "integers over nothing",
        lambda use: use.empty and "int" in use.dtype(),
        ("reference",),
        "'Reduction over an empty set of values yields undefined.' Ours is 0; the reference turns NaN into an integer, which is "
        "whatever the processor makes of it.",
    ),
)
