"""The proof that a program is legal, from its text alone.

This package has the names that plugins use. Modules of the core import from the submodules."""

from rammer.verify.in_place_state import state_pairs, state_ports
from rammer.verify.verifier import VerifyError, verify

__all__ = ["VerifyError", "state_pairs", "state_ports", "verify"]
