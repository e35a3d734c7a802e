"""CTarget: how one C-family language spells what the generic emitter needs, as data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

__all__ = ["CFunction", "CTarget"]


@dataclass(frozen=True, slots=True)
class CTarget:
    """A dialect of C.

    ``function``: qualifier of a device function; ``global_``/``local``: address-space qualifiers of
    pointers; ``constant``: qualifier of file-scope tables; ``thread``/``threads``: expressions for this
    thread's index in the task's group and their number (``0`` and ``1`` where a task is one thread);
    ``barrier``: statement joining the group (empty for one thread); ``types``: element type -> spelling;
    ``functions``: scalar operation -> spelling where it differs from C99's float forms (``load:float16``
    and ``store:float16`` are templates over pointer ``p``, index ``i`` and value ``v``; ``round:float16``, a float32 that
    float16 holds, and ``as_uint32`` and its like, which read the bits of a number as one of another type, over ``v``; ``div``
    is one of float32 alone, ``fma`` the product and sum in one rounding that sums of products take); ``preamble``: text placed
    once before all functions; ``restrict``: pointer qualifier ("" for none); ``vectors``: widths of the float32 vectors that the
    preamble defines, used where a task is one thread; ``rereads``: whether such a task may read what it has written of a result.
    """

    name: str
    function: str
    global_: str
    local: str
    constant: str
    thread: str
    threads: str
    barrier: str
    types: Mapping[str, str]
    functions: Mapping[str, str] = field(default_factory=dict)
    preamble: str = field(default="", repr=False)
    restrict: str = ""
    vectors: tuple[int, ...] = ()
    rereads: bool = False

    @property
    def single(self) -> bool:
        """Whether one thread computes a whole task."""
        return self.threads == "1"


@dataclass(frozen=True, slots=True)
class CFunction:
    """``void name(global T0 *p0, ..., local char *scratch, int task)``: one task of an operator.

    Pointers point at each tensor's first element (buffer start plus storage offset); strides and shapes
    are literals in the text. Names inside are canonical (``p0``, ``p1``, ...), and ``name`` is a hash of
    the text, so equal operators on different tensors share one function. ``arguments`` lists (tensor,
    written) for each pointer in order. ``scratch`` is the bytes of vEU memory needed for connections at
    that layer. One that ``stops`` at the lengths of a run leaves what lies beyond.
    """

    name: str
    text: str
    arguments: tuple[tuple[str, bool], ...]
    scratch: int
    stops: bool = False


def head_of(target: CTarget, name: str, pointers: Iterable[tuple[str, bool]]) -> str:
    """The head of a task's function: parameters ``p0, p1, ...`` that point at elements of these C types, and whether they are
    written; then scratch memory and the task's number."""
    parts = []
    for number, (kind, written) in enumerate(pointers):
        const = "" if written or not target.restrict else "const"
        parts.append(f"{join_words(target.global_, const, kind)} *{join_words(target.restrict, f'p{number}')}")
    parts += [f"{join_words(target.local, 'char')} *scratch", "int task"]
    return f"{join_words(target.function, 'void')} {name}({', '.join(parts)})"


def join_words(*parts: str) -> str:
    """Those that are not empty, with spaces between them."""
    return " ".join(p for p in parts if p)
