"""Tree ensembles: all trees are walked level by level, then the weights of their leaves are combined."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rammer.frontend.lower.contrib.function import Declined, FunctionBody, standard_function
from rammer.frontend.lower.ml.forest import (
    PADDED_FREE,
    PADDED_GROWTH,
    PADDED_LEVELS,
    Array,
    Forest,
    make_classic_forest,
    make_modern_forest,
    read_numbers,
)
from rammer.frontend.lower.ml.scores import apply_post_transform, binary_outputs, select_best_label, select_binary_label
from rammer.frontend.lower.operators.stored import DOMAIN
from rammer.frontend.read.limits import MAX_TABLE

_COMBINERS = {"SUM": "sum", "AVERAGE": "sum", "MIN": "min", "MAX": "max"}


def rows_of(b: FunctionBody) -> str:
    """Return ``X [rows, features]`` as floats; a tensor with one axis is one row."""
    rows, features = _row_extents(b)
    x = b.input(0) if b.dtype() in ("float32", "float64") else b.cast(b.input(0), "float32")
    return x if len(b.shape(0)) == 2 else b.reshape(x, rows, features)


def _float_dtype(b: FunctionBody) -> np.dtype[np.floating]:
    return np.dtype(np.float64 if b.dtype() == "float64" else np.float32)


def aggregate_leaves(b: FunctionBody, forest: Forest, targets: int, how: str) -> str:
    """Return the combined leaf weights of every row, ``[rows, targets]``."""
    if how not in _COMBINERS:
        raise Declined(f"the aggregate function {how!r} is not known")
    used = {t for leaf in forest.leaves for t, _ in leaf}
    if targets < 1 or any(not 0 <= t < targets for t in used) or not forest.roots:
        raise Declined(f"{len(forest.roots)} trees have leaves for other targets than {targets}")
    rows, features = _row_extents(b)
    # Leaf weights form a table with a column per target, even for targets without weights.
    if targets > max(len(used), MAX_TABLE):
        raise Declined(f"there are {targets} targets, and leaves have weights for {len(used)} of them")
    if any(not 0 <= f < features for f in forest.feature):
        raise Declined(f"a node reads a feature beyond the {features} of X")
    if not used:
        return b.constant(np.zeros((rows, targets), _float_dtype(b)))
    ordered, groups = _group_trees(forest, targets, how)
    leaves, weights, padded = _walk_trees(b, ordered, targets if not groups else 0, how)
    flags = {"padded": int(padded), "groups": int(groups), "targets": targets}
    total = b.op("Gathered", leaves, b.constant(weights), domain=DOMAIN, how=_COMBINERS[how], **flags)[0]
    if how == "AVERAGE":
        total = b.Div(total, b.constant(np.array(len(forest.roots), _float_dtype(b))))
    if how in ("MIN", "MAX"):  # no leaf has a weight for the target
        total = b.Where(b.IsInf(total), b.constant(np.array(0, _float_dtype(b))), total)
    return total


def _row_extents(b: FunctionBody) -> tuple[int, int]:
    """Return the rows and features of X. Raise Declined unless X has one or two axes."""
    shape = b.shape(0)
    if len(shape) not in (1, 2):
        raise Declined(f"X has the shape {list(shape)}, where it needs rows of features")
    return (shape[0] if len(shape) == 2 else 1), shape[-1]


def _group_trees(forest: Forest, targets: int, how: str) -> tuple[Forest, bool]:
    """Return the trees sorted by target, equally many per target, if every tree has leaves of one target only. Trees of an empty
    leaf fill up."""
    if how not in ("SUM", "AVERAGE"):
        return forest, False
    owners = list[list[int]]([] for _ in range(targets))
    for root in forest.roots:
        mine = {t for leaf in _tree_leaves(forest, root) for t, _ in forest.leaves[leaf]}
        if len(mine) > 1:
            return forest, False
        owners[mine.pop() if mine else 0].append(root)
    most = max(map(len, owners))
    if most * targets > 2 * len(forest.roots):
        return forest, False
    leaves = [*forest.leaves, []]
    roots = [r for mine in owners for r in (*mine, *[~(len(leaves) - 1)] * (most - len(mine)))]
    return replace(forest, roots=roots, leaves=leaves), True


def _tree_leaves(forest: Forest, root: int) -> set[int]:
    """Return the leaves of a tree."""
    found, seen, waiting = set[int](), set[int](), [root]
    while waiting:
        node = waiting.pop()
        if node < 0:
            found.add(~node)
        elif node not in seen:
            seen.add(node)
            waiting += [forest.true[node], forest.false[node]]
    return found


def _walk_trees(b: FunctionBody, forest: Forest, targets: int, how: str) -> tuple[str, Array, bool]:
    """Return the leaves that rows reach, their weight table, and True if leaves are counted per tree."""
    kind, depth, trees = _float_dtype(b), forest.depth(), len(forest.roots)
    table = _leaf_weights(forest, targets, how, kind)
    size = trees << depth if depth <= PADDED_LEVELS else 0
    padded = 0 < size <= max(PADDED_GROWTH * len(forest.leaves), PADDED_FREE)
    depth = max(depth, 1)
    if padded:
        more = list[Array]()
        tables, ends = forest.padded(depth, kind)
        table = table[ends]
    else:
        tables, more = _link_nodes(forest, kind)
    # A bound that no node has, and a NaN branch that is equal for all nodes, are omitted.
    low = "" if np.isneginf(tables["low"]).all() else b.constant(tables["low"])
    inner = tables["high"] < np.inf
    tracks = b.constant(tables["tracks"]) if bool((tables["tracks"] & inner).any()) or not padded else ""
    operands = [rows_of(b), b.constant(tables["feature"].astype(np.int32)), b.constant(tables["high"]), low, tracks]
    attributes = {"padded": int(padded), "depth": depth, "trees": trees}
    leaves = b.op("Walk", *operands, *(b.constant(m) for m in more), domain=DOMAIN, **attributes)[0]
    return leaves, table, padded


def _link_nodes(forest: Forest, kind: np.dtype[np.floating]) -> tuple[dict[str, Array], list[Array]]:
    """Return tables in which a self-referencing node per leaf precedes the nodes, with children and roots."""
    tables, count = forest.arrays(kind), len(forest.leaves)
    empty = {"feature": 0, "low": -np.inf, "high": np.inf, "tracks": True}
    made = {n: np.concatenate([np.full(count, v, tables[n].dtype), tables[n]]) for n, v in empty.items()}

    def at(ends: Array) -> Array:
        return np.where(ends >= 0, ends + count, ~ends).astype(np.int32)

    own = np.arange(count, dtype=np.int32)
    children = [np.concatenate([own, at(tables[n])]) for n in ("true", "false")]
    return made, [*children, at(np.array(forest.roots, np.int64))]


def _leaf_weights(forest: Forest, targets: int, how: str, kind: np.dtype[np.floating]) -> Array:
    """Return leaf weights ``[leaves, targets]``, or ``[leaves]`` if every tree has one target (``targets`` is 0)."""
    nothing = {"MIN": np.inf, "MAX": -np.inf}.get(how, 0.0)
    table = np.full((len(forest.leaves), max(targets, 1)), nothing, np.float64)
    for i, leaf in enumerate(forest.leaves):
        for target, weight in leaf:
            column = target if targets else 0
            said = table[i, column]
            table[i, column] = said + weight if np.isfinite(said) else weight
    return (table if targets else table[:, 0]).astype(kind)


def _add_base_values(b: FunctionBody, y: str, targets: int) -> str:
    """Return ``y`` with the base values added."""
    base = read_numbers(b.use.attributes, "base_values")
    if not len(base):
        return y
    if len(base) not in (1, targets):
        raise Declined(f"{len(base)} base values for {targets} targets")
    return b.Add(y, b.constant(np.array(base, _float_dtype(b))))


@standard_function("TreeEnsembleRegressor")
def expand_regressor(b: FunctionBody) -> str:
    """Expand TreeEnsembleRegressor: sums, means, least or greatest weights of leaves."""
    targets = int(b.attr("n_targets") or 1)
    y = aggregate_leaves(
        b, make_classic_forest(b.use.attributes, "target", _float_dtype(b)), targets, b.attr("aggregate_function") or "SUM"
    )
    return b.cast(apply_post_transform(b, _add_base_values(b, y, targets), str(b.attr("post_transform") or "NONE")), "float32")


@standard_function("TreeEnsemble")
def expand_ensemble(b: FunctionBody) -> str:
    """Expand TreeEnsemble, the ONNX operator of version 5 and later."""
    if b.dtype() == "float16":
        raise Declined("X is float16")
    targets, how = int(b.attr("n_targets") or 1), int(b.use.attr("aggregate_function", 1))
    transform = int(b.use.attr("post_transform", 0))
    names = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")
    if not 0 <= how < 4 or not 0 <= transform < len(names):
        raise Declined(f"aggregate function {how} or post transform {transform} is not known")
    y = aggregate_leaves(b, make_modern_forest(b.use.attributes, _float_dtype(b)), targets, ("AVERAGE", "SUM", "MIN", "MAX")[how])
    return apply_post_transform(b, y, names[transform])


@standard_function("TreeEnsembleClassifier")
def expand_classifier(b: FunctionBody) -> list[str]:
    """Expand TreeEnsembleClassifier: scores of classes, and the label of the greatest score."""
    labels = list(b.attr("classlabels_int64s"))
    if not labels:
        raise Declined("it has no integer labels")
    forest = make_classic_forest(b.use.attributes, "class", _float_dtype(b))
    targets = {t for leaf in forest.leaves for t, _ in leaf}
    weights = [w for leaf in forest.leaves for _, w in leaf]
    if len(labels) > 2 and any(w < 0 for w in weights) and not _has_every_score(forest, len(labels)):
        raise Declined("some classes have no score in some leaves, and others negative ones")
    y = aggregate_leaves(b, forest, len(labels), "SUM")
    base = [float(v) for v in read_numbers(b.use.attributes, "base_values")]
    transform, positive = str(b.attr("post_transform") or "NONE"), all(w >= 0 for w in weights)
    if len(labels) == 2 and targets == {0} and len(base) < 2:
        score = b.slice(y, 1, 0, 1)
        score = b.Add(score, b.constant(np.array(base, _float_dtype(b)))) if base else score
        label, scores = binary_outputs(b, score, labels, transform, positive)
        return [label, b.cast(scores, "float32")]
    if len(labels) == 2 and base:
        raise Declined("base values of two classes with scores of their own")
    if len(labels) == 2 and targets == {1}:
        label = select_binary_label(b, b.slice(y, 1, 1, 2), 0.5 if positive else 0.0, labels)
        return [label, b.cast(apply_post_transform(b, y, transform), "float32")]
    y = _add_base_values(b, y, len(labels))
    return [select_best_label(b, y, labels), b.cast(apply_post_transform(b, y, transform), "float32")]


def _has_every_score(forest: Forest, classes: int) -> bool:
    """Return True if every class has a score for all combinations of leaves."""
    sure = set[int]()
    for root in forest.roots:
        reached = [{t for t, _ in forest.leaves[leaf]} for leaf in _tree_leaves(forest, root)]
        sure |= set.intersection(*reached)
    return len(sure) == classes
