"""Strings and maps on the host, as ONNX specifies and ONNX Runtime computes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

#: Languages whose letter i has a dot in both cases or in neither.
DOTTED: Final = ("tr", "az")
#: Locales without a language, which change the case of ASCII letters only.
PLAIN: Final = ("C", "POSIX")


def string_normalizer(attributes: Mapping[str, Any], operands: Sequence[Any]) -> Sequence[Array]:
    """Remove stop words, then change the case of the rest; an empty result becomes one empty string.

    Words are compared in lower case unless ``is_case_sensitive``. The locale is only a name: the process's locale is neither
    changed nor used. Accents are preserved."""
    x = np.asarray(operands[0], object)
    if x.ndim not in (1, 2) or x.shape[:-1] not in ((), (1,)) or not x.size:
        raise ValueError(f"X has the shape {list(x.shape)}, where [C] and [1, C] are possible for C above 0")
    locale = str(attributes.get("locale") or "en_US")
    lower, upper = case_mappings(locale)
    action = attributes.get("case_change_action", "NONE")
    change = {"LOWER": lower, "UPPER": upper}.get(action, str)
    compared: Callable[[str], str] = str if attributes.get("is_case_sensitive", 0) else lower
    stop = {compared(word) for word in attributes.get("stopwords") or ()}
    kept = [change(word) for word in x.ravel().tolist() if not stop or compared(word) not in stop]
    made = np.empty(max(len(kept), 1), object)
    made[:] = kept or [""]
    return (made.reshape(*x.shape[:-1], -1),)


def case_mappings(locale: str) -> tuple[Callable[[str], str], Callable[[str], str]]:
    """Return a locale's functions to lower and upper case: Unicode's simple mappings, one letter to one."""
    name, dot, _ = locale.partition(".")
    if name in PLAIN and not dot:
        one, two = ({c: function(chr(c)) for c in range(128)} for function in (str.lower, str.upper))
        return (lambda word: word.translate(one)), (lambda word: word.translate(two))
    dotted = name.replace("-", "_").partition("_")[0] in DOTTED
    below, above = ({"I": "ı"}, {"i": "İ"}) if dotted else ({}, {})
    return (
        lambda word: "".join(below.get(c) or _simple_mapping(c.lower(), "i" if c == "İ" else c) for c in word),
        lambda word: "".join(above.get(c) or _simple_mapping(c.upper(), _simple_mapping(c.title(), c)) for c in word),
    )


def _simple_mapping(mapped: str, otherwise: str) -> str:
    """Return ``mapped`` if it is one letter, else ``otherwise``: Unicode's full mappings may have several."""
    return mapped if len(mapped) == 1 else otherwise


def one_hot(attributes: Mapping[str, Any], operands: Sequence[Any]) -> Sequence[Array]:
    """Compute OneHotEncoder. "Replace each input element with an array of ones and zeros, where a single one is placed at the
    index of the category that was passed in"; without ``zeros`` "if a category is not found, the operator will fail"."""
    x = np.asarray(operands[0])
    words = attributes.get("cats_strings") or ()
    categories = list(words or attributes.get("cats_int64s") or ())
    flat = x.ravel() if words else x.ravel().astype(np.int64)
    places = {c: place for place, c in enumerate(categories)}
    result = np.zeros((flat.size, len(categories)), np.float32)
    for row, value in enumerate(flat.tolist()):
        if value in places:
            result[row, places[value]] = 1
        elif not attributes.get("zeros", 1):
            raise ValueError(f"{value!r} is not one of the categories")
    return (result.reshape(*x.shape, len(categories)),)


def category_mapper(attributes: Mapping[str, Any], operands: Sequence[Any]) -> Sequence[Array]:
    """Compute CategoryMapper, which "Converts strings to integers and vice versa". "two sequences of equal length are used to map
    between" them."""
    x = np.asarray(operands[0])
    words, numbers = (list(attributes.get(n) or ()) for n in ("cats_strings", "cats_int64s"))
    if len(words) != len(numbers):
        raise ValueError(f"{len(words)} words for {len(numbers)} numbers")
    if x.dtype.kind in "OUS":
        return (
            _map_elements(x, dict(zip(words, numbers, strict=True)), attributes.get("default_int64", -1), np.dtype(np.int64)),
        )
    names = dict(zip(numbers, words, strict=True))
    return (_map_elements(x, names, attributes.get("default_string", "_Unused"), np.dtype(object)),)


def _map_elements(x: Array, table: Mapping[Any, Any], default: Any, dtype: np.dtype[Any]) -> Array:
    made = np.empty(x.size, dtype)
    made[:] = [table.get(v, default) for v in x.ravel().tolist()]
    return made.reshape(x.shape)


def dict_vectorizer(attributes: Mapping[str, Any], operands: Sequence[Any]) -> Sequence[Array]:
    """Compute DictVectorizer, which "Uses an index mapping to convert a dictionary to an array". "Given a dictionary, each key is
    looked up in the vocabulary attribute corresponding to the key type"; missing keys stay 0."""
    given: Mapping[Any, Any] = operands[0]
    keys = list(attributes.get("string_vocabulary") or attributes.get("int64_vocabulary") or ())
    values = list(given.values())
    zero: Any = "" if values and isinstance(values[0], str) else 0
    kind = object if zero == "" else np.asarray(values).dtype if values else np.dtype(np.float32)
    result = np.empty((1, len(keys)), {"float64": np.float32}.get(str(kind), kind))
    result[0, :] = [given.get(k, zero) for k in keys]
    return (result,)


def cast_map(attributes: Mapping[str, Any], operands: Sequence[Any]) -> Sequence[Array]:
    """Compute CastMap, which "Converts a map to a tensor".

    "The map key must be an int64 and the values will be ordered in ascending order based on this key": consecutively, or
    (``SPARSE``) at the indices that the keys give, of ``max_map`` in all."""
    given: Mapping[int, Any] = operands[0]
    to = attributes.get("cast_to", "TO_FLOAT")
    kinds: dict[str, Any] = {"TO_FLOAT": (np.float32, float), "TO_INT64": (np.int64, int), "TO_STRING": (object, str)}
    if to not in kinds:
        raise ValueError(f"cast_to is {to!r}")
    dtype, convert = kinds[to]
    places = sorted(given)
    if attributes.get("map_form", "DENSE") != "SPARSE":
        made = np.empty((1, len(places)), dtype)
        made[0, :] = [convert(given[k]) for k in places]
        return (made,)
    most = attributes.get("max_map", 1)
    if most < 1 or (places and not 0 <= places[0] <= places[-1] < most):
        raise ValueError(f"keys from {places[:1]} to {places[-1:]}, where max_map is {most}")
    made = np.full((1, most), convert(0) if to != "TO_STRING" else "", dtype)
    made[0, places] = [convert(given[k]) for k in places]
    return (made,)
