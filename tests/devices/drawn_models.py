"""Random models with open dimensions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from drawn_ranges import WIDTHS, Extent, RangeDraw, Shape
from onnx import TensorProto, helper, numpy_helper


class DrawnModel(RangeDraw):
    """A model drawn from more operators. Results are continuous where operands are close: both choices of a maximum are nearly
    equal."""

    def picked(self, x: str, shape: Shape) -> None:
        """Add rows at both ends of an axis, or at the position of the maximum."""
        axis = self.chosen(len(shape))
        if self.chosen(2):
            self.node("Gather", [x, self.constant(np.array([0, -1, 0]))], (*shape[:axis], 3, *shape[axis + 1 :]), axis=axis)
        else:
            most = self.node("ArgMax", [x], None, axis=axis, keepdims=1)
            self.node("GatherElements", [x, most], (*shape[:axis], 1, *shape[axis + 1 :]), axis=axis)

    def sorted_few(self, x: str, shape: Shape) -> None:
        """Add the two greatest along a short axis, or the greatest along any."""
        axis = self.chosen(len(shape))
        extent = shape[axis]
        count = 2 if isinstance(extent, int) and extent > 2 else 1
        name = f"t{len(self.nodes)}"
        ports = [x, self.constant(np.array([count]))]
        self.nodes.append(helper.make_node("TopK", ports, [name, f"{name}_at"], axis=axis, largest=self.chosen(2)))
        self.shapes[name] = (*shape[:axis], count, *shape[axis + 1 :])

    def repeated(self, x: str, shape: Shape) -> None:
        axis = self.chosen(len(shape))
        extent = shape[axis]
        if isinstance(extent, int) and extent <= 6:
            times = self.constant(np.array([2 if d == axis else 1 for d in range(len(shape))]))
            self.node("Tile", [x, times], (*shape[:axis], 2 * extent, *shape[axis + 1 :]))

    def expanded(self, x: str, shape: Shape) -> None:
        """Add a row of ``x``, repeated for every row of ``x``."""
        axis = self.chosen(len(shape))
        row = self.node("Gather", [x, self.constant(np.array([0]))], None, axis=axis)
        self.node("Expand", [row, self.node("Shape", [x], None)], shape)

    def triangle(self, x: str, shape: Shape) -> None:
        if len(shape) >= 2:
            self.node("Trilu", [x, self.constant(np.array(self.chosen(3) - 1))], shape, upper=self.chosen(2))

    def normalised_channels(self, x: str, shape: Shape) -> None:
        """Add a normalisation over an image, or over a row of a channel."""
        if len(shape) == 3 and isinstance(shape[1], int):
            if self.chosen(2):
                self.node("InstanceNormalization", [x, self.weights(shape[1]), self.weights(shape[1])], shape)
            else:
                scale = [self.weights(shape[1]) for _ in range(3)]
                variance = self.constant(np.abs(self.rng.standard_normal(shape[1])).astype(np.float32) + 1)
                self.node("BatchNormalization", [x, *scale, variance], shape)

    def summed_by(self, x: str, shape: Shape) -> None:
        """Add an Einsum over the first axis, or the last."""
        if len(shape) == 3:
            text, left = [("abc,abd->cd", (shape[2], shape[2])), ("abc,dbc->ad", (shape[0], shape[0]))][self.chosen(2)]
            self.node("Einsum", [x, x], left, equation=text)

    def parted(self, x: str, shape: Shape) -> None:
        axis = self.chosen(len(shape))
        extent = shape[axis]
        if isinstance(extent, int) and extent >= 2:
            name, half = f"t{len(self.nodes)}", extent // 2
            parts = self.constant(np.array([half, extent - half]))
            self.nodes.append(helper.make_node("Split", [x, parts], [f"{name}_a", name], axis=axis))
            self.shapes[f"{name}_a"] = (*shape[:axis], half, *shape[axis + 1 :])
            self.shapes[name] = (*shape[:axis], extent - half, *shape[axis + 1 :])

    def enlarged(self, x: str, shape: Shape) -> None:
        """Repeat every element twice along the last of three axes."""
        if len(shape) == 3:
            extent = shape[2]
            twice: Extent = 2 * extent if isinstance(extent, int) else (extent[0], 2 * extent[1], 2 * extent[2])
            if isinstance(twice, int) or twice[1] <= 4:
                scales = self.constant(np.array([1, 1, 2], np.float32))
                self.node(
                    "Resize",
                    [x, "", scales],
                    (*shape[:2], twice),
                    mode="nearest",
                    nearest_mode="floor",
                    coordinate_transformation_mode="asymmetric",
                )

    def masked(self, x: str, shape: Shape) -> None:
        """Add a softmax with a causal mask."""
        if len(shape) >= 2 and shape[-1] == shape[-2]:
            ones = self.node(
                "ConstantOfShape", [self.node("Shape", [x], None)], None, value=numpy_helper.from_array(np.ones(1, np.float32))
            )
            lower = self.node("Trilu", [ones], None, upper=0)
            least = self.constant(np.float32(-1e9))
            mask = self.node("Cast", [lower], None, to=TensorProto.BOOL)
            self.node("Softmax", [self.node("Where", [mask, x, least], None)], shape, axis=-1)

    def transposed_convolution(self, x: str, shape: Shape) -> None:
        if len(shape) == 3 and isinstance(shape[1], int):
            extent = shape[2]
            longer: Extent = 2 * extent if isinstance(extent, int) else (extent[0], 2 * extent[1], 2 * extent[2])
            if isinstance(longer, int) or longer[1] <= 4:
                self.node("ConvTranspose", [x, self.weights(shape[1], 3, 2)], (shape[0], 3, longer), strides=[2])


#: All operators of a drawn model.
OPERATORS: tuple[Callable[[DrawnModel, str, Shape], None], ...] = (
    RangeDraw.unary,
    RangeDraw.shifted,
    RangeDraw.softmax,
    RangeDraw.normalised,
    RangeDraw.reduced,
    RangeDraw.transposed,
    RangeDraw.product,
    RangeDraw.with_itself,
    RangeDraw.attention,
    RangeDraw.joined,
    RangeDraw.behind,
    RangeDraw.cut,
    RangeDraw.backwards,
    RangeDraw.summed,
    RangeDraw.padded,
    RangeDraw.convolved,
    RangeDraw.pooled,
    RangeDraw.folded,
    RangeDraw.heads,
    RangeDraw.with_other,
    RangeDraw.positions,
    RangeDraw.spread,
    RangeDraw.recurrent,
    RangeDraw.scanned,
    DrawnModel.picked,
    DrawnModel.sorted_few,
    DrawnModel.repeated,
    DrawnModel.expanded,
    DrawnModel.triangle,
    DrawnModel.normalised_channels,
    DrawnModel.summed_by,
    DrawnModel.parted,
    DrawnModel.enlarged,
    DrawnModel.masked,
    DrawnModel.transposed_convolution,
)


def drawn(rng: np.random.Generator, most: int = 24) -> DrawnModel:
    """Return a model of 3 to 8 operators over one or two inputs, with one or two open dimensions."""
    names = ["a", "b"][: 1 + int(rng.random() < 0.4)]
    spans = {}
    for name in names:
        high = int(rng.integers(3, most + 1))
        spans[name] = (int(rng.integers(0 if rng.random() < 0.1 else 1, high)), high)
    made = DrawnModel(rng, spans)
    for _ in range(1 + int(rng.integers(2))):
        rank = 2 + int(rng.integers(2))
        shape: list[Extent] = [WIDTHS[int(rng.integers(4))] for _ in range(rank)]
        for place, name in zip(rng.permutation(rank), names, strict=False):
            shape[int(place)] = (name, 1, 0)
        made.port(tuple(shape))
    wanted = int(rng.integers(3, 9))
    for _ in range(40):
        if len(made.nodes) >= wanted:
            break
        names = [*made.shapes]
        name = names[-1] if rng.integers(3) else names[int(rng.integers(len(names)))]
        OPERATORS[int(rng.integers(len(OPERATORS)))](made, name, made.shapes[name])
    return made
