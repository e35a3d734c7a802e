"""Recurrent cells whose weights stay in shared memory."""
