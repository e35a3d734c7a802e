"""ONNX Runtime's contrib operators on the host: strings, paths, and results with data-dependent lengths."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from rammer.frontend.host.re2_patterns import Pattern, compiled_pattern

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

_START, _END = "\x02", "\x03"
_WORD: Final = 0xFFFFFFFF


def tokenize_strings(attributes: Mapping[str, Any], operands: Sequence[Any]) -> Sequence[Array]:
    """Cut every string of ``[C]`` or ``[N, C]`` into tokens: the matches of a pattern, or the text between separators. Rows are
    padded with ``pad_value``, after their end marks."""
    x = np.asarray(operands[0])
    if x.ndim not in (1, 2):
        raise ValueError(f"strings of {x.ndim} axes, where 1 or 2 are supported")
    cut, mark, pad = _make_tokenizer(attributes), bool(attributes["mark"]), attributes["pad_value"]
    rows = [cut(str(text)) for text in x.ravel().tolist()]
    longest = max(map(len, rows), default=0)
    if not x.size or not longest:
        return (np.empty((*x.shape, 0) if x.size else x.shape, object),)
    width = longest + 2 * mark
    result = np.full((x.size, width), pad, object)
    for filled, row in zip(result, rows, strict=True):
        whole = [_START, *row, _END] if mark else row
        filled[: len(whole)] = whole
    return (result.reshape(*x.shape, width),)


def _make_tokenizer(attributes: Mapping[str, Any]) -> Callable[[str], list[str]]:
    """Return a function that cuts a string into tokens. Raises ValueError for inconsistent attributes."""
    least, separators, source = int(attributes["mincharnum"]), attributes.get("separators"), attributes.get("tokenexp")
    if least < 1:
        raise ValueError(f"mincharnum is {least}, where the minimum is 1")
    if list(separators or ()) == [""] or (not separators and source == "."):
        if least > 1:
            raise ValueError(f"mincharnum is {least}, where tokens are characters")
        return list
    if separators:
        patterns = [compiled_pattern(separator) for separator in separators]
        return lambda text: _split_text(text, patterns, least)
    if not source:
        raise ValueError("neither separators nor tokenexp are given")
    pattern = compiled_pattern(source)
    return lambda text: _find_matches(text, pattern, least)


def _split_text(text: str, patterns: Sequence[Pattern], least: int) -> list[str]:
    """Return the text between matches of each pattern in sequence; an empty match consumes the character after it."""
    pieces = [text]
    for pattern in patterns:
        found = list[str]()
        for piece in pieces:
            start = 0
            while start <= len(piece) and (match := pattern.search(piece, start)) is not None:
                found.append(piece[start : match[0]])
                start = max(match[1], match[0] + 1)
            found.append(piece[start:])
        pieces = [token for token in found if len(token) >= least]
    return pieces


def _find_matches(text: str, pattern: Pattern, least: int) -> list[str]:
    """Return the matches of at least ``least`` characters. After a shorter match the search advances by one character."""
    found, start = list[str](), 0
    while start <= len(text) and (match := pattern.search(text, start)) is not None:
        long = match[1] - match[0] >= least
        found += [text[match[0] : match[1]]] if long else []
        start = match[1] if long else match[0] + 1
    return found


def find_warp_path(attributes: Mapping[str, Any], operands: Sequence[Any]) -> Sequence[Array]:
    """Return the path of least cost through a matrix from its first to its last element: indices of rows and of columns. Ties are
    broken in favour of a step along the columns."""
    x = np.asarray(operands[0])
    if x.ndim == 3 and x.shape[0] == 1:
        x = x[0]
    if x.ndim != 2:
        raise ValueError(f"costs of {x.ndim} axes, where 2 are supported")
    rows, columns = x.shape
    cost = np.full((rows + 1, columns + 1), np.inf, x.dtype)
    cost[0, 0] = 0
    trace = np.full(cost.shape, 2, np.int8)
    for place in range(2, rows + columns + 1):  # elements of one diagonal are independent
        i = np.arange(max(1, place - columns), min(rows, place - 1) + 1)
        j = place - i
        both, down, along = cost[i - 1, j - 1], cost[i - 1, j], cost[i, j - 1]
        step = np.where((both < down) & (both < along), 0, np.where((down < both) & (down < along), 1, 2))
        cost[i, j] = np.choose(step, (both, down, along)) + x[i - 1, j - 1]
        trace[i, j] = step
    path, row, column = list[tuple[int, int]](), rows, columns
    while row > 0 and column > 0:
        path.append((row - 1, column - 1))
        taken = int(trace[row, column])
        row, column = row - (taken != 2), column - (taken != 1)
    return (np.array(path[::-1], np.int32).reshape(-1, 2).T.copy(),)


def find_unique(attributes: Mapping[str, Any], operands: Sequence[Any]) -> Sequence[Array]:
    """Return distinct elements in order of first occurrence, the index of each element among them, and their counts."""
    x = np.asarray(operands[0])
    if x.ndim != 1:
        raise ValueError(f"x has {x.ndim} axes, where 1 is supported")
    _, first, inverse, counts = np.unique(x, return_index=True, return_inverse=True, return_counts=True)
    order = np.argsort(first, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return x[first[order]], place[inverse.ravel()], counts[order]


def detect_bifurcation(attributes: Mapping[str, Any], operands: Sequence[Any]) -> Sequence[Array]:
    """Append predicted tokens up to the first one that differs from the source, and find the last tokens in the source."""
    source, tokens, before, predicted = (None if x is None else np.asarray(x) for x in (*operands, None)[:4])
    assert source is not None and tokens is not None and before is not None
    if predicted is not None:
        at = int(before.ravel()[0])
        if not 0 <= at <= len(source) or len(predicted) != len(source) + 1 - at:
            raise ValueError(f"{len(predicted)} predicted tokens for {len(source)} of the source from {at} on")
        departs = np.flatnonzero(predicted[:-1] != source[at:])
        tokens = np.concatenate([tokens, predicted[: (int(departs[0]) if departs.size else len(predicted) - 1) + 1]])
    least, most, found = attributes.get("min_ngram_size", 1), attributes.get("max_ngram_size", 3), -1
    if not 1 <= least <= most:
        raise ValueError(f"n-grams of {least} to {most} tokens: the least size is at least 1 and at most the largest")
    for size in range(least, most + 1):
        tail = tokens[len(tokens) - size :]
        places = [i for i in range(len(source) - size + 1) if np.array_equal(source[i : i + size], tail)]
        if size > len(tokens) or not places:
            break
        found = places[0] + size
        if found >= len(source):
            break
        found = -1 if len(places) > 1 else found
    return tokens, np.full(before.shape, found, np.int64)


def expand_dims(attributes: Mapping[str, Any], operands: Sequence[Any]) -> Sequence[Array]:
    """Insert an axis, also into tensors of strings."""
    return (np.expand_dims(np.asarray(operands[0]), int(np.asarray(operands[1]).reshape(()))),)


def gather_nd(attributes: Mapping[str, Any], operands: Sequence[Any]) -> Sequence[Array]:
    """Return the slices at indices along the first axes, also of tensors of strings."""
    x, places = np.asarray(operands[0]), np.asarray(operands[1])
    return (x[tuple(np.moveaxis(places, -1, 0))],)


def hash_words(attributes: Mapping[str, Any], operands: Sequence[Any]) -> Sequence[Array]:
    """Return the 32-bit MurmurHash3 of strings."""
    x, seed = np.asarray(operands[0]), int(attributes.get("seed", 0)) & _WORD
    hashes = np.array([murmur_hash(str(text).encode(), seed) for text in x.ravel().tolist()], np.uint32).reshape(x.shape)
    return (hashes if attributes.get("positive", 1) else hashes.view(np.int32),)


def murmur_hash(data: bytes, seed: int) -> int:
    """Return the 32-bit MurmurHash3 of bytes."""
    whole = len(data) - len(data) % 4
    blocks = [*struct.unpack(f"<{whole // 4}I", data[:whole])]
    value = seed
    for block in blocks:
        value = (_rotate_left(value ^ _mix_block(block), 13) * 5 + 0xE6546B64) & _WORD
    if len(data) > whole:
        value ^= _mix_block(int.from_bytes(data[whole:], "little"))
    value ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        value = ((value ^ value >> shift) * factor) & _WORD
    return value


def _mix_block(block: int) -> int:
    return _rotate_left(block * 0xCC9E2D51 & _WORD, 15) * 0x1B873593 & _WORD


def _rotate_left(value: int, count: int) -> int:
    return (value << count | value >> (32 - count)) & _WORD


def invert_matrices(attributes: Mapping[str, Any], operands: Sequence[Any]) -> Sequence[Array]:
    """Return the inverse of each matrix, NaN if it is singular."""
    x = np.asarray(operands[0])
    result = np.empty(x.shape, x.dtype)
    for place in np.ndindex(x.shape[:-2]):
        try:
            result[place] = np.linalg.inv(x[place].astype(np.float64))
        except np.linalg.LinAlgError:
            result[place] = np.nan
    return (result,)
