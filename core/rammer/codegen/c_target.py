"""The dialect of one C-family language for the generic emitter, as data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

__all__ = ["CFunction", "CTarget"]


@dataclass(frozen=True, slots=True)
class CTarget:
    """A dialect of C.

    ``function``: qualifier of a device function. ``global_``/``local``: address-space qualifiers of pointers. ``constant``:
    qualifier of file-scope tables. ``thread``/``threads``: expressions for this thread's index in the task's group and for the
    group's size (``0`` and ``1`` if a task is one thread). ``barrier``: statement joining the group (empty for one thread).
    ``types``: element type -> spelling. ``preamble``: text placed once before all functions. ``restrict``: pointer qualifier (""
    to omit it). ``vectors``: widths of the float32 vectors that the preamble defines, used if a task is one thread. ``rereads``:
    True if a task of one thread may read the results that it has written.

    ``functions``: scalar operation -> spelling where it differs from C99's float forms. ``load:float16`` and ``store:float16``
    are templates over pointer ``p``, index ``i`` and value ``v``. ``round:float16`` (a float32 that float16 holds), ``as_uint32``
    and the other bit casts are templates over ``v``. ``div`` is for float32 alone. Errors of
    ``div:float16`` and the like may be small beside the rounding of float16. ``fma`` is the product and sum in one rounding, for
    sums of products.
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
        """Return True if one thread computes a whole task."""
        return self.threads == "1"


@dataclass(frozen=True, slots=True)
class CFunction:
    """The function of a task: ``void name(global T0 *p0, ..., local char *scratch, int task)``.

    Pointers point at each tensor's first element (buffer start plus storage offset); strides and shapes are literals in the text.
    Names inside are canonical (``p0``, ``p1``, ...), and ``name`` is a hash of the text, so equal operators on different tensors
    share one function. ``arguments`` lists (tensor, written) for each pointer in order. ``scratch`` is the bytes of vEU memory
    for connections at that layer. ``outer`` is the bytes for connections at lower layers, by scope, each with a parameter
    ``local char *scratch_SCOPE`` after ``scratch``. A function that ``stops`` at the lengths of a run does not write past them.
    """

    name: str
    text: str
    arguments: tuple[tuple[str, bool], ...]
    scratch: int
    stops: bool = False
    outer: tuple[tuple[str, int], ...] = ()


def head_of(target: CTarget, name: str, pointers: Iterable[tuple[str, bool]], outer: Iterable[str] = ()) -> str:
    """Return the head of a task's function. Parameters ``p0, p1, ...`` point at elements of these C types (and are written or
    not); scratch memory, that of ``outer`` scopes, and the task's number follow."""
    parts = []
    for number, (kind, written) in enumerate(pointers):
        const = "" if written or not target.restrict else "const"
        parts.append(f"{join_words(target.global_, const, kind)} *{join_words(target.restrict, f'p{number}')}")
    parts += [f"{join_words(target.local, 'char')} *{scratch}" for scratch in ("scratch", *(f"scratch_{s}" for s in outer))]
    parts.append("int task")
    return f"{join_words(target.function, 'void')} {name}({', '.join(parts)})"


def join_words(*parts: str) -> str:
    """Join the non-empty parts with spaces."""
    return " ".join(p for p in parts if p)
