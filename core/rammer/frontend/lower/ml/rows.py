"""Linear models, and preprocessing of feature rows."""

from __future__ import annotations

import numpy as np

from rammer.frontend.lower.contrib.function import Declined, FunctionBody, standard_function
from rammer.frontend.lower.ml.scores import apply_post_transform, binary_outputs, select_best_label


def rows_of_features(b: FunctionBody, floats: bool = True) -> tuple[str, int, int]:
    """Return ``X [rows, features]`` and both extents; a tensor with one axis is one row."""
    shape = b.shape(0)
    if len(shape) not in (1, 2):
        raise Declined(f"X has the shape {list(shape)}, where it needs rows of features")
    rows, features = shape if len(shape) == 2 else (1, shape[0])
    x = b.cast(b.input(0), "float32") if floats and b.dtype() != "float32" else b.input(0)
    return (x if len(shape) == 2 else b.reshape(x, rows, features)), rows, features


def _linear_scores(b: FunctionBody, targets: int) -> str:
    """Return ``X @ coefficients' + intercepts``."""
    x, _, features = rows_of_features(b)
    coefficients, intercepts = np.array(b.attr("coefficients"), np.float32), np.array(b.attr("intercepts"), np.float32)
    if coefficients.size != targets * features or intercepts.size not in (0, targets):
        raise Declined(f"{coefficients.size} coefficients and {intercepts.size} intercepts for {targets} of {features} features")
    y = b.MatMul(x, b.constant(np.ascontiguousarray(coefficients.reshape(targets, features).T)))
    return b.Add(y, b.constant(intercepts)) if intercepts.size else y


@standard_function("LinearRegressor")
def linear_regressor(b: FunctionBody) -> str:
    """Expand LinearRegressor: a matrix product."""
    return apply_post_transform(b, _linear_scores(b, int(b.attr("targets") or 1)), str(b.attr("post_transform") or "NONE"))


@standard_function("LinearClassifier")
def linear_classifier(b: FunctionBody) -> list[str]:
    """Expand LinearClassifier: scores of classes, and the label of the greatest score. Two classes may have a single row of
    coefficients."""
    labels = list(b.attr("classlabels_ints"))
    if not labels:
        raise Declined("it has no integer labels")
    targets = len(b.attr("intercepts")) or len(labels)
    y, transform = _linear_scores(b, targets), str(b.attr("post_transform") or "NONE")
    if targets == 1 and len(labels) == 2:
        label, scores = binary_outputs(b, y, labels, transform, False)
        if transform == "PROBIT":
            raise Declined("PROBIT of one score for two classes")
        return [label, b.Softmax(scores, axis=-1) if transform == "SOFTMAX" else scores]
    if targets != len(labels):
        raise Declined(f"{targets} scores for {len(labels)} labels")
    return [select_best_label(b, y, labels), apply_post_transform(b, y, transform)]


@standard_function("Scaler")
def expand_scaler(b: FunctionBody) -> str:
    """Expand Scaler: ``(X - offset) * scale``."""
    x = b.input(0) if b.dtype() == "float32" else b.cast(b.input(0), "float32")
    features = b.shape(0)[-1] if b.shape(0) else 0
    made = []
    for name in ("offset", "scale"):
        values = np.array(b.attr(name), np.float32)
        if values.size not in (1, features):
            raise Declined(f"{values.size} values of {name} for {features} features")
        made.append(b.constant(values))
    return b.Mul(b.Sub(x, made[0]), made[1])


@standard_function("Normalizer")
def expand_normalizer(b: FunctionBody) -> str:
    """Expand Normalizer: rows divided by their greatest element, their sum of magnitudes, or their length."""
    x, _, _ = rows_of_features(b)
    how, axis = str(b.attr("norm") or "MAX"), b.constant([1])
    if how not in ("MAX", "L1", "L2"):
        raise Declined(f"the norm {how!r} is not known")
    if how == "MAX":
        size = b.ReduceMax(x, axis)
    else:
        size = b.ReduceSum(b.Abs(x), axis) if how == "L1" else b.Sqrt(b.ReduceSum(b.Mul(x, x), axis))
    nothing = b.Equal(size, b.constant(0.0, "float32"))
    y = b.Div(x, b.Where(nothing, b.constant(1.0, "float32"), size))
    return y if len(b.shape(0)) == 2 else b.reshape(y, *b.shape(0))


@standard_function("Binarizer")
def expand_binarizer(b: FunctionBody) -> str:
    """Expand Binarizer: 1 above the threshold, else 0."""
    limit = b.number(float(b.use.attr("threshold", 0.0)))
    return b.cast(b.Greater(b.input(0), limit), b.dtype())


@standard_function("Imputer")
def expand_imputer(b: FunctionBody) -> str:
    """Expand Imputer: replace missing values."""
    if b.dtype() == "int64":
        values, missing = b.attr("imputed_value_int64s"), b.use.attr("replaced_value_int64", 0)
    elif b.dtype() == "float32":
        values, missing = b.attr("imputed_value_floats"), b.use.attr("replaced_value_float", 0.0)
    else:
        raise Declined(f"X is {b.dtype()}")
    features = b.shape(0)[-1] if b.shape(0) else 0
    if len(values) not in (1, features):
        raise Declined(f"{len(values)} values for {features} features")
    x = b.input(0)
    gone = b.IsNaN(x) if missing != missing else b.Equal(x, b.number(missing))
    return b.Where(gone, b.constant(list(values), b.dtype()), x)


@standard_function("ArrayFeatureExtractor")
def array_feature_extractor(b: FunctionBody) -> str:
    """Expand ArrayFeatureExtractor: columns of the last axis, of numbers."""
    shape = b.shape(0)
    if not b.dtype() or not shape:
        raise Declined("X is not a tensor of numbers")
    x = b.input(0) if len(shape) > 1 else b.reshape(b.input(0), 1, shape[0])
    columns = b.reshape(b.input(1), int(np.prod(b.shape(1))))
    return b.Gather(x, columns, axis=-1)


@standard_function("FeatureVectorizer")
def feature_vectorizer(b: FunctionBody) -> str:
    """Expand FeatureVectorizer: concatenate features as floats."""
    parts = list[str]()
    sizes = list(b.attr("inputdimensions"))
    for i in range(len(b.use.inputs)):
        shape = b.shape(i)
        if len(shape) not in (1, 2):
            raise Declined(f"input {i} has the shape {list(shape)}")
        x = b.cast(b.input(i), "float32")
        x = x if len(shape) == 2 else b.reshape(x, 1, shape[0])
        if i < len(sizes) and sizes[i] != shape[-1]:
            raise Declined(f"input {i} has {shape[-1]} features, not {sizes[i]}")
        parts.append(x)
    return b.Concat(*parts, axis=1)
