"""Decisions on operators that slide windows, pad, or sample between elements."""

from __future__ import annotations

from typing import Final

from rammer.frontend.spec_rulings import operator_questions
from rammer.frontend.spec_rulings.operator_questions import Decision

WINDOWS: Final[tuple[Decision, ...]] = (
    Decision(
        ("MaxPool",),
        "the Indices output, auto_pad, or ceil_mode",
        lambda use: any(use.wanted[1:]) or operator_questions.has_auto_padding(use) or bool(use.attr("ceil_mode", 0)),
        ("reference",),
        "'pad_shape[i] = (output_spatial_shape[i] - 1) * strides_spatial_shape[i] + ((kernel_spatial_shape[i] - 1) * "
        "dilations[i] + 1) - input_spatial_shape[i]'; 'Sliding windows that would start in the right padded region are ignored'.",
    ),
    Decision(
        ("AveragePool", "LpPool"),
        "auto_pad, ceil_mode or dilations",
        lambda use: (
            operator_questions.has_auto_padding(use)
            or bool(use.attr("ceil_mode", 0))
            or any(d != 1 for d in use.attr("dilations") or ())
        ),
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
        operator_questions.has_irregular_windows,
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
        operator_questions.padding_alone,
        ("reference", "onnxruntime"),
        "'The output of each pooling window is maximum number of elements exclude pad', and of no elements the maximum is, as "
        "ReduceMax has it, 'minus infinity (if supported by the datatype) or the minimum value of the data type otherwise'. The "
        "reference gives NaN, ONNX Runtime the least finite number, which less itself is 0 where infinity's difference is NaN, "
        "and for 'the indices of the selected values' what lies in its memory.",
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
        lambda use: use.attr("group", 1) > 1 or bool(use.attr("output_shape")) or operator_questions.has_auto_padding(use),
        ("reference",),
        "'output_shape[i] = input_shape[i] * strides[i]' and 'pads[start_i] = total_padding[i]/2'; the reference pads in front "
        "where the result is larger than the scattered input, and mixes up groups of one feature.",
    ),
    Decision(
        ("ConvTranspose",),
        "a result larger than the scattered input",
        operator_questions.has_auto_padding,
        ("onnxruntime",),
        "'pad the input so that output_shape[i] = input_shape[i] * strides[i]'. ONNX Runtime gives less where a stride leaps "
        "over more than the kernel covers.",
    ),
    Decision(
        ("Conv",),
        "group, SAME, or a stride that leaps",
        operator_questions.has_auto_padding,
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
        ("LRN",),
        "all",
        operator_questions.is_any_use,
        ("reference",),
        "'max(0, c - floor((size - 1) / 2)) <= i <= min(C - 1, c + ceil((size - 1) / 2))'. The reference leaves out the last "
        "channel of the window.",
    ),
    Decision(
        ("Resize",),
        "places upon pixels by a scale that is rounded",
        operator_questions.beside_pixels,
        ("reference",),
        "'The data in the neighborhood of x_original', of which the nearest one is x_original itself where that is whole. The "
        "reference seeks neighbours of x_original + padding, whose rounding is another one, and weighs them for x_original.",
    ),
    Decision(
        ("Resize",),
        "symmetric coordinates whose terms cancel to where the nearest element changes",
        operator_questions.has_cancelling_terms,
        ("reference",),
        "'x_ori = offset + (x_resized + 0.5) / scale - 0.5': by 1/6 + 1/3 - 1/2 that is 0, and ceil 0, as ONNX Runtime has it. "
        "The reference is left with 1e-17, and takes element 1.",
    ),
    Decision(
        ("Resize",),
        "the nearest element of a position that is a tie but for the rounding of a float32 scale",
        operator_questions.rounded_tie,
        ("reference",),
        "'x_original = (x_resized + 0.5) / scale - 0.5': 1.5 / 0.6 is 2.5, as float32 and ONNX Runtime have it. The reference "
        "divides in float64 by 0.6000000238, and selects the element below.",
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
        ("reference",),
        "'output_width the target length on the axis x which can be a fractional number when it is calculated out of a scale "
        "factor'. The reference and two node tests divide by the fractional length minus 1, so the last element does not map to "
        "the last one. PyTorch, whose exporter writes these scales, and ONNX Runtime divide by the integer length minus 1.",
    ),
    Decision(
        ("Resize",),
        "negative axes with keep_aspect_ratio_policy",
        lambda use: any(a < 0 for a in use.attr("axes") or ()) and use.attr("keep_aspect_ratio_policy", "stretch") != "stretch",
        ("onnxruntime",),
        "'scale = Max(sizes[i] / in_size[d]), out_size[d] = round_int(scale * in_size[d])', and 'axes ... Accepted range is [-r, "
        "r-1]'. ONNX Runtime keeps the extent of a negative axis.",
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
        ("AffineGrid",),
        "an extent of 1 with align_corners",
        lambda use: bool(use.attr("align_corners", 0)) and ((size := use.value(1)) is None or 1 in size[2:]),
        ("reference",),
        "'if align_corners=1, consider -1 and 1 to refer to the centers of the corner elements': of one element that is both "
        "corners, ONNX Runtime gives 1. The reference divides by the extent minus 1 and gives -1, ONNX's function gives NaN.",
    ),
    Decision(
        ("AffineGrid",),
        "theta other than float32",
        lambda use: use.dtype() != "float32",
        ("reference",),
        "'grid (heterogeneous) - T1', the type of theta. The reference always gives float32.",
    ),
    Decision(
        ("Pad",),
        "wrap by more than there is",
        operator_questions.wrapped_again,
        ("onnxruntime",),
        "'wrap - wrap-around padding as if the data tensor forms a torus', on which one may go round more than once. ONNX "
        "Runtime reads beyond the tensor: two runs of one model differ.",
    ),
    Decision(
        ("Col2Im",),
        "dilations of one dimension, or of three or more",
        lambda use: len(use.attr("dilations") or ()) != 2 and any(d != 1 for d in use.attr("dilations") or ()),
        ("onnxruntime",),
        "'dilations: 1-dimensional tensor with dilation value along each spatial axis of the image'. ONNX Runtime puts blocks "
        "elsewhere than they were taken from (im2col of the same attributes).",
    ),
)
