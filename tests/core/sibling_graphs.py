"""Random small models of siblings: products of one tensor or of its slices, in chains, joined, split and read as views."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import onnx
from onnx_models import model, tensor
from view_graphs import Shape, ViewModel

MAPS = ("Relu", "Tanh", "Sigmoid", "Neg")


class SiblingModel(ViewModel):
    """A generator that adds siblings, which maps, further products and views of ``ViewModel`` then read."""

    def weights(self, *shape: int) -> str:
        value = np.random.default_rng(self.rng.randrange(1 << 30)).standard_normal(shape).astype(np.float32)
        return self.constant(value / np.float32(math.sqrt(math.prod(shape[:-1]) or 1)))

    def step(self) -> None:
        x = self.rng.choice([n for n in self.shapes if not n.startswith("c")] or list(self.shapes))
        kinds = (self.products, self.products, self.slices, self.convolutions, self.second, self.followed, super().step)
        kind = self.rng.choice(kinds)
        if kind == super().step:
            super().step()
        else:
            kind(x, self.shapes[x])  # type: ignore[call-arg]

    def finished(self, kept: float) -> onnx.ModelProto:
        """Return the model; its outputs are all unread values and a fraction ``kept`` of the others."""
        values = [o for n in self.nodes for o in n.output]
        used = {i for n in self.nodes for i in n.input}
        ends = [v for v in values if v not in used] + [v for v in values if v in used and self.rng.random() < kept]
        inputs = [tensor(i, self.shapes[i]) for i in self.inputs]
        return model(self.nodes, inputs, ends, constants=self.constants)

    def behind(self, names: list[str]) -> list[str]:
        """Add equal maps after each of ``names``, or a different one after the first; return their results."""
        alike = self.rng.random() < 0.8
        for kind in self.rng.choices(("bias", "map", "scale", "sum", "pair"), k=self.rng.randint(0, 3)):
            chosen, new = self.rng.choice(MAPS), list[str]()
            common = self.weights(*self.shapes[names[0]])
            for number, name in enumerate(names):
                shape = self.shapes[name]
                width = shape[1] if len(shape) == 4 else shape[-1]
                per = (width, 1, 1) if len(shape) == 4 else (width,)
                if kind == "map" or (number and not alike):
                    new += self.add(chosen if alike or not number else "Abs", [name], shape)
                elif kind == "pair" and all(self.shapes[n] == shape for n in names):
                    new += self.add("Add", [common, name], shape)
                elif kind == "sum":
                    new += self.add(self.rng.choice(("Add", "Mul")) if not alike else "Add", [name, name], shape)
                else:
                    other = self.weights(*per) if kind == "bias" else self.constant(np.full((1,), 0.5 + number, np.float32))
                    new += self.add("Add" if kind == "bias" else "Mul", [name, other], shape)
            names = new
        return names

    def ends(self, names: list[str], axis: int) -> None:
        """Add a consumer of siblings: their concatenation in some order, a product of two, a reshape, or none yet."""
        shapes = [self.shapes[n] for n in names]
        how = self.rng.choice(("concat", "shuffled", "some", "pair", "none", "none"))
        if how in ("concat", "shuffled", "some"):
            parts = list(names)
            if how == "shuffled":
                self.rng.shuffle(parts)
            parts = parts[: -1 if how == "some" and len(parts) > 2 else None]
            total = sum(self.shapes[p][axis] for p in parts)
            self.add("Concat", parts, (*shapes[0][:axis], total, *shapes[0][axis + 1 :]), axis=axis)
        elif how == "pair" and shapes[0] == shapes[1]:
            self.add(self.rng.choice(("Mul", "Add", "Sub")), names[:2], shapes[0])

    def products(self, x: str, shape: Shape) -> None:
        """Add products of one tensor with several weights, of equal or different widths."""
        if len(shape) < 2:
            return
        equal, width = self.rng.random() < 0.6, self.rng.choice((1, 3, 4, 8))
        names = list[str]()
        for _ in range(self.rng.randint(2, 4)):
            n = width if equal else self.rng.choice((1, 2, 3, 4, 8))
            names += self.add("MatMul", [x, self.weights(shape[-1], n)], (*shape[:-1], n))
        names = self.behind(names)
        self.ends(names, len(shape) - 1)

    def slices(self, x: str, shape: Shape) -> None:
        """Add products of slices of one tensor, with a shared weight or one each. Maps follow some or all of them."""
        axis = self.rng.randrange(len(shape))
        if len(shape) < 2 or shape[axis] < 2:
            return
        parts, rest = [1] * shape[axis], (*shape[:axis], 1, *shape[axis + 1 :])
        cut = self.add("Split", [x, self.ints(*parts)], *[rest] * shape[axis], axis=axis)
        if self.rng.random() < 0.5 and len(rest) > 2:
            short = (*shape[:axis], *shape[axis + 1 :])
            cut = [self.add("Squeeze", [c, self.ints(axis)], short)[0] for c in cut]
            rest = short
        self.rng.shuffle(cut)
        width, one = self.rng.choice((1, 3, 4)), self.rng.random() < 0.5
        shared, names = self.weights(rest[-1], width), list[str]()
        for c in cut[: self.rng.randint(2, 4)]:
            names += self.add("MatMul", [c, shared if one else self.weights(rest[-1], width)], (*rest[:-1], width))
        self.ends(self.behind(names), self.rng.randrange(len(rest)) if len({self.shapes[n] for n in names}) == 1 else 0)

    def second(self, x: str, shape: Shape) -> None:
        """Add branches of two products each. A third product, of a branch's result plus the first tensor, is not a sibling."""
        if len(shape) != 2:
            return
        width, count = self.rng.choice((3, 4)), self.rng.randint(2, 3)
        first = [self.add("MatMul", [x, self.weights(shape[1], width)], (shape[0], width))[0] for _ in range(count)]
        first = self.behind(first)
        names = [self.add("MatMul", [f, self.weights(width, shape[1])], shape)[0] for f in first]
        (total,) = self.add("Add", [x, names[0]], shape)  # depends on a sibling
        names += self.add("MatMul", [total, self.weights(shape[1], shape[1])], shape)
        self.ends(self.behind(names), 1)

    def convolutions(self, x: str, shape: Shape) -> None:
        """Add convolutions of one image, some with equal kernels."""
        if len(shape) != 4:
            shape = (1, 3, 4, 5)
            x = self.named(shape)
            self.inputs.append(x)
        stride, names = self.rng.choice((1, 2)), list[str]()
        for _ in range(self.rng.randint(2, 4)):
            k = self.rng.choice((1, 1, 3))
            n = self.rng.choice((2, 3, 4))
            target = (shape[0], n, *(-(-s // stride) for s in shape[2:]))
            w = self.weights(n, shape[1], k, k)
            names += self.add("Conv", [x, w], target, kernel_shape=[k, k], pads=[k // 2] * 4, strides=[stride] * 2)
        self.ends(self.behind(names), 1)

    def followed(self, x: str, shape: Shape) -> None:
        """Add a map, and products of its result."""
        (y,) = self.add(self.rng.choice(MAPS), [x], shape)
        self.products(y, shape)


def sibling_model(seed: int) -> onnx.ModelProto:
    """Make a model of 6 to 30 nodes, with some intermediate values as outputs."""
    rng = Random(seed)
    made = SiblingModel(rng)
    made.inputs.append(made.named(tuple(rng.choice((1, 2, 3, 5)) for _ in range(rng.choice((2, 2, 3))))))
    count = rng.randint(6, 30)
    while len(made.nodes) < count:
        made.step()
    return made.finished(0.08)
