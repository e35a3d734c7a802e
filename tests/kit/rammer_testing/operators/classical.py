"""Operators for classical models (``ai.onnx.ml``): forests with every kind of node, linear models, feature transforms."""

from __future__ import annotations

from typing import Any

import numpy as np

from rammer_testing.operators.case import Array, OperatorCase
from rammer_testing.operators.draw import Draw
from rammer_testing.operators.registry import describe_alone

_DOMAIN = "ai.onnx.ml"
_MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ")


def _features(draw: Draw, features: int, kind: str, holes: float) -> Array:
    """Return rows on a grid, so that values equal thresholds; some elements are NaN."""
    rows = draw.array((draw.size(1, 6), features), kind, low=-3, high=3)
    if kind.startswith("float"):
        rows = np.round(rows * 2) / 2
        rows[draw.array(rows.shape, low=0, high=1) < holes] = np.nan
    return np.asarray(rows, kind)


def _tree(draw: Draw, tree: int, features: int, modes: tuple[str, ...], levels: int) -> list[dict[str, Any]]:
    """Return the nodes of one tree, root first."""
    nodes: list[dict[str, Any]] = []

    def grow(level: int) -> int:
        node: dict[str, Any] = {"treeids": tree, "nodeids": len(nodes), "modes": "LEAF", "truenodeids": 0, "falsenodeids": 0}
        node |= {"featureids": 0, "values": 0.0, "missing_value_tracks_true": 0}
        nodes.append(node)
        if level < levels and draw.chance(0.8):
            node |= {"modes": draw.either(*modes), "featureids": draw.integer(0, features - 1)}
            node |= {"values": draw.integer(-6, 6) / 2, "missing_value_tracks_true": draw.either(0, 0, 1)}
            node["truenodeids"], node["falsenodeids"] = grow(level + 1), grow(level + 1)
        return int(node["nodeids"])

    grow(0)
    return nodes


def _forest(draw: Draw, features: int) -> list[dict[str, Any]]:
    modes = draw.either(_MODES[:1], _MODES[:1], _MODES[1:2], _MODES)
    levels = draw.either(1, 3, 3, 5)
    return [node for tree in range(draw.integer(1, 6)) for node in _tree(draw, tree, features, modes, levels)]


def _node_attributes(nodes: list[dict[str, Any]]) -> dict[str, Any]:
    names = ("treeids", "nodeids", "modes", "truenodeids", "falsenodeids", "featureids", "values", "missing_value_tracks_true")
    return {f"nodes_{n}": [node[n] for node in nodes] for n in names}


@describe_alone(f"{_DOMAIN}.TreeEnsembleRegressor")
def regressors(draw: Draw, op: str) -> OperatorCase:
    """Draw a case with one target or several; leaves may lack some targets."""
    features, targets = draw.size(1, 5), draw.either(1, 1, 2, 3)
    nodes = _forest(draw, features)
    leaves = [n for n in nodes if n["modes"] == "LEAF"]
    single = draw.chance()
    weights = [(n, t) for n in leaves for t in ([n["treeids"] % targets] if single else range(targets))]
    attributes: dict[str, Any] = {**_node_attributes(nodes), "n_targets": targets}
    attributes |= {"target_treeids": [n["treeids"] for n, _ in weights], "target_nodeids": [n["nodeids"] for n, _ in weights]}
    attributes |= {"target_ids": [t for _, t in weights], "target_weights": [draw.uniform(-2, 2) for _ in weights]}
    attributes |= {"aggregate_function": draw.either(None, "SUM", "AVERAGE", "MIN", "MAX")}
    # ONNX Runtime transforms several targets, and leaves a single one unchanged except for PROBIT.
    attributes |= {"post_transform": draw.either(None, None, "NONE", "LOGISTIC", "SOFTMAX") if targets > 1 else None}
    attributes |= {"base_values": draw.either(None, [0.5] * targets) if not single else None}
    return OperatorCase(
        op, 17, (_features(draw, features, draw.either("float32", "float32", "float64"), draw.either(0, 0.2)),), attributes
    )


@describe_alone(f"{_DOMAIN}.TreeEnsembleClassifier")
def classifiers(draw: Draw, op: str) -> OperatorCase:
    """Draw a case with two classes and one or two scores, or with more classes."""
    features, classes = draw.size(1, 5), draw.either(2, 2, 3, 4)
    nodes = _forest(draw, features)
    leaves = [n for n in nodes if n["modes"] == "LEAF"]
    form = draw.either("one", "all")
    named = [draw.either(0, 0, 1)] if form == "one" and classes == 2 else range(classes)
    low = draw.either(0.0, -2.0)
    weights = [(n, t) for n in leaves for t in named]
    attributes: dict[str, Any] = {**_node_attributes(nodes), "classlabels_int64s": [5, 3, 9, 7][:classes]}
    attributes |= {"class_treeids": [n["treeids"] for n, _ in weights], "class_nodeids": [n["nodeids"] for n, _ in weights]}
    attributes |= {"class_ids": [t for _, t in weights], "class_weights": [draw.uniform(low, 0.4) for _ in weights]}
    attributes |= {"post_transform": draw.either(None, "NONE", "LOGISTIC", "SOFTMAX")}
    if list(named) == [0] or classes > 2:
        attributes |= {"base_values": draw.either(None, [0.25] * len(list(named)))}
    return OperatorCase(
        op,
        17,
        (_features(draw, features, draw.either("float32", "float32", "float64", "int64"), draw.either(0, 0.2)),),
        attributes,
        2,
    )


