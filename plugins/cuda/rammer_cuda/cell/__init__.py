"""Recurrent cells whose weights stay in registers."""
