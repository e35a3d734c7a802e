"""The common parts of LSTM, GRU and RNN: geometry, activations, the hoisted input projection, the outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from rammer.errors import BadInput
from rammer.frontend.lower.lowering_registry import CannotLower, Lowering
from rammer.frontend.lower.operators.elementwise import FORMULAS, Form, Formula
from rammer.ir import expr as ex
from rammer.ir.compute import Axis
from rammer.ir.expr import Cast, Const, Expr, Load, Op, Table
from rammer.ir.piecewise import make_piecewise

Activation = Callable[[Expr], Expr]


@dataclass(frozen=True)
class Recurrence:
    """A recurrent node with its extents in elements; ``gates`` is the number packed in its weights ``[D, gates*H, I]``."""

    ctx: Lowering
    gates: int
    gated: dict[int, str] = field(default_factory=dict, repr=False, compare=False)
    going: list[str] = field(default_factory=list, repr=False, compare=False)  #: Masks of the active sequences, one per step.

    def __post_init__(self) -> None:
        """Raise BadInput if ``hidden_size`` contradicts the weights: ONNX infers shapes from the attribute alone."""
        ctx, hidden = self.ctx, self.hidden.extent
        w, r = (ctx.shape(ctx.input(i)) for i in (1, 2))
        width = ctx.shape(ctx.input(0))[-1]
        directions, packed = len(self.directions), self.gates * hidden
        wanted: dict[int, tuple[int, ...]] = {
            1: (directions, packed, width),
            2: (directions, packed, hidden),
            3: (directions, 2 * packed),
        }
        for index, shape in wanted.items():
            fits = not ctx.has(index) or ctx.shape(ctx.input(index)) == shape
            if not fits or ctx.attr("hidden_size", hidden) != hidden:
                raise BadInput(
                    f"the weights of {ctx.node.op} have the shapes {list(w)} and {list(r)}, which do not match "
                    f"each other, hidden_size={ctx.attr('hidden_size', hidden)} or inputs of {width} elements",
                    f"node {ctx.node.name} ({ctx.node.op})",
                    "export the model again",
                )
        batch = self.batch.extent
        state = (batch, directions, hidden) if self.batch_first else (directions, batch, hidden)
        for index, shape in ((4, (batch,)), (5, state), (6, state), (7, (directions, 3 * hidden))):
            if ctx.has(index) and ctx.shape(ctx.input(index)) != shape:
                raise ctx.refused(f"input {index} has the shape {list(ctx.shape(ctx.input(index)))}, not {list(shape)}")

    @property
    def batch_first(self) -> bool:
        """True if ``layout`` puts the batch before the time steps."""
        return bool(self.ctx.attr("layout", 0))

    @property
    def steps(self) -> int:
        """The number of time steps."""
        return self.ctx.shape(self.ctx.input(0))[1 if self.batch_first else 0]

    @property
    def batch(self) -> Axis:
        """The axis of the batch."""
        return Axis("b", self.ctx.shape(self.ctx.input(0))[0 if self.batch_first else 1])

    @property
    def hidden(self) -> Axis:
        """The axis of the hidden units."""
        return Axis("h", self.ctx.shape(self.ctx.input(2))[-1])

    @property
    def dtype(self) -> str:
        """The element type of all tensors."""
        return self.ctx.type(self.ctx.input(0)).dtype

    @property
    def directions(self) -> tuple[bool, ...]:
        """The directions; True for a direction that runs backwards."""
        name = str(self.ctx.attr("direction", "forward"))
        known = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
        if name not in known:
            raise CannotLower(f"{self.ctx.node.op} with direction={name!r}")
        return known[name]

    def order(self, backwards: bool) -> Sequence[int]:
        """Return the time steps in the order of a direction."""
        return range(self.steps)[::-1] if backwards else range(self.steps)

    def literal(self, value: float) -> Const:
        """Return a literal of the node's element type."""
        return Const(value, self.dtype)

    def by_gate(self, index: int) -> str:
        """Return optional input ``index`` with a separate axis for gates, so that a tile of hidden units is a box of it. Shapes
        are ``[d, gates, h, k]`` for W and R, ``[d, 2, gates, h]`` for B, ``[d, gates, h]`` for P."""
        if index not in self.gated:
            name, hidden = self.ctx.input(index), self.hidden.extent
            directions, packed, *rest = self.ctx.shape(name)
            split = (2, packed // hidden // 2, hidden) if index == 3 else (packed // hidden, hidden)
            self.gated[index] = self._split_axis(name, (directions, *split, *rest), len(split))
        return self.gated[index]

    def _split_axis(self, name: str, shape: tuple[int, ...], parts: int) -> str:
        """Return ``name`` with its axis 1 split into ``parts`` axes: another constant, or a Compute that copies nothing."""
        value = self.ctx.graph.constant(name)
        if value is not None:
            return self.ctx.constant(value.reshape(shape), f"{name}_gates")
        axes = tuple(Axis(f"i{d}", n) for d, n in enumerate(shape))
        row: Expr = ex.integer(0)
        for axis in axes[1 : 1 + parts]:
            row = ex.make_add(ex.make_mul(row, axis.extent), axis.name)
        rest = [a.name for a in axes[1 + parts :]]
        return self.ctx.emit(axes, self.ctx.load(name, "i0", row, *rest), into=f"{name}_gates")

    def emit_state(self, body: Expr, hint: str) -> str:
        """Emit a state tensor ``[b, h]``."""
        return self.ctx.emit((self.batch, self.hidden), body, into=hint, dtype=self.dtype)

    def state(self, tensor: str) -> Load:
        """Return the load ``tensor[b, h]``."""
        return self.ctx.load(tensor, "b", "h")

    def initial(self, index: int, direction: int, hint: str) -> str:
        """Return the initial state of a direction, ``[b, h]``, from optional input ``index`` (zeros if absent)."""
        if not self.ctx.has(index):
            zeros = np.zeros((self.batch.extent, self.hidden.extent), self.dtype)
            return self.ctx.constant(zeros, hint)
        place = ("b", direction, "h") if self.batch_first else (direction, "b", "h")
        return self.emit_state(self.ctx.load(self.ctx.input(index), *place), hint)

    def recurrent_bias(self, direction: int, gate: Expr | str) -> Expr | None:
        """Return ``Rb`` of a gate, or None without biases."""
        return self.ctx.load(self.by_gate(3), direction, 1, gate, "h") if self.ctx.has(3) else None

    def projections(self, direction: int, hoisted: int) -> list[str]:
        """Return ``x[t] @ W`` plus the biases that are added first, one ``[b, g, h]`` tensor per step. One contraction serves all
        steps; the steps are slices of it. ``Rb`` is included for the first ``hoisted`` gates."""
        ctx = self.ctx
        if not self.steps:
            return []
        inputs = ctx.shape(ctx.input(0))[-1]
        gates = Axis("g", self.gates)
        axes = (Axis("t", self.steps), self.batch, gates, self.hidden)
        x = ctx.load(ctx.input(0), *(("b", "t", "i") if self.batch_first else ("t", "b", "i")))
        w = ctx.load(self.by_gate(1), direction, "g", "h", "i")
        total = ctx.emit(axes, Op("mul", (x, w)), (Axis("i", inputs),), "sum", into=f"xw{direction}")
        if ctx.has(3):
            biased = Op("add", (ctx.load(total, "t", "b", "g", "h"), self._hoisted_bias(direction, hoisted)))
            total = ctx.emit(axes, biased, into=f"xwb{direction}")
        return [
            ctx.emit((self.batch, gates, self.hidden), ctx.load(total, t, "b", "g", "h"), into=f"x{direction}_{t}")
            for t in range(self.steps)
        ]

    def _hoisted_bias(self, direction: int, hoisted: int) -> Expr:
        bias: Expr = self.ctx.load(self.by_gate(3), direction, 0, "g", "h")
        recurrent = self.recurrent_bias(direction, "g")
        if recurrent is None or hoisted == 0:
            return bias
        if hoisted < self.gates:
            recurrent = Op("where", (Op("lt", (ex.Ref("g"), ex.integer(hoisted))), recurrent, self.literal(0.0)))
        return Op("add", (bias, recurrent))

    def recur(self, state: str, direction: int, first: int, count: int, hint: str) -> str:
        """Return ``state @ R`` for ``count`` gates from ``first`` on, ``[b, g, h]``."""
        weights = self.ctx.load(self.by_gate(2), direction, ex.make_add("g", first), "h", "k")
        body = Op("mul", (self.ctx.load(state, "b", "k"), weights))
        axes = (self.batch, Axis("g", count), self.hidden)
        return self.ctx.emit(axes, body, (Axis("k", self.hidden.extent),), "sum", into=hint)

    def emit_gates(self, inputs: str, recurrent: str, hint: str) -> str:
        """Emit the sum of a step's input projection and recurrent product, ``[b, g, h]``."""
        axes = (self.batch, Axis("g", self.gates), self.hidden)
        terms = tuple(self.ctx.load(name, "b", "g", "h") for name in (inputs, recurrent))
        return self.ctx.emit(axes, Op("add", terms), into=hint)

    def at_gate(self, tensor: str, gate: int) -> Load:
        """Return the load ``tensor[b, gate, h]``."""
        return self.ctx.load(tensor, "b", gate, "h")

    def mask(self, step: int) -> Expr | None:
        """Return the mask of the sequences that still have ``step``, or None if all have it."""
        if not self.ctx.has(4):
            return None
        lengths = self.ctx.graph.constant(self.ctx.input(4))
        if lengths is None:
            return self.ctx.load(self._active_mask(step), "b")
        if all(int(n) > step for n in lengths):
            return None
        return Table(tuple(int(n) > step for n in lengths), ex.as_index("b"), "bool")

    def _active_mask(self, step: int) -> str:
        """Return the mask ``[b]`` of the sequences that have ``step``. It is a slice of one tensor for all steps, so that all
        steps share their kernels."""
        ctx = self.ctx
        if not self.going:
            kind = ctx.type(ctx.input(4)).dtype
            test = Op("lt", (Cast(kind, ex.Ref("t")), ctx.load(ctx.input(4), "b")))
            whole = ctx.emit((Axis("t", self.steps), self.batch), test, into="going")
            self.going.extend(ctx.emit((self.batch,), ctx.load(whole, t, "b"), into=f"going{t}") for t in range(self.steps))
        return self.going[step]

    def kept(self, mask: Expr | None, new: Expr, old: Expr) -> Expr:
        """Return ``new`` while the sequence continues, else ``old``."""
        return new if mask is None else Op("where", (mask, new, old))

    def shown(self, mask: Expr | None, state: str, hint: str) -> str:
        """Return the output of a step: its state, or zero after a sequence's end."""
        if mask is None:
            return state
        return self.emit_state(Op("where", (mask, self.state(state), self.literal(0.0))), hint)

    def activations(self, direction: int, defaults: Sequence[str]) -> list[Activation]:
        """Return the activation functions of a direction; those of gates clip their input. The third, LSTM's h, reads the cell
        state, which ONNX Runtime leaves unclipped. ONNX's text does not specify it."""
        names = list(self.ctx.attr("activations") or [*defaults] * len(self.directions))
        alphas = iter(self.ctx.attr("activation_alpha") or ())
        betas = iter(self.ctx.attr("activation_beta") or ())
        count = len(defaults)
        if len(names) != count * len(self.directions):
            raise self.ctx.refused(f"{len(names)} activations are given, where {count} a direction are needed")
        built = [self._make_activation(str(n), alphas, betas, clipped=i % count < 2) for i, n in enumerate(names)]
        return built[direction * count : (direction + 1) * count]

    def _make_activation(self, name: str, alphas: Iterator[float], betas: Iterator[float], clipped: bool) -> Activation:
        key = name.lower()
        alpha, beta = PARAMETERS.get(key, (None, None))
        a = 0.0 if alpha is None else float(next(alphas, alpha))
        b = 0.0 if beta is None else float(next(betas, beta))
        if key not in _FORMULAS:
            raise CannotLower(f"{self.ctx.node.op} with activation {name}")
        formula, form = _FORMULAS[key], Form(self.dtype, {"alpha": a, "beta": b})
        return lambda x: formula(form, self._clipped(x) if clipped else x)

    def _clipped(self, x: Expr) -> Expr:
        clip = self.ctx.attr("clip")
        if not clip:
            return x
        return Op("min", (Op("max", (x, self.literal(-float(clip)))), self.literal(float(clip))))

    def emit_sequence(self, shown: Sequence[Sequence[str]]) -> None:
        """Emit output 0 from the tensors ``shown[direction][time]``, if it is used."""
        if not self.ctx.wants(0):
            return
        trees = [make_piecewise("t", [1] * self.steps, [self.state(s) for s in row]) for row in shown if self.steps]
        time, many = Axis("t", self.steps), Axis("d", len(shown))
        body = make_piecewise("d", [1] * len(trees), trees) if self.steps else self.literal(0.0)
        axes = (self.batch, time, many, self.hidden) if self.batch_first else (time, many, self.batch, self.hidden)
        self.ctx.emit(axes, body, into=0)

    def emit_last(self, index: int, states: Sequence[str]) -> None:
        """Emit output ``index`` from the last state of each direction, if it is used."""
        if not self.ctx.wants(index):
            return
        many = Axis("d", len(states))
        axes = (self.batch, many, self.hidden) if self.batch_first else (many, self.batch, self.hidden)
        body = make_piecewise("d", [1] * len(states), [self.state(s) for s in states])
        self.ctx.emit(axes, body, into=index)


#: Activation -> (default alpha, default beta); None if the parameter does not exist.
PARAMETERS: dict[str, tuple[float | None, float | None]] = {
    "affine": (1.0, 0.0),
    "leakyrelu": (0.01, None),
    "thresholdedrelu": (1.0, None),
    "scaledtanh": (1.0, 1.0),
    "hardsigmoid": (0.2, 0.5),
    "elu": (1.0, None),
}
_SHARED = ("Relu", "Tanh", "Sigmoid", "LeakyRelu", "HardSigmoid", "Elu", "Softsign", "Softplus")
_FORMULAS: dict[str, Formula] = {
    **{op.lower(): FORMULAS[op] for op in _SHARED},
    "affine": lambda form, x: Op("add", (Op("mul", (x, form.attr("alpha", 1.0))), form.attr("beta", 0.0))),
    "scaledtanh": lambda form, x: Op("mul", (Op("tanh", (Op("mul", (x, form.attr("beta", 1.0))),)), form.attr("alpha", 1.0))),
    # The value at the threshold itself passes, unlike in the operator ThresholdedRelu.
    "thresholdedrelu": lambda form, x: Op("where", (Op("lt", (x, form.attr("alpha", 1.0))), form.literal(0.0), x)),
}
