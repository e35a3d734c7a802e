"""Recipes: layers, functions and control flow of torch that exporters write in special forms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from corpus_recipe import Call, Torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCH: Mapping[str, Mapping[int, str]] = {"x": {0: "batch", 1: "steps"}}
FURTHER = ({"batch": 1, "steps": 9}, {"batch": 4, "steps": 3})
IMAGE: Mapping[str, Mapping[int, str]] = {"x": {0: "batch", 2: "height", 3: "width"}}
LARGER = ({"batch": 1, "height": 10, "width": 8}, {"batch": 3, "height": 8, "width": 14})


def recurrent(kind: type[nn.Module], outputs: tuple[str, ...], **more: Any) -> Torch:
    """Return two layers in both directions over open batches and steps. States start from zeros."""

    def call(layer: nn.Module, x: Tensor) -> Any:
        y, state = layer(x)
        return (y, *(state if isinstance(state, tuple) else (state,)))

    layer = kind(6, 8, 2, batch_first=True, bidirectional=True, **more)
    return Torch(Call(layer, call), {"x": torch.randn(2, 5, 6)}, outputs, BATCH, FURTHER)


def attention() -> Torch:
    """Return nn.MultiheadAttention with a padding mask."""

    def call(layer: nn.Module, x: Tensor, padded: Tensor) -> Any:
        return layer(x, x, x, key_padding_mask=padded < 1, need_weights=True)

    inputs = {"x": torch.randn(2, 5, 8), "kept": torch.ones(2, 5, dtype=torch.int64)}
    axes = {**BATCH, "kept": {0: "batch", 1: "steps"}}
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    return Torch(Call(layer, call), inputs, ("y", "weights"), axes, FURTHER, {"kept": "mask"})


def transformer() -> Torch:
    """Return nn.Transformer with a causal mask."""

    def call(layer: nn.Module, x: Tensor, y: Tensor) -> Any:
        steps = y.shape[1]
        mask = torch.ones(steps, steps, dtype=torch.bool).triu(1)
        return layer(x, y, tgt_mask=mask)

    layer = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
    inputs = {"x": torch.randn(2, 5, 8), "said": torch.randn(2, 4, 8)}
    axes = {**BATCH, "said": {0: "batch", 1: "words"}}
    further = ({"batch": 1, "steps": 9, "words": 3}, {"batch": 3, "steps": 2, "words": 7})
    return Torch(Call(layer, call), inputs, ("y",), axes, further)


def function(call: Callable[..., Any], *shapes: tuple[int, ...], outputs: tuple[str, ...] = ("y",), **more: Any) -> Torch:
    """Return a function of inputs x, x1, x2, ... around one small convolution or product, so that it has weights."""
    names = ["x", *(f"x{n}" for n in range(1, len(shapes)))]
    inputs = {n: torch.randn(s) for n, s in zip(names, shapes, strict=True)}
    layer = nn.Conv2d(shapes[0][1], shapes[0][1], 1) if len(shapes[0]) == 4 else nn.Linear(shapes[0][-1], shapes[0][-1])
    return Torch(Call(layer, call), inputs, outputs, **more)


def images(call: Callable[..., Any]) -> Torch:
    """Return a function of images of open number and size."""
    return function(call, (2, 3, 6, 8), open=IMAGE, further=LARGER)


def sampled(layer: nn.Module, x: Tensor, grid: Tensor) -> Tensor:
    return F.grid_sample(layer(x), grid.tanh(), align_corners=False)


def warped(layer: nn.Module, x: Tensor, theta: Tensor) -> Tensor:
    grid = F.affine_grid(theta, [x.shape[0], x.shape[1], 5, 7], align_corners=False)
    return F.grid_sample(layer(x), grid, mode="bicubic", padding_mode="border", align_corners=True)


def resized(layer: nn.Module, x: Tensor) -> Tensor:
    y = layer(x)
    up = F.interpolate(y, scale_factor=2.0, mode="bilinear", align_corners=True)
    cubic = F.interpolate(y, size=(9, 5), mode="bicubic", align_corners=False)
    near = F.interpolate(y, scale_factor=1.5, mode="nearest")
    return up.mean((2, 3)) + cubic.amax((2, 3)) + near.sum((2, 3)) * 0.01


def unfolded(layer: nn.Module, x: Tensor) -> Tensor:
    patches = F.unfold(layer(x), 3, dilation=1, padding=1, stride=2)
    return patches.softmax(-1)


def shuffled(layer: nn.Module, x: Tensor) -> Tensor:
    y = torch.cat([layer(x)] * 4, 1)
    return F.pixel_unshuffle(F.pixel_shuffle(y, 2), 2) + F.pad(x, (1, 1, 1, 1), mode="reflect")[:, :1, 1:-1, 1:-1]


def normed(layer: nn.Module, x: Tensor) -> Tensor:
    y = F.group_norm(layer(x), 3) + F.instance_norm(x)
    y = F.local_response_norm(y, 3) + F.normalize(y, dim=1)
    return F.adaptive_avg_pool2d(y, 1) + F.adaptive_max_pool2d(y, 1) + F.lp_pool2d(y.abs(), 2, 3)[:, :, :1, :1]


def indexed(layer: nn.Module, x: Tensor) -> Any:
    y = layer(x)
    y = y.index_put((torch.tensor([0]), torch.tensor([1])), torch.zeros(y.shape[-1]))
    best, places = y.topk(3, dim=-1)
    spread = torch.zeros_like(y).scatter(-1, places, best)
    added = torch.zeros_like(y).scatter_add(-1, places.flip(-1), best)
    order = y.argsort(dim=-1, descending=True)
    return spread, added.cumsum(1), order, y.gather(-1, order)


def chosen(layer: nn.Module, x: Tensor) -> Tensor:
    y = layer(x)
    kept = torch.where(y > 0, y, torch.tensor(-1.0)).roll(1, 1).flip(2)
    products = torch.einsum("bij,bkj->bik", y, y).diagonal(dim1=1, dim2=2).sum()
    return kept.masked_fill(x < -1, 0.5).clamp(min=-0.7) + y.tril() + products


def whole(layer: nn.Module, x: Tensor) -> Tensor:
    """Return a value computed from tensors of value-dependent shape."""
    y = layer(x).flatten()
    return y[y > 0].sum() + (y > 0).nonzero().float().mean()


def scripted_loop(layer: nn.Module, x: Tensor) -> Tensor:
    y = layer(x)
    for n in range(x.shape[1]):
        y = torch.tanh(y) + x[:, n : n + 1]
    return y


class Steps(nn.Module):
    """A loop over the steps of its input, as a script keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0])
        for n in range(x.shape[1]):
            state = torch.tanh(self.layer(x[:, n]) + state)
        return state


