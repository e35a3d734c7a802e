"""Recipes: trained models of scikit-learn, LightGBM and XGBoost, by their converters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from corpus_recipe import Made

ENTRY = {
    "inputs": {"X": ["float32", ["batch", 6], "normal"]},
    "sizes": [{"batch": 4}, {"batch": 1}, {"batch": 37}],
    "kind": "float32",
}


def data() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return samples, their classes (three), and a value for each."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((300, 6)).astype(np.float32)
    y = x[:, 0] * 2 + np.sin(x[:, 1] * 3) + x[:, 2] * x[:, 3]
    return x, np.digitize(y, [-1.0, 1.0]), y.astype(np.float32)


def sklearn(make: Callable[[], Any], classes: bool) -> Made:
    """Return a fitted estimator by skl2onnx; probabilities are one tensor."""
    from skl2onnx import to_onnx

    x, labels, values = data()
    model = make().fit(x, labels if classes else values)
    options = {"zipmap": False} if classes and hasattr(model, "predict_proba") else None
    return Made(to_onnx(model, x[:1], options=options, target_opset={"": 21, "ai.onnx.ml": 3}), ENTRY)


def boosted(convert: str, make: Callable[[], Any], classes: bool) -> Made:
    """Return a boosted forest by onnxmltools."""
    import onnxmltools
    from onnxmltools.convert.common.data_types import FloatTensorType

    x, labels, values = data()
    model = make().fit(x, labels if classes else values)
    more = {"zipmap": False} if convert == "convert_lightgbm" else {}
    shape = [("X", FloatTensorType([None, 6]))]
    proto: onnx.ModelProto = getattr(onnxmltools, convert)(model, initial_types=shape, target_opset=15, **more)
    return Made(proto, ENTRY)


def pipeline() -> Any:
    """Return scaling, polynomials, selection and logistic regression."""
    from sklearn.feature_selection import SelectKBest
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import MinMaxScaler, PolynomialFeatures, StandardScaler

    return make_pipeline(StandardScaler(), PolynomialFeatures(2), MinMaxScaler(), SelectKBest(k=10), LogisticRegression())


def estimators() -> dict[str, tuple[Callable[[], Any], bool]]:
    """Return estimators of scikit-learn, with True for classifiers."""
    from sklearn import (
        cluster,
        decomposition,
        ensemble,
        gaussian_process,
        linear_model,
        naive_bayes,
        neighbors,
        neural_network,
        svm,
        tree,
    )
    from sklearn.pipeline import make_pipeline

    return {
        "pipeline": (pipeline, True),
        "linear": (linear_model.LinearRegression, False),
        "tree": (lambda: tree.DecisionTreeClassifier(max_depth=5), True),
        "forest": (lambda: ensemble.RandomForestClassifier(10, max_depth=5, random_state=0), True),
        "forest_values": (lambda: ensemble.RandomForestRegressor(10, max_depth=5, random_state=0), False),
        "boosting": (lambda: ensemble.GradientBoostingClassifier(n_estimators=8, random_state=0), True),
        "histograms": (lambda: ensemble.HistGradientBoostingRegressor(max_iter=8), False),
        "svc": (lambda: svm.SVC(probability=False), True),
        "svr": (svm.SVR, False),
        "mlp": (lambda: neural_network.MLPClassifier((8,), random_state=0, max_iter=50), True),
        "bayes": (naive_bayes.GaussianNB, True),
        "neighbours": (lambda: neighbors.KNeighborsClassifier(3), True),
        "kmeans": (lambda: cluster.KMeans(4, n_init=2, random_state=0), False),
        "pca": (lambda: make_pipeline(decomposition.PCA(3), linear_model.Ridge()), False),
        "gaussian_process": (lambda: gaussian_process.GaussianProcessRegressor(alpha=0.1), False),
        "isolation": (lambda: ensemble.IsolationForest(n_estimators=5, random_state=0), False),
    }


def named(name: str) -> Made:
    """Return the estimator of this name."""
    return sklearn(*estimators()[name])


def lightgbm(classes: bool) -> Made:
    """Return a model of LightGBM."""
    import lightgbm as lib

    kind = lib.LGBMClassifier if classes else lib.LGBMRegressor
    return boosted("convert_lightgbm", lambda: kind(n_estimators=8, num_leaves=7, verbose=-1), classes)


def xgboost(classes: bool) -> Made:
    """Return a model of XGBoost."""
    import xgboost as lib

    kind = lib.XGBClassifier if classes else lib.XGBRegressor
    return boosted("convert_xgboost", lambda: kind(n_estimators=8, max_depth=3), classes)


NAMES = (
    *("pipeline", "linear", "tree", "forest", "forest_values", "boosting", "histograms", "svc", "svr", "mlp", "bayes"),
    *("neighbours", "kmeans", "pca", "gaussian_process", "isolation"),
)
RECIPES: dict[str, Callable[[dict[str, Made]], Made]] = {
    **{f"sklearn_{n}": lambda made, n=n: named(n) for n in NAMES},
    "lightgbm_classes": lambda made: lightgbm(True),
    "lightgbm_values": lambda made: lightgbm(False),
    "xgboost_classes": lambda made: xgboost(True),
    "xgboost_values": lambda made: xgboost(False),
}
