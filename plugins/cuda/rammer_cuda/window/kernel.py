"""The ``window`` family: the core's windows of strips (``rammer.codegen.products.window_strips``), in CUDA. Threads of several
channels load and store them as words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np

from rammer.codegen import Forms, Unsuited, Val, affine_address, canonicalise_sum, convert_value
from rammer.codegen.products import Window, WindowWriter, thread_count, window_of, window_seconds, window_tilings
from rammer.device.manifest import Binding
from rammer.ir import expr as ex
from rammer.ir.expr import Expr, Load, integer

from rammer_cuda.device import device_source
from rammer_cuda.dialect import CUDA
from rammer_cuda.family import size_keys
from rammer_cuda.gpu import Gpu
from rammer_cuda.kernels.frame import Frame
from rammer_cuda.kernels.task import TaskKernel


@dataclass(frozen=True)
class Word:
    """A word of several float16: its C type, the templates of its elements (float), of a word of elements and of one of equal
    pairs of elements."""

    kind: str
    elements: tuple[str, ...]
    make: str
    filled: str


def _word(kind: str, parts: str) -> Word:
    """Return the word of the C type ``kind`` with 32-bit ``parts`` (none: itself)."""
    elements = [f"rm_half({{0}}{part}{shift})" for part in parts.split() or [""] for shift in ("", " >> 16")]
    pairs = [f"rm_two_halves({{{2 * i}}}, {{{2 * i + 1}}})" for i in range(len(elements) // 2)]
    equal = ["{0}"] * len(pairs)
    make, filled = (", ".join(x) if len(x) == 1 else f"make_{kind}({', '.join(x)})" for x in (pairs, equal))
    return Word(kind, tuple(elements), make, filled)


#: Words of float16 by their number of elements.
WORDS: Final = {2: _word("unsigned", ""), 4: _word("uint2", ".x .y"), 8: _word("uint4", ".x .y .z .w")}


class WordWriter(WindowWriter[TaskKernel]):
    """A writer of windows of several channels per thread."""

    frame: Frame

    def __init__(self, w: Window, frame: Frame, deep: int) -> None:
        super().__init__(w, frame)
        self.deep, self.word, self.channel = deep, WORDS[deep], w.order[-1]
        if w.deep % deep or w.operator.tile[self.channel] % deep:
            raise Unsuited(f"{deep} channels of a thread")

    def preload(self, loads: Sequence[Load]) -> None:
        """Load elements into variables, and those that form an aligned word as one."""
        block, found = self.frame.block, dict[tuple[object, ...], dict[int, Load]]()
        for load in loads:
            place = self.frame.places.get(load.tensor)
            if place is None or place.dtype != "float16" or block.known(load) is not None:
                continue
            try:
                steps, constant = affine_address(load, place.strides)
            except Unsuited:
                continue
            if all(s % self.deep == 0 for axis, s in steps.items() if axis != f"x{self.channel}"):  # channels are whole words
                key = load.tensor, *sorted(steps.items()), block.guard(load), load.fill
                found.setdefault(key, {})[constant] = load
        for parts in found.values():
            for at in [c for c in parts if c % self.deep == 0]:
                lot = [parts[c] for c in range(at, at + self.deep) if c in parts]
                if len(lot) == self.deep:
                    self._load_word(lot)
        super().preload(loads)

    def _load_word(self, lot: Sequence[Load]) -> None:
        block, word, name = self.frame.block, self.word, self.frame.unit.fresh("w")
        first, place, guard = lot[0], self.frame.places[lot[0].tensor], block.guard(lot[0])
        read = f"*(const {word.kind} *)({place.pointer} + {block.address(place, first.indices)})"
        filled = word.filled.format(f"{int(np.float16(first.fill or 0).view(np.uint16)) * 0x10001}u")
        self.frame.line(f"const {word.kind} {name} = {f'{guard} ? {read} : {filled}' if guard else read};")
        for load, element in zip(lot, word.elements, strict=True):
            block.memo[load] = Val(f"({element.format(name)})", "float16", atom=True, half=True)

    def store(self, name: str, point: tuple[Expr, ...], tests: str) -> None:
        """Write the store of a thread's channels as one word, at the first of them."""
        form = ex.affine_form(point[self.channel])
        if form is None or form[1] != 0:
            return
        shifted = [canonicalise_sum(ex.make_add(point[self.channel], integer(e))) for e in range(self.deep)]
        points = [(*point[: self.channel], i, *point[self.channel + 1 :]) for i in shifted]
        block, place = self.frame.block, self.frame.places[name]
        with block.nest(f"if ({tests})" if tests else "") as scope:
            found = (convert_value(CUDA, scope.unrounded(Load(name, p)), "float16") for p in points)
            word = self.word.make.format(*(scope.let(v).text for v in found))
            scope.line(f"*({self.word.kind} *)({place.pointer} + {scope.address(place, points[0])}) = {word};")


def _write_kernel(w: Window, binding: Binding) -> TaskKernel:
    deep = dict(w.operator.config).get("deep", 1)
    device = device_source("halves") if deep > 1 else ""
    frame = Frame(w.operator, binding, {c.name: c for c in w.operator.computes}, thread_count(w), device=device)
    return (WordWriter(w, frame, deep) if deep > 1 else WindowWriter(w, frame)).kernel()


_TILINGS: Final = partial(window_tilings, deeps=(1, *WORDS))
_WINDOWS: Final[Forms[Window, Gpu, TaskKernel]] = Forms(window_of, _TILINGS, window_seconds, _write_kernel)
WINDOW: Final = replace(_WINDOWS.family("window", size_keys("high", "wide", "deep")), packable=True)
