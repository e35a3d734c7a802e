"""Matrix products and windows of groups of threads: tiles, the walk over a sum, operands in local memory, strips, and costs.

Plugins whose devices have groups of threads with a local memory write their kernels from these parts."""

from __future__ import annotations

from rammer.codegen.products.block import Shape, shape_of
from rammer.codegen.products.depth import Depth, ceiling_quotient, depth_of, stopped_axes, taps_of
from rammer.codegen.products.operand import PLAIN, Piece, Staged, Staging
from rammer.codegen.products.operand_maps import OperandMaps
from rammer.codegen.products.packing import DEEP, Cores, Rows, Turned, to_core_matrices
from rammer.codegen.products.ring_choice import Config, copied_together, end_bytes, find_roles, ring_choices, ring_time
from rammer.codegen.products.ring_cost import (
    BLOCKS,
    MAPS_STEP,
    PRODUCER_MAPS,
    REGISTERS,
    DepthWalk,
    LaunchCycles,
    RingCost,
    Work,
    halo_elements,
)
from rammer.codegen.products.strips import Strips, contiguous_tile, moved_bytes
from rammer.codegen.products.tiles import alike_tiles, at_lengths, one_tile, patch_tiles, task_count, tile_parts
from rammer.codegen.products.window_strips import (
    WARP,
    Window,
    WindowWriter,
    thread_count,
    window_of,
    window_seconds,
    window_tilings,
)

__all__ = ["BLOCKS", "DEEP", "MAPS_STEP", "PLAIN", "PRODUCER_MAPS", "REGISTERS", "WARP", "Config", "Cores", "Depth"]
__all__ += ["DepthWalk", "LaunchCycles", "Piece", "RingCost", "Rows", "Shape", "Staged", "Staging", "Strips", "Turned"]
__all__ += ["OperandMaps", "Window", "WindowWriter", "Work", "alike_tiles", "at_lengths", "ceiling_quotient"]
__all__ += ["contiguous_tile", "copied_together"]
__all__ += ["depth_of", "end_bytes", "find_roles", "halo_elements", "moved_bytes", "one_tile", "patch_tiles", "ring_choices"]
__all__ += ["ring_time", "shape_of", "stopped_axes", "taps_of", "task_count", "thread_count", "tile_parts"]
__all__ += ["to_core_matrices", "window_of", "window_seconds", "window_tilings"]
