"""Memory of the host's that a CPU's kernels use."""

from __future__ import annotations

from typing import Final

import numpy as np

from rammer.device.manifest import Array

#: Bytes of the smallest page.
PAGE: Final = 4096


def host_bytes(nbytes: int) -> Array:
    """So many bytes, from the beginning of a page on. For much memory NumPy asks the operating system for large pages, as no
    runtime does: panels read a line of each channel, and channels are on more pages of 4 KiB than a core remembers."""
    whole = np.empty(nbytes + PAGE, np.uint8)
    start = -whole.ctypes.data % PAGE
    return whole[start : start + nbytes]
