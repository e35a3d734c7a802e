"""Support vector machines: kernels of rows and support vectors, weighted per target or per pair of classes."""

from __future__ import annotations

from itertools import combinations
from typing import Final

import numpy as np
from onnx import GraphProto, TensorProto, helper, numpy_helper

from rammer.frontend.lower.contrib.function import Array, Declined, FunctionBody, standard_function
from rammer.frontend.lower.ml.rows import rows_of_features
from rammer.frontend.lower.ml.scores import apply_post_transform, select_best_label

#: Largest number of classes with coupled probabilities; each class is a step in the loop's body.
MOST_CLASSES: Final = 64
#: Distance of pair probabilities from 0 and 1, sweep limit, and residual over the number of classes that ends the sweeps (Wu, Lin
#: and Weng, "Probability Estimates for Multi-class Classification by Pairwise Coupling", JMLR 2004, as in libsvm).
_CLOSEST, _SWEEPS, _LEFT = 1e-7, 100, 0.005


@standard_function("SVMRegressor")
def svm_regressor(b: FunctionBody) -> str:
    """Expand SVMRegressor: a weighted sum of kernels of rows and support vectors, or a product."""
    x, _, features = rows_of_features(b)
    count, rho = int(b.use.attr("n_supports", 0)), np.array(b.attr("rho") or [0.0], np.float32)
    coefficients, vectors = _attribute_array(b, "coefficients"), _attribute_array(b, "support_vectors")
    if b.use.attr("one_class", 0) or rho.size != 1:
        raise Declined("one class, or several targets, are not supported")
    if not count:
        if coefficients.size != features:
            raise Declined(f"{coefficients.size} coefficients for {features} features")
        scores = b.MatMul(x, b.constant(coefficients.reshape(features, 1)))
    else:
        if vectors.size != count * features or coefficients.size != count:
            raise Declined(f"{coefficients.size} coefficients, {vectors.size} numbers: {count} vectors of {features} features")
        scores = b.MatMul(_kernel_matrix(b, x, vectors.reshape(count, features)), b.constant(coefficients.reshape(count, 1)))
    return apply_post_transform(b, b.Add(scores, b.constant(rho)), str(b.attr("post_transform") or "NONE"))


@standard_function("SVMClassifier", hosted=False)
def svm_classifier(b: FunctionBody) -> list[str]:
    """Expand SVMClassifier: the class that wins most pairs, and the pair scores of every row or the probabilities of classes.

    Without support vectors, each class has a product. ONNX leaves the scores undefined: these are ONNX Runtime's, and
    scikit-learn's with its signs."""
    labels = list(b.attr("classlabels_ints"))
    if len(labels) < 2:
        raise Declined(f"it has {len(labels)} integer labels")
    if not b.attr("vectors_per_class"):
        return _by_products(b, labels)
    scores = _pair_scores(b, len(labels))
    second, first = (_pair_masks(len(labels))[side].astype(np.float32) for side in (1, 0))
    won = b.cast(b.Greater(scores, b.constant(0.0, "float32")), "float32")
    # Votes are whole numbers and thus exact. They start with one per pair for its second class; a won pair moves its vote to the
    # first class.
    votes = b.Add(b.MatMul(won, b.constant(first - second)), b.constant(second.sum(axis=0)))
    label, transform = select_best_label(b, votes, labels), str(b.attr("post_transform") or "NONE")
    if b.attr("prob_a"):
        return [label, apply_post_transform(b, _class_probabilities(b, scores, len(labels)), transform)]
    if len(labels) > 2:
        return [label, apply_post_transform(b, scores, transform)]
    if transform == "PROBIT":
        raise Declined("PROBIT of one score for two classes")
    if transform == "LOGISTIC":
        return [label, b.Sigmoid(b.Concat(b.Neg(scores), scores, axis=1))]
    other = b.Neg(scores) if transform == "NONE" else b.Sub(b.constant(1.0, "float32"), scores)
    return [label, b.Concat(other, scores, axis=1)]


def _attribute_array(b: FunctionBody, name: str) -> Array:
    return np.array(b.attr(name), np.float32)


