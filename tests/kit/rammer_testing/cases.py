"""Small models, written as one line of text each, that cover every kind of kernel: the samples of the kernel search.

A case has an operator, sizes, precision and layout, and (if it came from a failure) a candidate:

    conv n=2 c=17 m=20 h=9 w=9 k=3 p=1 +bias +relu +slice off=3 @float16 views=05 late=1 op=1 pick=gemm_f16:1x16x3x9:tm=1,bk=32

It is built through ONNX and the ordinary compiler, so views, epilogues, prologues and connections match real models. ``views``
also moves tensors (``VIEWS``); ``late`` selects the operands that slow operators write immediately before (``LATE``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from random import Random

from rammer.ir.operator import ROperator
from rammer_testing.nets import KINDS, SIZES

#: At a tile's edge, one below and one above; primes; and large sizes.
EDGES = tuple(t + d for t in (8, 16, 32, 64, 128) for d in (-1, 0, 1))
ODD = (1, 2, 3, 5, 13, 37, 77, 197)
LARGE = (96, 192, 200, 256, 300, 512, 768, 1000)
#: Sizes required by families with vectors, tensor cores or whole warps.
EVEN = (16, 32, 64, 128, 256, 512)
#: Draws of even sizes before other sizes are accepted: a small ``work`` may permit no even sizes.
PATIENCE = 1000
#: Effect of a digit of ``views`` on the tensor at its position, in cyclic order: the shift of its start and the extra distance of
#: its rows, in elements. The tensor is then aligned nowhere, in some rows, or in all rows by chance.
VIEWS = ((0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (0, 1), (0, 2), (0, 4), (8, 8), (4, 3))
#: Operands that are written late: none, all by one operator, each by a separate operator, or the operand at a position.
LATE = ("", "all", "each", "1", "2", "3", "4")
#: Permitted sizes, by the letter that names the size; other letters permit all sizes above.
SMALL: Mapping[str, tuple[int, ...]] = {
    "n": (1, 1, 2, 3, 8),
    "b": (1, 1, 2, 3, 8),
    "k": (1, 1, 2, 3, 3, 4, 5, 7),
    "bits": (2, 4, 4, 8),
    "block": (16, 20, 32, 33, 64, 128),
    "l": (0, 0, 1, 2, 3, 5, 7),
    "s": (1, 1, 1, 2, 3),
    "d": (1, 1, 1, 2),
    "p": (0, 0, 1, 1, 2),
    "q": (-1, -1, 0, 1, 2),
    "g": (1, 1, 1, 2, 3),
    "off": (1, 2, 3, 4, 5, 8, 16),
    "t": (1, 2, 3),
    "layers": (2, 3),
    "rows": (1, 129, 1000, 3001, 20011),
    "first": (5, 8, 16, 24, 33, 40, 64, 72),
    "last": (4, 5, 8, 16, 33, 64),
    "wide": (5, 8, 16, 24, 33, 40, 64, 72),
    "heads": (1, 2, 3),
    "h": (1, 2, 5, 7, 8, 9, 13, 14, 15, 16, 17, 28, 33),
    "w": (1, 2, 5, 7, 8, 9, 13, 14, 15, 16, 17, 28, 33),
}


@dataclass(frozen=True)
class NetCase:
    """A model with its compile settings. ``operator`` is the position of the operator under test and ``pick`` its candidate
    (``pick_of``); -1 and "" select all. ``seed`` seeds the values."""

    kind: str
    sizes: Mapping[str, int]
    tags: tuple[str, ...] = ()
    precision: str = "float32"
    layout: str = "keep"
    seed: int = 0
    operator: int = -1
    pick: str = ""
    views: str = ""
    late: str = ""

    def __str__(self) -> str:
        words = [self.kind, *(f"{k}={v}" for k, v in self.sizes.items()), *(f"+{t}" for t in self.tags), f"@{self.precision}"]
        words += [f"layout={self.layout}"] if self.layout != "keep" else []
        words += [f"seed={self.seed}"] if self.seed else []
        words += [f"{n}={v}" for n, v in (("views", self.views), ("late", self.late)) if v]
        words += [f"op={self.operator}"] if self.operator >= 0 else []
        return " ".join([*words, *([f"pick={self.pick}"] if self.pick else [])])

    @staticmethod
    def parse(text: str) -> NetCase:
        """Parse the text of ``str``. Raises ValueError for an unknown word."""
        kind, *words = text.split()
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is not a kind of case: {', '.join(KINDS)}")
        case = NetCase(kind, {})
        for word in words:
            name, _, value = word.partition("=")
            if word.startswith("+"):
                case = replace(case, tags=(*case.tags, word[1:]))
            elif word.startswith("@"):
                case = replace(case, precision=word[1:])
            elif name in ("layout", "pick"):
                case = replace(case, layout=value) if name == "layout" else replace(case, pick=value)
            elif name in ("views", "late"):
                case = replace(case, views=value) if name == "views" else replace(case, late=value)
            elif name == "seed":
                case = replace(case, seed=int(value))
            elif name == "op":
                case = replace(case, operator=int(value))
            else:
                case = replace(case, sizes={**case.sizes, name: int(value)})
        return case


def pick_of(tiled: ROperator) -> str:
    """Return the text form of a candidate: family, tile and config."""
    config = ",".join(f"{k}={v}" for k, v in tiled.config)
    return f"{tiled.family or 'generic'}:{'x'.join(map(str, tiled.tile))}:{config}"


def picked(operator: ROperator, pick: str) -> ROperator:
    """Return the candidate that ``pick`` names, its tile clipped to the operator's extents. ValueError if the axes differ."""
    family, tile, config = pick.split(":")
    parts = tuple(int(t) for t in tile.split("x")) if tile else ()
    if len(parts) != len(operator.anchor.axes):
        raise ValueError(f"tile {tile} for {operator.anchor.shape}")
    axes = enumerate(zip(parts, operator.anchor.axes, strict=True))
    cut = tuple(a.extent if d in operator.uncut else max(1, min(t, a.extent)) for d, (t, a) in axes)
    pairs = tuple((k, int(v)) for k, _, v in (c.partition("=") for c in config.split(",") if c))
    return replace(operator, tile=cut, family="" if family == "generic" else family, config=pairs)