@describe_alone(f"{_DOMAIN}.TreeEnsemble")
def ensembles(draw: Draw, op: str) -> OperatorCase:
    """Draw a case of the newer form, with set membership nodes."""
    features, targets = draw.size(1, 5), draw.either(1, 1, 2)
    kind = draw.either("float32", "float64")
    nodes: list[dict[str, Any]] = []
    leaves: list[tuple[int, float]] = []
    sets: list[float] = []
    modes = draw.either((0,), (0, 1, 2, 3, 4, 5), (0, 6), (6,))

    def grow(level: int) -> tuple[int, int]:
        if level and (level > 3 or draw.chance(0.3)):
            leaves.append((draw.integer(0, targets - 1), draw.uniform(-2, 2)))
            return len(leaves) - 1, 1
        node = {"mode": draw.either(*modes), "feature": draw.integer(0, features - 1), "split": draw.integer(-6, 6) / 2}
        node["tracks"] = draw.either(0, 0, 1) if node["mode"] != 6 else 0
        nodes.append(node)
        place = len(nodes) - 1
        node["true"], node["trueleaf"] = grow(level + 1)
        node["false"], node["falseleaf"] = grow(level + 1)
        return place, 0

    roots = [grow(0)[0] for _ in range(draw.integer(1, 4))]
    for node in nodes:
        if node["mode"] == 6:
            sets += [float(draw.integer(-3, 3)) for _ in range(draw.integer(1, 3))] + [np.nan]
    attributes: dict[str, Any] = {
        "nodes_modes": np.array([n["mode"] for n in nodes], np.uint8),
        "nodes_splits": np.array([n["split"] for n in nodes], kind),
        "leaf_weights": np.array([w for _, w in leaves], kind),
        "leaf_targetids": [t for t, _ in leaves],
        "tree_roots": roots,
        "n_targets": targets,
        "aggregate_function": draw.either(None, 0, 1, 2, 3),
        "post_transform": draw.either(None, 0),
        "membership_values": np.array(sets, kind) if sets else None,
        "nodes_missing_value_tracks_true": [n["tracks"] for n in nodes],
    }
    pairs = (("featureids", "feature"), ("truenodeids", "true"), ("trueleafs", "trueleaf"))
    for name, key in (*pairs, ("falsenodeids", "false"), ("falseleafs", "falseleaf")):
        attributes[f"nodes_{name}"] = [n[key] for n in nodes]
    # ONNX Runtime treats set members as integers, and truncates features to integers.
    x = np.rint(_features(draw, features, kind, 0)) if sets else _features(draw, features, kind, draw.either(0, 0.2))
    return OperatorCase(op, 17, (x,), attributes)


@describe_alone(*(f"{_DOMAIN}.{n}" for n in ("LinearRegressor", "LinearClassifier")))
def linear(draw: Draw, op: str) -> OperatorCase:
    """Draw a case of targets or classes, with every transform."""
    features, targets = draw.size(1, 6), draw.either(1, 2, 3)
    x = draw.array(
        (draw.size(1, 5), features), draw.either("float32", "float32", "int64") if op.endswith("Classifier") else "float32"
    )
    numbers = [draw.uniform(-1, 1) for _ in range(targets * features)]
    attributes: dict[str, Any] = {"coefficients": numbers, "intercepts": [draw.uniform(-1, 1) for _ in range(targets)]}
    attributes["post_transform"] = draw.either(None, "NONE", "LOGISTIC", "SOFTMAX")
    if op.endswith("Regressor"):
        return OperatorCase(op, 17, (x,), {**attributes, "targets": targets, "post_transform": None})
    return OperatorCase(op, 17, (x,), {**attributes, "classlabels_ints": [4, 2, 8][: max(targets, 2)]}, 2)


@describe_alone(f"{_DOMAIN}.SVMRegressor")
def machines(draw: Draw, op: str) -> OperatorCase:
    """Draw a case with every kernel, or without one."""
    features, count = draw.size(1, 5), draw.either(0, 1, 4)
    attributes: dict[str, Any] = {
        "n_supports": count,
        "rho": [0.25],
        "kernel_type": draw.either("LINEAR", "RBF", "POLY", "SIGMOID"),
    }
    attributes |= {
        "coefficients": [draw.uniform(-1, 1) for _ in range(count or features)],
        "kernel_params": [0.3, 0.5, 2.0],
    }
    if count:
        attributes["support_vectors"] = [draw.uniform(-1, 1) for _ in range(count * features)]
    else:
        attributes["kernel_type"] = "LINEAR"
    return OperatorCase(op, 17, (draw.array((draw.size(1, 5), features), low=-1, high=1),), attributes)


