"""Which implementation is known to be wrong where: decisions by the words of ONNX's specification, as data.

Three voices say what an operator computes: our own lowered expressions (``rammer``), ONNX Runtime (``onnxruntime``) and
``onnx.reference`` (``reference``). Where they differ the specification decides, and what it decided is a row of
``DECISIONS``: the operator, the condition, the voices that are wrong, and the words. Constant folding and host operators
ask before they use the reference, tests and the graph fuzzer before they believe a voice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from rammer.frontend import uses
from rammer.frontend.uses import Use

Voice: TypeAlias = Literal["rammer", "onnxruntime", "reference"]


@dataclass(frozen=True)
class Decision:
    """Where ``holds``, the voices in ``wrong`` do not say what the specification does; ``words`` quotes it."""

    ops: tuple[str, ...]
    when: str
    holds: Callable[[Use], bool]
    wrong: tuple[Voice, ...]
    words: str


def distrusted(voice: Voice, use: Use) -> Decision | None:
    """The decision against ``voice`` at this use, if there is one."""
    found = (d for d in BY_OPERATOR.get(use.op, ()) if voice in d.wrong and d.holds(use))
    return next(found, None)


DECISIONS: Final[tuple[Decision, ...]] = (
    Decision(
        ("RNN", "GRU", "LSTM"),
        "direction is not forward, activations are given, or sequence_lens",
        uses.unusual_cell,
        ("reference",),
        "direction: 'Specify if the RNN is forward, reverse, or bidirectional'; activations: 'A list of 3 (or 6 if "
        "bidirectional) activation functions'; sequence_lens: 'specifying lengths of the sequences in a batch'. The "
        "reference uses its own activations (some versions always run forward) and reads no lengths.",
    ),
    Decision(
        ("RNN", "GRU", "LSTM"),
        "clip or input_forget",
        uses.given("clip", "input_forget"),
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
        ("MaxPool",),
        "the Indices output, auto_pad, or ceil_mode",
        lambda use: any(use.wanted[1:]) or uses.automatic(use) or bool(use.attr("ceil_mode", 0)),
        ("reference",),
        "'pad_shape[i] = (output_spatial_shape[i] - 1) * strides_spatial_shape[i] + ((kernel_spatial_shape[i] - 1) * "
        "dilations[i] + 1) - input_spatial_shape[i]'; 'Sliding windows that would start in the right padded region are ignored'.",
    ),
    Decision(
        ("AveragePool", "LpPool"),
        "auto_pad, ceil_mode or dilations",
        lambda use: uses.automatic(use) or bool(use.attr("ceil_mode", 0)) or any(d != 1 for d in use.attr("dilations") or ()),
        ("reference",),
        "The same formulas as MaxPool's.",
    ),
    Decision(
        ("MaxPool",),
        "pads that differ between dimensions or sides",
        lambda use: len(set(use.attr("pads") or ())) > 1,
        ("reference",),
        "'pads format should be as follow [x1_begin, x2_begin...x1_end, x2_end,...]'. The reference takes them in another order.",
    ),
    Decision(
        ("MaxPool", "AveragePool", "LpPool"),
        "nothing fits, VALID with ceil_mode, SAME with dilations or with strides that leap",
        uses.leaping,
        ("onnxruntime",),
        "'floor((input_spatial_shape[i] + pad_shape[i] - dilation[i] * (kernel_shape[i] - 1) - 1) / strides_spatial_shape[i] + "
        "1)', 'VALID: ceil((input_spatial_shape[i] - ((kernel_spatial_shape[i] - 1) * dilations[i] + 1) + 1) / "
        "strides_spatial_shape[i])', 'SAME_UPPER or SAME_LOWER: ceil(input_spatial_shape[i] / strides_spatial_shape[i])', 'the "
        "extra padding is added at the end for SAME_UPPER and at the beginning for SAME_LOWER'. ONNX Runtime rounds towards "
        "zero, takes VALID for pads of 0, leaves dilations out of SAME and halves negative paddings in another way.",
    ),
    Decision(
        ("MaxPool",),
        "windows over padding alone",
        uses.padding_alone,
        ("reference",),
        "'The output of each pooling window is maximum number of elements exclude pad', and of no elements the maximum is, as "
        "ReduceMax has it, 'minus infinity (if supported by the datatype) or the minimum value of the data type otherwise'. The "
        "reference gives NaN.",
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
        ("GridSample",),
        "cubic with a border",
        lambda use: use.attr("mode") in ("cubic", "bicubic") and use.attr("padding_mode") == "border",
        ("reference",),
        "'border: use border pixel values for outside grid locations', as torch's grid_sample, of which every sampled "
        "pixel is one. The reference moves the location itself to the border.",
    ),
    Decision(
        ("ConvTranspose",),
        "groups, output_shape, or SAME",
        lambda use: use.attr("group", 1) > 1 or bool(use.attr("output_shape")) or uses.automatic(use),
        ("reference",),
        "'output_shape[i] = input_shape[i] * strides[i]' and 'pads[start_i] = total_padding[i]/2'; the reference pads in front "
        "where the result is larger than the scattered input, and mixes up groups of one feature.",
    ),
    Decision(
        ("ConvTranspose",),
        "a result larger than the scattered input",
        uses.automatic,
        ("onnxruntime",),
        "'pad the input so that output_shape[i] = input_shape[i] * strides[i]'. ONNX Runtime gives less where a stride leaps "
        "over more than the kernel covers.",
    ),
    Decision(
        ("Conv",),
        "group, SAME, or a stride that leaps",
        uses.automatic,
        ("reference",),
        "'pad the input so that output_shape[i] = ceil(input_shape[i] / strides[i])'.",
    ),
    Decision(
        ("GlobalMaxPool",),
        "not two spatial dimensions",
        lambda use: len(use.shape()) != 4,
        ("reference",),
        "'dimensions are in the form of (N x C x D1 x D2 ... Dn)'; the output has 'the same rank as the input'. The reference "
        "loses or adds dimensions.",
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
        (
            "ReduceSum",
            "ReduceMean",
            "ReduceMax",
            "ReduceMin",
            "ReduceProd",
            "ReduceL1",
            "ReduceL2",
            "ReduceLogSum",
            "ReduceLogSumExp",
            "ReduceSumSquare",
        ),
        "tensors without elements",
        lambda use: use.empty,
        ("onnxruntime",),
        "'Reduction over an empty set of values yields' an identity; ONNX Runtime reduces all axes where only some are named.",
    ),
    Decision(
        ("GroupNormalization",),
        "all",
        uses.always,
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
        ("LRN",),
        "all",
        uses.always,
        ("reference",),
        "'max(0, c - floor((size - 1) / 2)) <= i <= min(C - 1, c + ceil((size - 1) / 2))'. The reference leaves out the last "
        "channel of the window.",
    ),
    Decision(
        ("MeanVarianceNormalization",),
        "all",
        uses.always,
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
        ("RNN", "GRU", "LSTM"),
        "ThresholdedRelu without its alpha",
        lambda use: "ThresholdedRelu" in (use.attr("activations") or ()) and not use.attr("activation_alpha"),
        ("onnxruntime",),
        "'Default values are the same as of corresponding ONNX operators', and ThresholdedRelu's is 1. ONNX Runtime takes 0.",
    ),
    Decision(
        ("RNN", "GRU", "LSTM"),
        "ThresholdedRelu at its threshold, where clip puts elements",
        lambda use: "ThresholdedRelu" in (use.attr("activations") or ()) and bool(use.attr("clip")),
        ("onnxruntime",),
        "'ThresholdedRelu(x) - x if x >= alpha else 0', and clip 'is applied to the input of activations': what is clipped to "
        "alpha stays. ONNX Runtime compares as the operator of that name does, 'y = x for x > alpha'.",
    ),
    Decision(
        ("RNN", "GRU", "LSTM"),
        "Softplus among the activations",
        lambda use: "Softplus" in (use.attr("activations") or ()),
        ("onnxruntime",),
        "'Softplus(x) - log(1 + e^x)', which is x for a large x. ONNX Runtime takes e^x in float32, infinite above 88, and gives "
        "infinity, or NaN where a gate multiplies it by 0.",
    ),
    Decision(
        ("RNN", "GRU", "LSTM"),
        "sequences without steps, and an initial state",
        uses.stepless,
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
        ("Resize",),
        "places upon pixels by a scale that is rounded",
        uses.beside_pixels,
        ("reference",),
        "'The data in the neighborhood of x_original', of which the nearest one is x_original itself where that is whole. The "
        "reference seeks neighbours of x_original + padding, whose rounding is another one, and weighs them for x_original.",
    ),
    Decision(
        ("Slice",),
        "negative steps from before the front",
        uses.backwards,
        ("reference",),
        "'starts[axes[i]] is clamped to the range [0, dims[axes[i]]] for positive stepping, or [0, dims[axes[i]]-1] for negative "
        "stepping': a start before the front is the first element. The reference slices as Python does, which gives nothing.",
    ),
    Decision(
        ("LpPool",),
        "pads",
        lambda use: any(use.attr("pads") or ()),
        ("reference",),
        "'Lp pooling consisting of computing the Lp norm on all values of a subset of the input tensor'. The reference "
        "multiplies an average by the whole kernel's size, also where the average counted fewer elements.",
    ),
    Decision(
        ("Resize",),
        "tf_crop_and_resize or pytorch_half_pixel",
        lambda use: use.attr("coordinate_transformation_mode") in ("tf_crop_and_resize", "pytorch_half_pixel"),
        ("reference",),
        "'length_resized as the length of the resized tensor in axis x'; 'x_original = length_resized > 1 ? (x_resized + 0.5) / "
        "scale - 0.5 : 0'. The reference takes the product of the length and the scale, which may have a fraction, and -0.5.",
    ),
    Decision(
        ("Resize",),
        "tf_crop_and_resize",
        lambda use: use.attr("coordinate_transformation_mode") == "tf_crop_and_resize",
        ("onnxruntime",),
        "'start_x * (length_original - 1) + x_resized * (end_x - start_x) * (length_original - 1) / (length_resized - 1)' holds "
        "for every axis. ONNX Runtime copies an axis whose extent stays, whatever part of it roi names.",
    ),
    Decision(
        ("Resize",),
        "align_corners with scales, given or by keep_aspect_ratio_policy",
        lambda use: (
            use.attr("coordinate_transformation_mode") == "align_corners"
            and (use.shape(2) not in ((), (0,)) or use.attr("keep_aspect_ratio_policy", "stretch") != "stretch")
        ),
        ("onnxruntime",),
        "'output_width the target length on the axis x which can be a fractional number when it is calculated out of a scale "
        "factor': ONNX's node tests (resize_downsample_scales_linear_align_corners) divide by that; ONNX Runtime rounds first. "
        "With a policy a scale is computed, too: 'scale = Min(sizes[i] / in_size[d])'.",
    ),
    Decision(
        ("Resize",),
        "axes with keep_aspect_ratio_policy",
        lambda use: bool(use.attr("axes")) and use.attr("keep_aspect_ratio_policy", "stretch") != "stretch",
        ("onnxruntime",),
        "'scale = Max(sizes[i] / in_size[d]), out_size[d] = round_int(scale * in_size[d])'. ONNX Runtime keeps the size.",
    ),
    Decision(
        ("Resize",),
        "cubic with exclude_outside",
        lambda use: use.attr("mode") == "cubic" and bool(use.attr("exclude_outside", 0)),
        ("reference",),
        "exclude_outside: 'If set to 1, the weight of sampling locations outside the tensor will be set to 0 and the weight "
        "will be renormalized so that their sum is 1.0'.",
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
        (
            "ReduceSum",
            "ReduceProd",
            "ReduceL1",
            "ReduceL2",
            "ReduceLogSum",
            "ReduceLogSumExp",
            "ReduceSumSquare",
            "ReduceMax",
            "ReduceMin",
            "ReduceMean",
        ),
        "nothing to reduce",
        lambda use: use.empty,
        ("onnxruntime",),
        "'Reduction over an empty set of values yields 0' (or the like), in a result of 'the same rank as the input'. ONNX "
        "Runtime keeps extents of 0 that are reduced, for some element types.",
    ),
    Decision(
        ("DynamicQuantizeLinear",),
        "nothing but zeros",
        uses.zeros,
        ("onnxruntime", "reference"),
        "'y_scale = (maximum(0, max(x)) - minimum(0, min(x))) / (qmax - qmin)', which the operator's body in ONNX computes by "
        "Sub and Div without a condition: 0. ONNX Runtime says 1 and the reference 1 / 255.",
    ),
)

#: The decisions on each operator.
BY_OPERATOR: Final[Mapping[str, tuple[Decision, ...]]] = {
    op: tuple(d for d in DECISIONS if op in d.ops) for op in dict.fromkeys(o for d in DECISIONS for o in d.ops)
}
