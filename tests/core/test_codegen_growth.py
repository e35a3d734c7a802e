"""Growth of code generation: the kernel of a deep operator costs operations per Compute and per pair of Computes. A text that
repeats each Compute for each of its two readers doubles at every level."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from rammer.codegen.dialects import C99
from rammer.codegen.emit import emit_operator
from rammer_testing import host_c
from rammer_testing.growth.measure import growth
from rammer_testing.host_c import THREADED, HostCase, case

SHAPE, AT = "f32[i:6, j:32]", "[i, j]"


def chosen(n: int) -> list[str]:
    """Return n conditional updates: each selects a new value or the previous one by a separate condition."""
    made = [f"m{k}: {SHAPE} = h{k}{AT} * 1.5 + x{AT}" for k in range(n)]
    kept = [f"h{k + 1}: {SHAPE} = where(lt(c[{k % 5}, j], 0.0), m{k}{AT}, h{k}{AT})" for k in range(n)]
    return [f"h0: {SHAPE} = x{AT} + 1.0", *(text for pair in zip(made, kept, strict=True) for text in pair)]


def chosen_twice(n: int) -> list[str]:
    """Return n conditions with one value on both sides."""
    kept = [f"h{k + 1}: {SHAPE} = where(lt(c[{k % 5}, j], 0.0), h{k}{AT}, h{k}{AT} * 0.5)" for k in range(n)]
    return [f"h0: {SHAPE} = x{AT} + 1.0", *kept]


def nested(n: int) -> list[str]:
    """Return nested conditions whose sides all read the same value."""
    inner = f"where(lt(c[1, j], 0.5), h{{k}}{AT} + 2.0, h{{k}}{AT})"
    kept = [f"h{k + 1}: {SHAPE} = where(lt(c[{k % 5}, j], 0.0), {inner.format(k=k)}, max(h{k}{AT}, 0.0))" for k in range(n)]
    return [f"h0: {SHAPE} = x{AT} + 1.0", *kept]


def diamonds(n: int, name: str = "h", first: str = f"x{AT} + 1.0", other: str = "") -> list[str]:
    """Return n diamonds: two maps of each value, added by the next; ``other`` formats the read of the second map."""
    texts = [f"{name}0: {SHAPE} = {first}"]
    for k in range(n):
        two = f"{name}{k}a", f"{name}{k}b"
        second = other.format(two[1]) if other else f"{two[1]}{AT}"
        texts += [f"{two[0]}: {SHAPE} = exp({name}{k}{AT})", f"{two[1]}: {SHAPE} = tanh({name}{k}{AT})"]
        texts.append(f"{name}{k + 1}: {SHAPE} = min({two[0]}{AT} * 0.25, 2.0) + {second}")
    return texts


def padded(n: int) -> list[str]:
    """Return diamonds in which the second map is read at indices that may be out of bounds."""
    return diamonds(n, other="pad({}[i, j - 32 * (i // 5)], 0.5)")


def rows(n: int) -> list[str]:
    """Return diamonds before a sum along the rows, and after it."""
    behind = diamonds(n, "g", f"h{n}{AT} - s[i]")
    return [*diamonds(n), f"s: f32[i:6] = sum[k:32] h{n}[i, k]", *behind]


CHAINS: list[Callable[[int], list[str]]] = [chosen, chosen_twice, nested, diamonds, rows]
#: One thread with vectors, one without, several.
DIALECTS = {"vectors": C99, "scalars": replace(C99, name="c99_scalar", vectors=()), "threads": THREADED}
#: 2 if the cost is per Compute, 4 if per pair. A cost that doubles with each Compute is in the hundreds.
MOST = 4.2


def drawn(chain: Callable[[int], list[str]], n: int, rng: np.random.Generator, layer: str) -> HostCase:
    values = {"x": rng.standard_normal((6, 32)).astype(np.float32), "c": rng.standard_normal((5, 32)).astype(np.float32)}
    texts = chain(n)
    read = {name for name in values if any(f"{name}[" in t for t in texts)}
    return case(texts, {name: values[name] for name in read}, (3, 32), layer)


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["thread", "veu"])
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("chain", CHAINS)
def test_texts_grow_with_the_operator(
    chain: Callable[[int], list[str]], dialect: str, layer: str, rng: np.random.Generator
) -> None:
    def write(n: int) -> None:
        item = drawn(chain, n, rng, layer)
        emit_operator(item.operator, item.binding, DIALECTS[dialect])

    assert growth(write, 4) <= MOST


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["thread", "veu"])
@pytest.mark.parametrize("chain", [*CHAINS, padded])
def test_deep_operators_are_right(chain: Callable[[int], list[str]], layer: str, rng: np.random.Generator) -> None:
    item = drawn(chain, 9, rng, layer)
    for target in DIALECTS.values():
        host_c.check_all([item], target)