class Decided(nn.Module):
    """A branch on the values of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        if bool(x.sum() > 0):  # noqa: SIM108
            y = self.layer(x)
        else:
            y = torch.relu(x) - 1.0
        return y * 2.0


def scripted(module: nn.Module) -> Torch:
    """Return a TorchScript model, which keeps loops and branches. Only the older exporter accepts it."""
    return Torch(torch.jit.script(module), {"x": torch.randn(2, 5, 6)}, ("y",), BATCH, FURTHER, exporters=("script",))


def conditional(layer: nn.Module, x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda v: layer(v) * 2.0, lambda v: torch.relu(layer(v)) - 1.0, (x,))


def scanned(layer: nn.Module, x: Tensor) -> Any:
    from torch._higher_order_ops.scan import scan

    def step(state: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        new = torch.tanh(layer(value) + state)
        return new, new * 2.0

    last, ys = scan(step, torch.zeros_like(x[:, 0]), x.transpose(0, 1))
    return last, ys


def while_looped(layer: nn.Module, x: Tensor) -> Any:
    from torch._higher_order_ops.while_loop import while_loop

    def go(n: Tensor, y: Tensor) -> Tensor:
        return (n < 5) & (y.abs().sum() < 1e6)

    def body(n: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return n + 1, layer(y) * 1.5

    return while_loop(go, body, (torch.tensor(0), x))[1]


def newer(made: Torch) -> Torch:
    """Return the recipe for the newer exporter only."""
    return Torch(made.model, made.inputs, made.outputs, made.open, made.further, made.values, exporters=("dynamo",))


STEPS = {"open": BATCH, "further": FURTHER}
RECIPES: dict[str, Callable[[], Torch]] = {
    "lstm": lambda: recurrent(nn.LSTM, ("y", "h", "c")),
    "lstm_projected": lambda: recurrent(nn.LSTM, ("y", "h", "c"), proj_size=4),
    "gru": lambda: recurrent(nn.GRU, ("y", "h")),
    "rnn": lambda: recurrent(nn.RNN, ("y", "h")),
    "multihead": attention,
    "transformer": transformer,
    "grid_sample": lambda: function(sampled, (2, 3, 6, 8), (2, 4, 5, 2)),
    "affine_grid": lambda: function(warped, (2, 3, 6, 8), (2, 2, 3)),
    "interpolate": lambda: images(resized),
    "unfold": lambda: images(unfolded),
    "pixel_shuffle": lambda: images(shuffled),
    "norms": lambda: images(normed),
    "indexing": lambda: function(indexed, (2, 5, 6), outputs=("spread", "sum", "order", "sorted"), **STEPS),
    "choices": lambda: function(chosen, (2, 5, 6), **STEPS),
    "nonzero": lambda: function(whole, (2, 5, 6), **STEPS),
    "unrolled": lambda: function(scripted_loop, (2, 5, 6)),
    "loop": lambda: scripted(Steps()),
    "branch": lambda: scripted(Decided()),
    "cond": lambda: newer(function(conditional, (2, 5, 6), **STEPS)),
    "scan": lambda: newer(function(scanned, (2, 5, 6), outputs=("last", "ys"), **STEPS)),
    "while": lambda: newer(function(while_looped, (2, 5, 6), **STEPS)),
}
