"""Forests as tables: trees padded to one depth, or nodes that store the indices of their children."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np

from rammer.frontend.lower.contrib.function import Declined

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
#: Depth limit of trees: every level is an expression.
MOST_LEVELS: Final = 96
#: Depth, growth and size limits of padded tables: trees up to this depth may be padded to one depth within either limit.
PADDED_LEVELS, PADDED_GROWTH, PADDED_FREE = 12, 6, 1 << 16


@dataclass
class Forest:
    """The nodes, trees and leaves of a forest. A node tests ``low <= x[feature] <= high``; if ``tracks``, a NaN passes, too. It
    continues with ``true`` or ``false``: a node, or ``~leaf``. ``leaves[i]`` lists targets with weights."""

    feature: list[int] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    tracks: list[bool] = field(default_factory=list)
    true: list[int] = field(default_factory=list)
    false: list[int] = field(default_factory=list)
    roots: list[int] = field(default_factory=list)
    leaves: list[list[tuple[int, float]]] = field(default_factory=list)

    def add(self, feature: int) -> int:
        """Add a node without children and return its index."""
        self.feature.append(feature)
        self.low.append(-np.inf)
        self.high.append(np.inf)
        self.true.append(0)
        self.false.append(0)
        self.tracks.append(False)
        return len(self.feature) - 1

    def ask(self, node: int, mode: str, value: float, tracks: bool, ends: tuple[int, int], kind: np.dtype[Any]) -> None:
        """Set the test of ``node`` and the children ``ends``. A negated test is stored as its opposite with swapped children."""
        least, most = -np.inf, np.inf
        positive, swapped = {"GT": ("LEQ", True), "GTE": ("LT", True), "NEQ": ("EQ", True)}.get(mode, (mode, False))
        low, high = least, value
        if positive == "LT":
            high = float(np.nextafter(kind.type(value), kind.type(least))) if value > least else least
            low = most if value == least else least
        elif positive == "EQ":
            low = value
        elif positive != "LEQ":
            raise Declined(f"a node has the mode {mode!r}")
        if np.isnan(value):
            low, high = most, least
        self.low[node], self.high[node] = low, high
        self.true[node], self.false[node] = ends[::-1] if swapped else ends
        # A NaN is not within bounds and thus continues with ``false``, unless the node tracks it.
        asked = tracks or (mode == "NEQ")
        self.tracks[node] = not asked if swapped else asked

    def depth(self) -> int:
        """Return the depth of the deepest tree. Raise Declined for a cycle, and for more than ``MOST_LEVELS`` levels."""
        level, nodes = 0, {r for r in self.roots if r >= 0}
        while nodes:
            level += 1
            if level > MOST_LEVELS:
                raise Declined(f"a tree has more than {MOST_LEVELS} levels")
            nodes = {c for n in nodes for c in (self.true[n], self.false[n]) if c >= 0}
        return level

    def padded(self, depth: int, kind: np.dtype[Any]) -> tuple[dict[str, Array], Array]:
        """Return tables ``[trees, 2 ** depth - 1]``, level by level, and the leaf at every index after the last level."""
        tables = self.arrays(kind)
        empty = {"feature": 0, "low": -np.inf, "high": np.inf, "tracks": True}
        at, levels = np.array(self.roots, np.int64)[:, None], dict[str, list[Array]]()
        for _ in range(depth):
            inner = at >= 0
            safe = np.where(inner, at, 0)
            for name, nothing in empty.items():
                levels.setdefault(name, []).append(np.where(inner, tables[name][safe], np.array(nothing, tables[name].dtype)))
            ends = [np.where(inner, tables[name][safe], at) for name in ("true", "false")]
            at = np.stack(ends, axis=-1).reshape(len(at), -1)
        return {name: np.concatenate(parts, axis=1) for name, parts in levels.items()}, ~at

    def arrays(self, kind: np.dtype[Any]) -> dict[str, Array]:
        """Return one table per field of the nodes, with at least one node."""
        empty = not self.feature
        made: dict[str, Array] = {
            "feature": np.array(self.feature or [0], np.int32),
            "low": np.array(self.low or [-np.inf]).astype(kind),
            "high": np.array(self.high or [np.inf]).astype(kind),
            "tracks": np.array(self.tracks or [True]),
        }
        for name, ends in (("true", self.true), ("false", self.false)):
            made[name] = np.array([0] if empty else ends, np.int64)
        return made


def make_classic_forest(attributes: Mapping[str, Any], leaf: str, kind: np.dtype[Any]) -> Forest:
    """Return the forest of a TreeEnsembleRegressor (``leaf`` is "target") or TreeEnsembleClassifier ("class")."""
    trees, names = attributes.get("nodes_treeids", ()), attributes.get("nodes_nodeids", ())
    count = len(names)
    lists = {n: list(attributes.get(f"nodes_{n}", ())) for n in ("featureids", "modes", "truenodeids", "falsenodeids")}
    values = read_numbers(attributes, "nodes_values")
    tracks = list(attributes.get("nodes_missing_value_tracks_true", ())) or [0] * count
    if {len(trees), len(values), len(tracks), *map(len, lists.values())} != {count}:
        raise Declined("the attributes of its nodes differ in length")
    place = {key: i for i, key in enumerate(zip(trees, names, strict=True))}
    if len(place) != count:
        raise Declined("two nodes have the same name")
    forest, made = Forest(), dict[int, int]()
    for i, mode in enumerate(lists["modes"]):
        if mode == "LEAF":
            forest.leaves.append([])
            made[i] = ~(len(forest.leaves) - 1)
        else:
            made[i] = forest.add(int(lists["featureids"][i]))
    children = set[int]()
    for i, mode in enumerate(lists["modes"]):
        if mode == "LEAF":
            continue
        ends = [place.get((trees[i], lists[f"{side}nodeids"][i])) for side in ("true", "false")]
        if None in ends:
            raise Declined(f"node {names[i]} of tree {trees[i]} has a child that does not exist")
        children.update(e for e in ends if e is not None)
        one, two = (made[e] for e in ends if e is not None)
        forest.ask(made[i], str(mode).removeprefix("BRANCH_"), float(values[i]), bool(tracks[i]), (one, two), kind)
    _add_leaf_weights(attributes, leaf, forest, place, made)
    forest.roots = [made[place[key]] for key in _find_roots(place, children)]
    return forest


def _add_leaf_weights(
    attributes: Mapping[str, Any], leaf: str, forest: Forest, place: Mapping[tuple[int, int], int], made: Mapping[int, int]
) -> None:
    keys = list(zip(attributes.get(f"{leaf}_treeids", ()), attributes.get(f"{leaf}_nodeids", ()), strict=False))
    targets, weights = attributes.get(f"{leaf}_ids", ()), read_numbers(attributes, f"{leaf}_weights")
    if not len(keys) == len(targets) == len(weights):
        raise Declined("the attributes of its leaves differ in length")
    for key, target, weight in zip(keys, targets, weights, strict=True):
        node = made[place[key]] if key in place else 0
        if node >= 0:
            raise Declined(f"a weight is given to node {key[1]} of tree {key[0]}, which is not a leaf")
        forest.leaves[~node].append((int(target), float(weight)))


def _find_roots(place: Mapping[tuple[int, int], int], children: set[int]) -> Iterator[tuple[int, int]]:
    """Yield the first node of every tree that is not a child."""
    seen = set[int]()
    for key, i in place.items():
        if i not in children and key[0] not in seen:
            seen.add(key[0])
            yield key
    if missing := {tree for tree, _ in place} - seen:
        raise Declined(f"tree {min(missing)} has no root")


def read_numbers(attributes: Mapping[str, Any], name: str) -> Sequence[float]:
    """Return the floats of an attribute, or of its tensor variant."""
    tensor = attributes.get(f"{name}_as_tensor")
    if tensor is not None and np.size(tensor):
        return [float(v) for v in _read_tensor(attributes, f"{name}_as_tensor")]
    return [float(v) for v in attributes.get(name, ())]


def _read_tensor(attributes: Mapping[str, Any], name: str, kinds: str = "biuf") -> Array:
    """Return the numbers of a tensor of one of NumPy's ``kinds``; empty if absent. Raise Declined for other elements."""
    values = np.ravel(attributes.get(name, ()))
    if values.size and values.dtype.kind not in kinds:
        raise Declined(f"{name} is a tensor of {values.dtype}")
    return values


