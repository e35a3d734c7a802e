"""A kernel as a device function: one part of a fused launch, or a task's function in the persistent kernel."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rammer_cuda.kernels.task import TaskKernel

#: A declaration of static shared memory in a kernel's statements: its type, name and extents.
_STATIC = re.compile(r"__shared__ ((?:__align__\(\d+\) )?)([\w ]+?) (\w+)((?:\[\d+\])*);")
#: The type of a pointer's declaration, which ends in its name.
_TYPE = re.compile(r"(.*?)\w+")


def is_narrower(kernel: TaskKernel, threads: int) -> bool:
    """Return True if a kernel is for fewer threads than ``threads`` and never reads the block size."""
    return kernel.threads < threads and "blockDim" not in kernel.device + kernel.body


def has_barrier(kernel: TaskKernel) -> bool:
    """Return True if a kernel's statements have a barrier."""
    return "__syncthreads" in kernel.body


def barrier_line(kernel: TaskKernel, threads: int, meet: str = "rm_part_meet") -> str:
    """Return the line that restricts a kernel's barrier to its threads, the first of ``threads``, by the function ``meet``.
    Returns "" if the kernel uses all threads or has no barrier."""
    if not is_narrower(kernel, threads) or not has_barrier(kernel):
        return ""
    return f"const auto __syncthreads = [] {{ {meet}<{kernel.threads}>(); }};\n"


def declare_pointer(parameter: str, name: str) -> str:
    """Return the declaration of a pointer like ``parameter``, with the name ``name``."""
    found = _TYPE.fullmatch(parameter)
    assert found is not None, parameter
    return found[1] + name


@dataclass(frozen=True, slots=True)
class MovedStatics:
    """Static shared memory of a kernel as members of a structure. ``members`` declare the arrays. ``body`` are the statements,
    which access the structure ``name`` at a pointer. ``most`` is an upper bound of its bytes."""

    name: str
    members: tuple[str, ...]
    body: str
    most: int

    @property
    def text(self) -> str:
        """The structure, or "" if it is empty. A static assertion checks its size bound."""
        if not self.members:
            return ""
        return f'struct {self.name} {{ {" ".join(self.members)} }};\nstatic_assert(sizeof({self.name}) <= {self.most}, "");\n'


def with_statics_at(kernel: TaskKernel, name: str, place: str) -> MovedStatics:
    """Return a kernel whose static shared memory starts at the pointer ``place``, as a structure ``name``. Kernels that run one
    after the other in a launch thus share it. Separate declarations would each have their storage."""
    members: list[str] = []

    def moved(found: re.Match[str]) -> str:
        members.append(f"{found[1]}{found[2]} {found[3]}{found[4]};")
        return f"auto &{found[3]} = (({name} *){place})->{found[3]};"

    body = _STATIC.sub(moved, kernel.body)
    return MovedStatics(name, tuple(members), body, kernel.shared + 16 * len(members))


def dynamic_bytes(kernel: TaskKernel) -> int:
    """Return the bytes of the block's shared memory that a kernel needs as a part (``with_statics_at``)."""
    return max(kernel.dynamic, with_statics_at(kernel, "", "").most)