@dataclass
class Sampler:
    """A source of random cases.

    ``work`` bounds the products (or elements) of one case; ``precisions`` are those of the device."""

    random: Random
    work: int = 20_000_000
    precisions: tuple[str, ...] = ("float32",)
    kinds: tuple[str, ...] = tuple(KINDS)
    layouts: tuple[str, ...] = ("keep", "keep", "keep", "nhwc")

    def next(self) -> NetCase:
        """Return the next case; all its sizes fit ``work``."""
        r = self.random
        kind = r.choice(self.kinds)
        tags = tuple(t for t in (*KINDS[kind].tags, "fuse") if r.random() < 0.3)
        views = "".join(r.choices("0123456789", (5, *[1] * 9), k=3)) if r.random() < 0.4 else ""
        return self._case(kind, tags, r.choice(self.precisions), views, r.random() < 0.4)

    def first(self) -> Iterator[NetCase]:
        """Yield cases with one feature each. The order is: every kind in every precision with even and odd sizes, then tensors
        moved in every way, then single tags."""
        plain = [("", "", True), ("", "", False)]
        moved = [("", str(v) * 3, True) for v in range(1, len(VIEWS))]
        tags = list(dict.fromkeys(t for k in self.kinds for t in (*KINDS[k].tags, "fuse")))
        for tag, views, even in [*plain, *(x for pair in zip_longest(moved, [(t, "", True) for t in tags]) for x in pair if x)]:
            for kind in self.kinds:
                for precision in self.precisions:
                    if not tag or tag in (*KINDS[kind].tags, "fuse"):
                        yield self._case(kind, (tag,) if tag else (), precision, views, even)

    def _case(self, kind: str, tags: tuple[str, ...], precision: str, views: str, even: bool) -> NetCase:
        r = self.random
        layout = r.choice(self.layouts) if kind in ("conv", "depthwise", "pool", "iconv") else "keep"
        if kind in ("iconv", "imatmul", "stored") and precision == "float16":
            precision = "float32"  # float16 cannot hold sums of products of bytes, even if stored in it; codes stay
        tries = 0
        while True:
            sizes = {name: self._size(name, even and tries < PATIENCE) for name in SIZES[kind]}
            if KINDS[kind].legal(sizes) and KINDS[kind].work(sizes) <= self.work:
                return NetCase(kind, sizes, tags, precision, layout, r.randrange(1, 1_000_000), views=views)
            tries += 1

    def _size(self, name: str, even: bool) -> int:
        if name in SMALL:
            return self.random.choice([n for n in SMALL[name] if not even or n < 5 or n % 4 == 0] or SMALL[name])
        return self.random.choice(EVEN if even else self.random.choice((EDGES, EDGES, ODD, LARGE)))


def smaller(case: NetCase) -> list[NetCase]:
    """Return cases reduced in one respect, largest reductions first, for shrinking."""
    found = [replace(case, tags=tuple(t for t in case.tags if t != tag)) for tag in case.tags]
    found += [replace(case, layout="keep")] if case.layout != "keep" else []
    found += [replace(case, views="")] if case.views else []
    found += [replace(case, late="")] if case.late else []
    for name, value in case.sizes.items():
        least = min(SMALL.get(name, (1,)))
        for less in dict.fromkeys((least, value // 2, value - value % 8, value - 1)):
            sizes = {**case.sizes, name: less}
            if least <= less < value and KINDS[case.kind].legal(sizes):
                found.append(replace(case, sizes=sizes))
    return found