def _by_products(b: FunctionBody, labels: list[int]) -> list[str]:
    """Return label and scores from one product per class. Of two classes, the second wins if any score is above 0, or above 0.5
    if no weight is negative: ONNX Runtime and the reference agree."""
    x, _, features = rows_of_features(b)
    coefficients, rho = _attribute_array(b, "coefficients"), _attribute_array(b, "rho")
    if coefficients.size != len(labels) * features or not rho.size:
        raise Declined(f"{coefficients.size} coefficients and {rho.size} rho for {len(labels)} classes of {features} features")
    y = b.MatMul(x, b.constant(np.ascontiguousarray(coefficients.reshape(len(labels), features).T)))
    y = b.Add(y, b.constant(rho[:1]))
    label = select_best_label(b, y, labels)
    if len(labels) == 2 and not b.attr("prob_a"):
        most = b.ReduceMax(y, b.constant([1]), keepdims=0)
        positive = bool((coefficients >= 0).all())
        second = b.GreaterOrEqual(most, b.constant(0.5, "float32")) if positive else b.Greater(most, b.constant(0.0, "float32"))
        label = b.Where(second, b.constant(labels[1]), label)
    return [label, apply_post_transform(b, y, str(b.attr("post_transform") or "NONE"))]


def _pair_masks(classes: int) -> tuple[Array, Array]:
    """Return the first and the second class of every pair as one-hot rows: ``[pairs, classes]`` each."""
    pairs = np.array(list(combinations(range(classes), 2)))
    eye = np.eye(classes)
    return eye[pairs[:, 0]], eye[pairs[:, 1]]


def _pair_scores(b: FunctionBody, classes: int) -> str:
    """Return ``[rows, pairs]``: for every pair of classes, the weighted kernels of both classes' vectors.

    Vectors are ordered by class. Row k of the coefficients weights a class' vectors against class k. From the class number on, it
    is against class k + 1."""
    x, _, features = rows_of_features(b)
    counts, pairs = [int(n) for n in b.attr("vectors_per_class")], list(combinations(range(classes), 2))
    vectors, coefficients, rho = (_attribute_array(b, n) for n in ("support_vectors", "coefficients", "rho"))
    total = sum(counts)
    if len(counts) != classes or min(counts) < 0 or not total or vectors.size != total * features:
        raise Declined(f"{vectors.size} numbers: {counts} vectors of {features} features for {classes} classes")
    if coefficients.size != (classes - 1) * total or rho.size < len(pairs):
        raise Declined(f"{coefficients.size} coefficients and {rho.size} rho for {classes} classes and {total} vectors")
    table, starts = coefficients.reshape(classes - 1, total), np.cumsum([0, *counts])
    weights = np.zeros((total, len(pairs)), np.float32)
    for column, (i, j) in enumerate(pairs):
        for mine, row in ((i, j - 1), (j, i)):
            of = slice(starts[mine], starts[mine + 1])
            weights[of, column] = table[row, of]
    return b.Add(
        b.MatMul(_kernel_matrix(b, x, vectors.reshape(total, features)), b.constant(weights)), b.constant(rho[: len(pairs)])
    )


def _kernel_matrix(b: FunctionBody, x: str, vectors: Array) -> str:
    """Return ``[rows, vectors]`` by the kernel of the attributes."""
    gamma, offset, degree = (b.constant(float(v), "float32") for v in (*b.attr("kernel_params"), 0.0, 0.0, 0.0)[:3])
    kind = str(b.attr("kernel_type") or "LINEAR")
    if kind == "RBF":
        difference = b.Sub(b.Unsqueeze(x, b.constant([1])), b.constant(vectors[None]))
        return b.Exp(b.Neg(b.Mul(b.ReduceSum(b.Mul(difference, difference), b.constant([2]), keepdims=0), gamma)))
    product = b.MatMul(x, b.constant(np.ascontiguousarray(vectors.T)))
    if kind == "LINEAR":
        return product
    moved = b.Add(b.Mul(product, gamma), offset)
    if kind == "POLY":
        return b.Pow(moved, degree)
    if kind == "SIGMOID":
        return b.Tanh(moved)
    raise Declined(f"the kernel {kind!r} is not known")


# --- probabilities ----------------------------------------------------------------------------------------------


