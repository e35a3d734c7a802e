"""Scores of classes: their post transforms, and the labels that they select."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rammer.frontend.lower.contrib.function import Declined, FunctionBody


def apply_post_transform(b: FunctionBody, y: str, how: str) -> str:
    """Return ``y [rows, targets]`` after a post transform."""
    if how == "NONE":
        return y
    if how == "SOFTMAX":
        return b.Softmax(y, axis=-1)
    if how == "LOGISTIC":
        return b.Sigmoid(y)
    if how == "SOFTMAX_ZERO":
        # Scores near 0 stay so; the others share the probability.
        power = b.Exp(b.Sub(y, b.ReduceMax(y, b.constant([-1]))))
        power = b.Where(b.Greater(b.Abs(y), _constant_like(b, 1e-7, y)), power, b.Mul(y, power))
        return b.Div(power, b.ReduceSum(power, b.constant([-1])))
    if how == "PROBIT":
        return _apply_probit(b, y)
    raise Declined(f"the post transform {how!r} is not known")


def _constant_like(b: FunctionBody, value: float, y: str) -> str:
    return b.CastLike(b.constant(value, "float32"), y)


def _apply_probit(b: FunctionBody, y: str) -> str:
    """Return the inverse normal distribution, by Winitzki's approximation of the inverse error function."""
    x = b.Sub(b.Mul(y, _constant_like(b, 2.0, y)), _constant_like(b, 1.0, y))
    log = b.Log(b.Mul(b.Sub(_constant_like(b, 1.0, y), x), b.Add(_constant_like(b, 1.0, y), x)))
    half = b.Add(b.Mul(log, _constant_like(b, 0.5, y)), _constant_like(b, 2 / (math.pi * 0.147), y))
    inner = b.Sub(b.Sqrt(b.Sub(b.Mul(half, half), b.Div(log, _constant_like(b, 0.147, y)))), half)
    return b.Mul(b.Mul(b.Sign(x), b.Sqrt(inner)), _constant_like(b, math.sqrt(2), y))


def select_best_label(b: FunctionBody, y: str, labels: Sequence[int]) -> str:
    """Return the label of the greatest score of each row, the first among equals."""
    return b.Gather(b.constant(np.array(labels, np.int64)), b.ArgMax(y, axis=1, keepdims=0))


def select_binary_label(b: FunctionBody, score: str, limit: float, labels: Sequence[int]) -> str:
    """Return the second of two labels where ``score [rows, 1]`` is above ``limit``, else the first."""
    above = b.Squeeze(b.Greater(score, _constant_like(b, limit, score)), b.constant([1]))
    return b.Where(above, b.constant(int(labels[1])), b.constant(int(labels[0])))


def binary_outputs(b: FunctionBody, score: str, labels: Sequence[int], transform: str, positive: bool) -> list[str]:
    """Return labels and both scores from the score of the second class. The score is a probability if no weight is below 0, else
    a distance."""
    label = select_binary_label(b, score, 0.5 if positive else 0.0, labels)
    if transform == "PROBIT":
        return [label, _apply_probit(b, score)]
    if positive and transform != "LOGISTIC":
        return [label, b.Concat(b.Sub(_constant_like(b, 1.0, score), score), score, axis=1)]
    if transform == "LOGISTIC":
        return [label, b.Concat(b.Sigmoid(b.Neg(score)), b.Sigmoid(score), axis=1)]
    return [label, b.Concat(b.Neg(score), score, axis=1)]
