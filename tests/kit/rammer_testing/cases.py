"""Small models that between them need every kind of kernel, as one line of text each: what the search over kernels samples.

A case says what to compute, in which sizes, precision and layout, and (where it came from a failure) by which candidate:

    conv n=2 c=17 m=20 h=9 w=9 k=3 p=1 +bias +relu +slice off=3 @float16 views=05 late=1 op=1 pick=gemm_f16:1x16x3x9:tm=1,bk=32

It is built through ONNX and the ordinary compiler, so views, epilogues, prologues and connections are those of real models.
``views`` moves tensors besides (``VIEWS``), and ``late`` says which operands slow operators write just before (``LATE``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from random import Random

from rammer.ir.operator import ROperator
from rammer_testing.nets import KINDS, SIZES

#: At a tile's edge, one below and one above; primes; and some that are large.
EDGES = tuple(t + d for t in (8, 16, 32, 64, 128) for d in (-1, 0, 1))
ODD = (1, 2, 3, 5, 13, 37, 77, 197)
LARGE = (96, 192, 200, 256, 300, 512, 768, 1000)
#: Sizes that families with vectors, tensor cores or whole warps ask for.
EVEN = (16, 32, 64, 128, 256, 512)
#: Draws of even sizes before others are taken, too: under a small ``work`` there may be no even ones.
PATIENCE = 1000
#: What a digit of ``views`` does to the tensor at its position, in turns: elements by which it begins later, and by which its
#: rows lie further apart. So it is aligned nowhere, in some rows, or in all of them by chance.
VIEWS = ((0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (0, 1), (0, 2), (0, 4), (8, 8), (4, 3))
#: Which operands are written late: none, all by one operator, each by its own, or the one at a position.
LATE = ("", "all", "each", "1", "2", "3", "4")
#: What a size may be, by the letter that names it; all others take any of the above.
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
    """One model and how it is compiled. ``operator`` is the position of the one under test and ``pick`` its candidate
    (``pick_of``); -1 and "" stand for all. ``seed`` is that of the values."""

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
        """Inverse of ``str``. ValueError for a word that means nothing."""
        kind, *words = text.split()
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is no kind of case: {', '.join(KINDS)}")
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
    """A candidate of an operator as text: family, tile and config."""
    config = ",".join(f"{k}={v}" for k, v in tiled.config)
    return f"{tiled.family or 'generic'}:{'x'.join(map(str, tiled.tile))}:{config}"


def picked(operator: ROperator, pick: str) -> ROperator:
    """The candidate that ``pick`` names, its tile cut to the operator's extents. ValueError where it has other axes."""
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
    """Random cases: ``work`` is the most products (or elements) of one, ``precisions`` those of the device."""

    random: Random
    work: int = 20_000_000
    precisions: tuple[str, ...] = ("float32",)
    kinds: tuple[str, ...] = tuple(KINDS)
    layouts: tuple[str, ...] = ("keep", "keep", "keep", "nhwc")

    def next(self) -> NetCase:
        """The next case, all of whose sizes fit ``work``."""
        r = self.random
        kind = r.choice(self.kinds)
        tags = tuple(t for t in (*KINDS[kind].tags, "fuse") if r.random() < 0.3)
        views = "".join(r.choices("0123456789", (5, *[1] * 9), k=3)) if r.random() < 0.4 else ""
        return self._case(kind, tags, r.choice(self.precisions), views, r.random() < 0.4)

    def first(self) -> Iterator[NetCase]:
        """Cases with one thing each, those without any first: every kind in every precision with even sizes and odd ones, then
        with tensors moved in every way, then with one tag."""
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
            precision = "float32"  # sums of products of bytes are no numbers of float16, whoever stores them in it; codes stay
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
    """Cases with less of one thing, the largest steps first: what shrinking tries."""
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
