"""A kernel as a device function: one part of a launch of several, or what a block of the persistent kernel calls for a task."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rammer_cuda.kernels.task import TaskKernel

#: A declaration of static shared memory in a kernel's statements: its type, its name, its extents.
_STATIC = re.compile(r"__shared__ ((?:__align__\(\d+\) )?)([\w ]+?) (\w+)((?:\[\d+\])*);")
#: The type of a pointer's declaration, which ends in its name.
_TYPE = re.compile(r"(.*?)\w+")


def is_narrower(kernel: TaskKernel, threads: int) -> bool:
    """Whether a kernel is for fewer threads than these: not one that asks how many there are."""
    return kernel.threads < threads and "blockDim" not in kernel.device + kernel.body


def has_barrier(kernel: TaskKernel) -> bool:
    """Whether a kernel's statements have a barrier."""
    return "__syncthreads" in kernel.body


def barrier_line(kernel: TaskKernel, threads: int, meet: str = "rm_part_meet") -> str:
    """The line by which a kernel's barrier is that of its own threads, the first of ``threads``, by the function ``meet``; "" for
    all of them."""
    if not is_narrower(kernel, threads) or not has_barrier(kernel):
        return ""
    return f"const auto __syncthreads = [] {{ {meet}<{kernel.threads}>(); }};\n"


def declare_pointer(parameter: str, name: str) -> str:
    """The declaration of a pointer like ``parameter``, called ``name``."""
    found = _TYPE.fullmatch(parameter)
    assert found is not None, parameter
    return found[1] + name


@dataclass(frozen=True, slots=True)
class MovedStatics:
    """Static shared memory of a kernel as members of a structure: ``members`` declare them, ``body`` are the statements that find
    them in the structure ``name`` at ``place``, ``most`` bytes suffice for it."""

    name: str
    members: tuple[str, ...]
    body: str
    most: int

    @property
    def text(self) -> str:
        """The structure; "" where there is none. The compiler says if it were larger than was thought."""
        if not self.members:
            return ""
        return f'struct {self.name} {{ {" ".join(self.members)} }};\nstatic_assert(sizeof({self.name}) <= {self.most}, "");\n'


def with_statics_at(kernel: TaskKernel, name: str, place: str) -> MovedStatics:
    """A kernel whose static shared memory lies at the pointer ``place``: kernels of one launch that run one after the other then
    share it, where each declaration would have a place of its own. A structure ``name`` says what is where."""
    members: list[str] = []

    def moved(found: re.Match[str]) -> str:
        members.append(f"{found[1]}{found[2]} {found[3]}{found[4]};")
        return f"auto &{found[3]} = (({name} *){place})->{found[3]};"

    body = _STATIC.sub(moved, kernel.body)
    return MovedStatics(name, tuple(members), body, kernel.shared + 16 * len(members))


def dynamic_bytes(kernel: TaskKernel) -> int:
    """Shared memory that a kernel takes of the block's as a part (``with_statics_at``)."""
    return max(kernel.dynamic, with_statics_at(kernel, "", "").most)