@describe_alone(f"{_DOMAIN}.SVMClassifier")
def classifying_machines(draw: Draw, op: str) -> OperatorCase:
    """Draw a case of class pairs with or without probabilities, or of products."""
    features, classes, kind = (
        draw.size(1, 5),
        draw.either(2, 2, 3, 4, 6),
        draw.either("pairs", "pairs", "coupled", "coupled", "products"),
    )
    attributes: dict[str, Any] = {"classlabels_ints": [5, 3, 9, 7, -2, 11][:classes], "kernel_params": [0.3, 0.5, 2.0]}
    attributes |= {"post_transform": draw.either(None, "NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO")}
    pairs, low = classes * (classes - 1) // 2, draw.either(-1.0, -1.0, 0.0)
    if kind == "products":
        attributes |= {"coefficients": [draw.uniform(low, 1) for _ in range(classes * features)]}
        attributes |= {"rho": [draw.uniform(-0.5, 0.5)], "kernel_type": "LINEAR"}
    else:
        counts = [draw.integer(0, 4) for _ in range(classes - 1)] + [draw.integer(1, 4)]
        attributes |= {"vectors_per_class": counts, "kernel_type": draw.either("LINEAR", "RBF", "POLY", "SIGMOID")}
        attributes |= {"support_vectors": [draw.uniform(-1, 1) for _ in range(sum(counts) * features)]}
        attributes |= {"coefficients": [draw.uniform(low, 1) for _ in range(sum(counts) * (classes - 1))]}
        attributes |= {"rho": [draw.uniform(-1, 1) for _ in range(pairs)]}
    if kind == "coupled":
        attributes |= {"prob_a": [draw.uniform(-3, -0.5) for _ in range(pairs)]}
        attributes |= {"prob_b": [draw.uniform(-1, 1) for _ in range(pairs)]}
    x = draw.array((draw.size(1, 5), features), draw.either("float32", "float32", "float64", "int64"), low=-2, high=2)
    return OperatorCase(op, 17, (x,), attributes, 2)


@describe_alone(
    *(f"{_DOMAIN}.{n}" for n in ("Scaler", "Normalizer", "Binarizer", "Imputer", "ArrayFeatureExtractor", "FeatureVectorizer"))
)
def rows(draw: Draw, op: str) -> OperatorCase:
    """Draw a case on rows of features."""
    features, bare = draw.size(1, 6), op.rpartition(".")[2]
    kind = draw.either("float32", "float32", "int64")
    x = draw.array((draw.size(1, 5), features), kind)
    if bare == "Scaler":
        count = draw.either(1, features)
        return OperatorCase(op, 17, (x,), {"offset": [0.5] * count, "scale": [draw.uniform(-1, 1) for _ in range(count)]})
    if bare == "Normalizer":
        return OperatorCase(op, 17, (x,), {"norm": draw.either(None, "MAX", "L1", "L2")})
    if bare == "Binarizer":
        return OperatorCase(op, 17, (x.astype(np.float32),), {"threshold": draw.either(None, 0.5)})
    if bare == "Imputer":
        count = draw.either(1, features)
        if kind == "int64":
            return OperatorCase(op, 17, (x,), {"imputed_value_int64s": [7] * count, "replaced_value_int64": draw.either(None, 1)})
        x[0, 0] = draw.either(np.nan, 0.0, 1.0)
        attributes = {"imputed_value_floats": [0.25] * count, "replaced_value_float": draw.either(None, float("nan"), 1.0)}
        return OperatorCase(op, 17, (x,), attributes)
    if bare == "ArrayFeatureExtractor":
        return OperatorCase(op, 17, (x, draw.array((draw.size(1, 4),), "int64", low=0, high=features - 1)))
    other = draw.array((x.shape[0], draw.size(1, 3)), kind)
    return OperatorCase(op, 17, (x, other), {"inputdimensions": [features, other.shape[1]]})


@describe_alone(*(f"{_DOMAIN}.{n}" for n in ("OneHotEncoder", "LabelEncoder")))
def encoders(draw: Draw, op: str) -> OperatorCase:
    """Draw a case of categories and numeric labels: some repeated, some elements unlisted."""
    kind = draw.either("float32", "float64", "int64") if op.endswith("OneHotEncoder") else draw.either("float32", "int64")
    count = draw.size(1, 7)
    keys = [draw.integer(-4, 4) for _ in range(count)]
    x = np.asarray(np.round(draw.array(draw.shape(1, 2), low=-5, high=5) * 2) / 2, kind)
    if op.endswith("OneHotEncoder"):
        return OperatorCase(op, 17, (x,), {"cats_int64s": keys, "zeros": draw.either(None, 1)})
    to = draw.either("int64", "float")
    attributes: dict[str, Any] = {"keys_int64s": keys} if kind == "int64" else {"keys_floats": [k / 2 for k in keys]}
    whole = to == "int64"
    attributes |= {f"values_{to}s": [draw.integer(-9, 9) * (1 if whole else 0.5) for _ in keys]}
    attributes |= {f"default_{to}": draw.either(None, 7 if whole else 0.75)}
    return OperatorCase(op, 17, (x,), attributes, made=("int64" if whole else "float32",))