#: Modes of TreeEnsemble, by number.
_MODES: Final = ("LEQ", "LT", "GTE", "GT", "EQ", "NEQ", "MEMBER")


def make_modern_forest(attributes: Mapping[str, Any], kind: np.dtype[Any]) -> Forest:
    """Return the forest of a TreeEnsemble."""
    lists = {n: list(attributes[f"nodes_{n}"]) for n in ("featureids", "truenodeids", "falsenodeids", "trueleafs", "falseleafs")}
    modes, splits = _read_tensor(attributes, "nodes_modes", "iu"), _read_tensor(attributes, "nodes_splits").astype(np.float64)
    count = len(modes)
    tracks = list(attributes.get("nodes_missing_value_tracks_true", ())) or [0] * count
    if {len(splits), len(tracks), *map(len, lists.values())} != {count} or any(not 0 <= m < len(_MODES) for m in modes):
        raise Declined("the attributes of its nodes differ in length, or a mode is unknown")
    weights = _read_tensor(attributes, "leaf_weights").astype(np.float64)
    if len(weights) != len(attributes["leaf_targetids"]):
        raise Declined("the attributes of its leaves differ in length")
    forest = Forest(leaves=[[(int(t), float(w))] for t, w in zip(attributes["leaf_targetids"], weights, strict=True)])
    for feature in lists["featureids"]:
        forest.add(int(feature))
    sets = _split_sets(_read_tensor(attributes, "membership_values"))
    for i in range(count):
        one, two = (_child_index(forest, lists, i, side, count) for side in ("true", "false"))
        if modes[i] == _MODES.index("MEMBER"):
            _add_member_nodes(forest, i, next(sets, []), (one, two), bool(tracks[i]), kind)
        else:
            forest.ask(i, _MODES[modes[i]], float(splits[i]), bool(tracks[i]), (one, two), kind)
    roots = [int(r) for r in attributes["tree_roots"]]
    if any(not 0 <= r < count for r in roots):
        raise Declined("a root node is missing")
    # A tree of one leaf becomes a node whose children are both that leaf.
    forest.roots = roots
    return forest


def _child_index(forest: Forest, lists: Mapping[str, list[int]], i: int, side: str, count: int) -> int:
    index, leaf = int(lists[f"{side}nodeids"][i]), bool(lists[f"{side}leafs"][i])
    if not 0 <= index < (len(forest.leaves) if leaf else count):
        raise Declined(f"node {i} has a child that does not exist")
    return ~index if leaf else index


def _split_sets(values: Array) -> Iterator[list[float]]:
    """Yield the members of each set; NaN separates the sets."""
    members = list[float]()
    for value in values:
        if np.isnan(value):
            yield members
            members = []
        else:
            members.append(float(value))
    if members:
        yield members


def _add_member_nodes(
    forest: Forest, node: int, values: list[float], ends: tuple[int, int], tracks: bool, kind: np.dtype[Any]
) -> None:
    """Add a chain of equality nodes that tests if the feature is one of ``values``."""
    true, false = ends
    for value in values[:-1]:
        after = forest.add(forest.feature[node])
        forest.ask(node, "EQ", value, tracks, (true, after), kind)
        node = after
    forest.ask(node, "EQ", values[-1] if values else np.nan, tracks, (true, false), kind)
