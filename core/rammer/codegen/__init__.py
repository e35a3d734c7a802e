"""Kernel text for any expression, and the description of kernel families.

This package has the names that plugins use to recognise operators, price them and write their kernels. Modules of the core import
from the submodules."""

from rammer.codegen.c_text import Text, combine_digits, format_sum, split_digits, weighted_terms
from rammer.codegen.context import FunctionContext, Place
from rammer.codegen.contraction_form import (
    BYTE,
    BYTES,
    QUOTIENT,
    Operand,
    PaddedAxis,
    Product,
    Prologue,
    Roles,
    affine_address,
    check_followers,
    is_consecutive,
    is_length,
    operand_of,
    product_of,
    quotient_divisors,
    roles_of,
    roles_of_axes,
    with_quotients,
)
from rammer.codegen.cooperate import find_shared_reductions
from rammer.codegen.early_exit import EndText
from rammer.codegen.family_backend import FamilyBackend, Limits
from rammer.codegen.halo import Side, length_under, sides_of
from rammer.codegen.kernel_family import Choice, Forms, KernelFamily, by_seconds
from rammer.codegen.operations import (
    Val,
    compute_type,
    convert_value,
    format_load,
    format_store,
    initial_value,
    spell_literal,
    spell_type,
)
from rammer.codegen.packed_constants import in_tiles, make_packing
from rammer.codegen.partial_sums import block_sizes, write_in_blocks
from rammer.codegen.rowform import (
    Accesses,
    RowForm,
    address_step,
    can_join_axes,
    collect_accesses,
    inline_producers,
    map_form,
    row_form,
)
from rammer.codegen.scalar import Block, preload_elements, stored_loads
from rammer.codegen.skip_unchanged import rest_of
from rammer.codegen.stage_layout import Layout, Stage, last_stages
from rammer.codegen.symbolic_bounds import canonicalise_sum
from rammer.codegen.task_parameters import Argument, Packing, Unsuited, hash_of, packing_key, pad_axis

__all__ = ["BYTE", "BYTES", "QUOTIENT", "Accesses", "Argument", "Block", "Choice", "EndText", "FamilyBackend", "Forms"]
__all__ += ["FunctionContext", "KernelFamily", "Layout", "Limits", "Operand", "Packing", "PaddedAxis"]
__all__ += ["Place", "Product", "Prologue", "Roles", "RowForm", "Side", "Stage", "Text", "Unsuited", "Val", "address_step"]
__all__ += ["affine_address", "block_sizes", "by_seconds", "can_join_axes", "canonicalise_sum", "check_followers"]
__all__ += ["collect_accesses", "combine_digits", "compute_type", "convert_value", "find_shared_reductions", "format_load"]
__all__ += ["format_store", "format_sum", "hash_of", "in_tiles", "initial_value", "inline_producers", "is_consecutive"]
__all__ += ["is_length", "last_stages", "length_under", "make_packing", "map_form", "operand_of", "packing_key", "pad_axis"]
__all__ += ["preload_elements", "product_of", "quotient_divisors", "rest_of", "roles_of", "roles_of_axes", "row_form"]
__all__ += ["sides_of", "spell_literal", "spell_type", "split_digits", "stored_loads", "weighted_terms", "with_quotients"]
__all__ += ["write_in_blocks"]
