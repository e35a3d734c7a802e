"""The extents of a range as functions of its lengths, found from their values at several lengths.

An extent is an affine function of lengths and of derived lengths. A derived length is a quotient with floor, as behind a stride,
or a product, as of a flattened image. The runtime computes it from the lengths and passes it like one, so later stages only know
affine functions.

Several functions may fit the values. All functions that fit are compared at all lengths of the range. If they differ, the model
is bound at a length where they do (``MoreProbes``), until those left are equal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, combinations_with_replacement
from typing import Any, Final, NamedTuple, TypeAlias, cast

import numpy as np

from rammer.ir.extent import LEAST, AffineExtent, Dim, Formula, NoRange, Point, Ranged, format_point
from rammer.ir.names import Names, make_identifier

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

#: Divisors of functions that compete with a simpler one; greater divisors are tried if nothing else fits.
NEAR: Final = 8
#: Most divisors, and most numerators per divisor, that are compared.
MOST_TRIED: Final = 32
#: Most lengths of a dimension, and most combinations of lengths, at which functions are compared.
MOST_COMPARED: Final = 1 << 14
JOINT: Final = 256
#: Most lengths that are added to tell functions apart, and of one round.
MOST_PROBES: Final = 24
ROUND: Final = 3


class MoreProbes(Exception):
    """Request for the model at further ``points``, at which functions differ that fit all known points."""

    def __init__(self, points: Sequence[Point]) -> None:
        super().__init__("; ".join(map(format_point, points)))
        self.points = points


class _Candidate(NamedTuple):
    """A function that fits: ``terms`` and ``offset``, where the name "" stands for ``formula``."""

    terms: tuple[tuple[str, int], ...]
    offset: int
    formula: Formula | None = None


@dataclass
class LengthFit:
    """Functions of lengths through values at ``points``, of which the first has the greatest lengths. ``spans`` are the least and
    greatest lengths, ``steps`` the distances of lengths. ``lengths`` are the scalar inputs by name, including those of
    ``formulas``, the derived lengths."""

    points: Sequence[Point]
    spans: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    steps: Mapping[str, int] = field(default_factory=dict)
    taken: Names = field(default_factory=lambda: Names(()))
    lengths: dict[str, str] = field(default_factory=dict)
    formulas: dict[str, Formula] = field(default_factory=dict)
    _doubts: list[tuple[Array, list[Array]]] = field(default_factory=list)
    _wanted: list[int] = field(default_factory=list)  #: Places of requested lengths.
    _known: dict[tuple[int, ...], Dim] = field(default_factory=dict)
    _bases: dict[AffineExtent, Array] = field(default_factory=dict)  #: Operands of formulas, with their values at the points.

    def __post_init__(self) -> None:
        first = self.points[0]
        spans = self.spans or {n: (min(p[n] for p in self.points), first[n]) for n in first}
        self._at = {n: np.array([p[n] for p in self.points]) for n in first}
        self._grid = _comparison_grid(first, spans, self.steps)
        self._bindable = np.all([values >= LEAST for values in self._grid.values()], axis=0)
        for name in first:
            self.lengths.setdefault(name, "")
            self._bases[AffineExtent(((name, 1),), 0)] = self._at[name]
        for name, step in self.steps.items():
            if step > 1 and name in first:
                self._derive(Formula((AffineExtent(((name, 1),), -(first[name] % step)),), step))

    def name_inputs(self, taken: Names) -> None:
        """Name the scalar inputs of all lengths so far, and of later ones, with names that are not ``taken``."""
        self.taken = taken
        for name, tensor in self.lengths.items():
            self.lengths[name] = tensor or self._make_name(name)

    def _make_name(self, name: str) -> str:
        return make_identifier(
            f"length_{name}" if name not in self.formulas else f"derived_length_{len(self.formulas)}", self.taken
        )

    def values(self, dim: Dim) -> list[int]:
        """Return the value of ``dim`` at each point."""
        return [dim] * len(self.points) if isinstance(dim, int) else [int(n) for n in _evaluate(dim, self._at)]

    def dim(self, values: Sequence[int], where: str, hints: Sequence[Dim] = ()) -> Dim:
        """Return the function of lengths through ``values``, one per point; ``hints`` are tried, too. Raise NoRange if none is
        found."""
        if len(set(values)) == 1:
            return values[0]
        key = tuple(values)
        if key not in self._known:
            self._known[key] = self._fit(key, where, hints)
        return self._known[key]

    def over_range(self, dim: Dim) -> Array:
        """Return the values of ``dim`` at the lengths of the range at which functions are compared."""
        return np.asarray(dim) if isinstance(dim, int) else _evaluate(dim, self._grid)

    def require(self, wrong: Array, what: str) -> None:
        """Request the model at a length where ``wrong`` is True (see ``over_range``), if there is one. Raises NoRange without
        such a length that can be bound: ``what`` is then impossible to know."""
        if not wrong.any():
            return
        places = np.flatnonzero(wrong & self._bindable)
        if not len(places):
            raise NoRange(f"{what} is unknown at a length below {LEAST}")
        self._wanted.append(int(places[0]))

    def extent(self, values: Sequence[int], where: str, hints: Sequence[Dim] = ()) -> Dim:
        """Return the function through extents. Raise NoRange if none exists, or if an extent shrinks as a length grows, as of
        ``x[-20:6]``: memory and loops have the extents of the greatest lengths."""
        found = self.dim(values, where, hints)
        if (self.over_range(found) > values[0]).any():
            raise NoRange(f"{where} shrinks as {', '.join(self.points[0])} grows")
        return found

    def least(self, dim: AffineExtent) -> int:
        """Return the value of ``dim`` at the least lengths."""
        point = Ranged({}, {}, formulas=self.formulas).complete({n: low for n, (low, _) in self.spans.items()})
        return dim.at(point)

    @property
    def is_settled(self) -> bool:
        """True if all functions that fit are equal at all lengths."""
        return not self._doubts and not self._wanted

    def settle(self) -> None:
        """Raise MoreProbes if functions that fit differ at a length."""
        if self.is_settled:
            return
        points = [self._point(place) for place in self._wanted]
        if len(self.points) >= MOST_PROBES or any(p in self.points for p in points):
            raise NoRange(f"the programs of {len(self.points)} lengths do not determine those of others")
        chosen, rows = list[int](), [np.array([other != first for other in others]) for first, others in self._doubts]
        left = np.concatenate(rows) & self._bindable if rows else np.zeros((0, len(self._bindable)), bool)
        while len(chosen) < ROUND and left.any():
            chosen.append(int(left.sum(axis=0).argmax()))
            left = left[~left[:, chosen[-1]]]
        points += [self._point(place) for place in chosen]
        raise MoreProbes(list({tuple(p.items()): p for p in points}.values())[: 2 * ROUND])

    def _point(self, place: int) -> Point:
        return {n: int(self._grid[n][place]) for n in self.points[0]}

    # --- functions ----------------------------------------------------------------------------

    def _fit(self, values: tuple[int, ...], where: str, hints: Sequence[Dim]) -> Dim:
        wanted = np.array(values)
        found = [*self._affine_functions(wanted), *self._matching_hints(values, hints)]
        rest = [*self._near_quotients(wanted, bool(found)), *(() if found else self._sums_of_two(wanted))]
        found += rest or (() if found else self._products(wanted))
        if not found:
            at = "; ".join(f"{format_point(p)}: {v}" for p, v in list(zip(self.points, values, strict=True))[:4])
            raise NoRange(f"{where} is not a known function of {', '.join(self.points[0])} ({at})")
        first, *others = found
        over = self._over_grid(first)
        doubts = {o.tobytes(): o for o in map(self._over_grid, others) if ((o != over) & self._bindable).any()}
        if doubts:
            self._doubts.append((over, list(doubts.values())))
        return self._chosen(first)

    def _over_grid(self, candidate: _Candidate) -> Array:
        grid = self._grid if candidate.formula is None else {**self._grid, "": _evaluate(candidate.formula, self._grid)}
        return _evaluate(AffineExtent(candidate.terms, candidate.offset), grid)

    def _chosen(self, candidate: _Candidate) -> AffineExtent:
        name = self._derive(candidate.formula) if candidate.formula is not None else ""
        made = AffineExtent(tuple((n or name, f) for n, f in candidate.terms), candidate.offset)
        self._bases[made] = _evaluate(made, self._at)
        return made

    def _derive(self, formula: Formula) -> str:
        """Return the name of a derived length."""
        name = str(formula)
        if name not in self.formulas:
            self.formulas[name] = formula
            self.lengths[name] = self._make_name(name) if all(self.lengths.values()) else ""
            self._at[name], self._grid[name] = _evaluate(formula, self._at), _evaluate(formula, self._grid)
            self._bases[AffineExtent(((name, 1),), 0)] = self._at[name]
        return name

    def _affine_functions(self, wanted: Array) -> Iterator[_Candidate]:
        """Yield the affine function of the lengths, and those of one derived length."""
        terms, offset, start = list[tuple[str, int]](), int(wanted[0]), self.points[0]
        for name in start:
            other = next((i for i, p in enumerate(self.points) if {n for n in p if p[n] != start[n]} == {name}), None)
            if other is None:  # all points have the same length of this dimension
                continue
            factor, left = divmod(int(wanted[other] - wanted[0]), self.points[other][name] - start[name])
            if left:
                break
            terms += [(name, factor)] if factor else []
            offset -= factor * start[name]
        else:
            yield from self._if_exact(tuple(terms), offset, wanted)
        for name in self.formulas:
            yield from self._through((name,), wanted)

    def _through(self, names: tuple[str, ...], wanted: Array) -> Iterator[_Candidate]:
        """Yield the affine function of these lengths through ``wanted``, if it exists and depends on all of them."""
        rows = np.stack([*(self._at[n] for n in names), np.ones(len(wanted))], axis=1)
        solved, _, rank, _ = np.linalg.lstsq(rows, wanted.astype(np.float64), rcond=None)
        factors = [round(float(n)) for n in solved]
        if rank == len(factors) and all(factors[:-1]) and np.abs(solved - factors).max() < 1e-3:
            yield from self._if_exact(tuple(zip(names, factors[:-1], strict=True)), factors[-1], wanted)

    def _if_exact(self, terms: tuple[tuple[str, int], ...], offset: int, wanted: Array) -> Iterator[_Candidate]:
        if terms and np.array_equal(_evaluate(AffineExtent(terms, offset), self._at), wanted):
            yield _Candidate(terms, offset)

    def _matching_hints(self, values: tuple[int, ...], hints: Sequence[Dim]) -> Iterator[_Candidate]:
        for hint in hints:
            if isinstance(hint, AffineExtent) and tuple(self.values(hint)) == values:
                yield _Candidate(hint.terms, hint.offset)

    def _sums_of_two(self, wanted: Array) -> Iterator[_Candidate]:
        for names in combinations(self._at, 2):
            yield from self._through(names, wanted)

    def _near_quotients(self, wanted: Array, simple: bool) -> list[_Candidate]:
        """Return quotients whose divisor is at most ``NEAR`` or, unless a ``simple`` function fits, twice the least one."""
        found = list(self._quotients(wanted, NEAR if simple else None))
        divisors = [c.formula.divisor for c in found if c.formula is not None]
        return [c for c, divisor in zip(found, divisors, strict=True) if divisor <= max(NEAR, 2 * min(divisors))]

    def _quotients(self, wanted: Array, most: int | None) -> Iterator[_Candidate]:
        """Yield the functions ``factor * ((length + n) // divisor) + offset`` with divisors up to ``most``."""
        least = int(wanted.min())
        factor = math.gcd(*(int(n) for n in wanted - least))
        for base, length in list(self._bases.items()):
            same_order = np.dot(length - length.mean(), wanted - wanted.mean()) >= 0
            low = least if same_order else int(wanted.max())
            sign = factor if same_order else -factor
            steps = (wanted - low) // sign
            grown, ends = int(length.max() - length.min()), int(steps.max())
            divisors = range(max(2, grown // (ends + 1)), min(grown // max(ends - 1, 1) + 1, most or grown + 1) + 1)
            for divisor in divisors[:: len(divisors) // MOST_TRIED + 1]:
                numbers = divisor * steps - length  # the least number at each point
                between = range(int(numbers.max()), int(numbers.min()) + divisor)
                for number in between[:: len(between) // MOST_TRIED + 1]:
                    carried, number = divmod(number + base.offset, divisor)
                    formula = Formula((replace(base, offset=number),), divisor)
                    yield _Candidate((("", sign),), low + sign * carried, formula)

    def _products(self, wanted: Array) -> Iterator[_Candidate]:
        for a, b in combinations_with_replacement(self._bases, 2):
            product = self._bases[a] * self._bases[b]
            other = int(np.argmax(product != product[0]))
            if product[other] == product[0]:
                continue
            factor, left = divmod(int(wanted[other] - wanted[0]), int(product[other] - product[0]))
            offset = int(wanted[0]) - factor * int(product[0])
            if not left and factor and np.array_equal(factor * product + offset, wanted):
                yield _Candidate((("", factor),), offset, Formula((a, b)))


def _evaluate(function: AffineExtent | Formula, at: Mapping[str, Array]) -> Array:
    """Return the values of a function at arrays of lengths."""
    return np.asarray(function.at(cast("Any", at)))


def _comparison_grid(first: Point, spans: Mapping[str, tuple[int, int]], steps: Mapping[str, int]) -> dict[str, Array]:
    """Return the lengths at which functions are compared: all of each dimension alone, and drawn combinations."""
    every = {n: np.arange(first[n], low - 1, -steps.get(n, 1)) for n, (low, _) in spans.items()}
    rng, lines = np.random.default_rng(0), list[dict[str, Array]]()
    for name, all_of_it in every.items():
        some = all_of_it if len(all_of_it) <= MOST_COMPARED else np.sort(rng.choice(all_of_it, MOST_COMPARED, replace=False))
        lines.append({n: some if n == name else np.full(len(some), first[n]) for n in every})
    if len(every) > 1:
        lines.append({n: rng.choice(values, JOINT) for n, values in every.items()})
    return {n: np.concatenate([line[n] for line in lines]) for n in every}
