"""Common parts of the command lines of ``rammer`` and of the searches."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


def gather_options(name: str, kind: Callable[..., Any], *fields: str) -> Callable[[F], F]:
    """Gather the options of these names into one argument ``name`` of type ``kind``. It is placed below the options."""

    def decorate(fn: F) -> F:
        @wraps(fn)
        def taking(**given: Any) -> Any:
            made = kind(**{field: given.pop(field) for field in fields})
            return fn(**{name: made}, **given)

        return cast(F, taking)

    return decorate