def _class_probabilities(b: FunctionBody, scores: str, classes: int) -> str:
    """Return ``[rows, classes]``: class probabilities from pair probabilities, after a limited number of sweeps."""
    slopes, offsets, pairs = _attribute_array(b, "prob_a"), _attribute_array(b, "prob_b"), classes * (classes - 1) // 2
    if slopes.size != offsets.size or slopes.size < pairs:
        raise Declined(f"{slopes.size} prob_a and {offsets.size} prob_b for {pairs} pairs of classes")
    if classes > MOST_CLASSES:
        raise Declined(f"probabilities of {classes} classes, more than {MOST_CLASSES}")
    rows = b.shape(0)[0] if len(b.shape(0)) == 2 else 1
    one = b.constant(1.0, "float32")
    log_odds = b.Add(b.Mul(scores, b.constant(slopes[:pairs])), b.constant(offsets[:pairs]))
    first = b.Sub(one, b.Sigmoid(log_odds))
    first = b.Clip(first, b.constant(_CLOSEST, "float32"), b.constant(1 - np.float32(_CLOSEST), "float32"))
    every = b.Concat(first, b.Sub(one, first), b.constant(np.zeros((rows, 1), np.float32)), axis=1)
    # Columns: the first class over the second, the second over the first, and a class over itself.
    places = np.full((classes, classes), 2 * pairs)
    for column, (i, j) in enumerate(combinations(range(classes), 2)):
        places[i, j], places[j, i] = column, pairs + column
    over, under = (b.reshape(b.Gather(every, b.constant(p.ravel()), axis=1), rows, classes, classes) for p in (places, places.T))
    own = b.Mul(b.ReduceSum(b.Mul(under, under), b.constant([2])), b.constant(np.eye(classes, dtype=np.float32)))
    q = b.Sub(own, b.Mul(over, under))
    even = b.constant(np.full((rows, classes), 1 / classes, np.float32))
    most, going = b.constant(np.array(_SWEEPS)), b.constant(np.array(True))
    return b.op("Loop", most, going, even, q, outputs=2, body=_sweep_body(b, rows, classes))[0]


def _sweep_body(b: FunctionBody, rows: int, classes: int) -> GraphProto:
    """Return the loop's body: one sweep over all classes, for rows that have not converged. It reduces ``p' q p``, where ``p
    [rows, classes]`` has a sum of 1."""
    made = FunctionBody(b.use, prefix="sweep_")
    one, two, last = made.constant(1.0, "float32"), made.constant(2.0, "float32"), made.constant([1])
    qp = made.Squeeze(made.MatMul("q", made.Unsqueeze("p", made.constant([2]))), made.constant([2]))
    pqp = made.ReduceSum(made.Mul("p", qp), last)
    difference = made.ReduceMax(made.Abs(made.Sub(qp, pqp)), last)
    going = made.GreaterOrEqual(difference, made.constant(np.float32(_LEFT) / np.float32(classes), "float32"))
    new = "p"
    for i in range(classes):
        row, place = made.Squeeze(made.slice("q", 1, i, i + 1), last), np.eye(classes, dtype=np.float32)[i : i + 1]
        own, mine = made.slice(row, 1, i, i + 1), made.slice(qp, 1, i, i + 1)
        step = made.Div(made.Sub(pqp, mine), own)
        grown = made.Add(step, one)
        pqp = made.Add(pqp, made.Mul(step, made.Add(made.Mul(step, own), made.Mul(two, mine))))
        pqp = made.Div(made.Div(pqp, grown), grown)
        qp = made.Div(made.Add(qp, made.Mul(step, row)), grown)
        new = made.Div(made.Add(new, made.Mul(step, made.constant(place))), grown)
    some = made.cast(made.ReduceMax(made.cast(going, "int32"), made.constant([0, 1]), keepdims=0), "bool")
    results = (some, made.Where(going, new, "p"), made.Identity("q"))
    state: tuple[tuple[int, list[int]], ...] = (
        (TensorProto.BOOL, []), (TensorProto.FLOAT, [rows, classes]), (TensorProto.FLOAT, [rows, classes, classes])
    )  # fmt: skip
    given = [helper.make_tensor_value_info(n, *kind) for n, kind in zip(("more", "p", "q"), state, strict=True)]
    ends = [helper.make_tensor_value_info(n, *kind) for n, kind in zip(results, state, strict=True)]
    constants = [numpy_helper.from_array(a, n) for n, a in made.constants.items()]
    turn = helper.make_tensor_value_info("turn", TensorProto.INT64, [])
    return helper.make_graph(made.nodes, "sweep", [turn, *given], ends, constants)
