"""Corrupted files: models, compiled files, kernel stores and cached programs with injected faults.

``python -m rammer_testing.mutants --kind model --device ipu_sim --count 500``. Each mutant is passed to the command line in a
child with two cores, 20 s and 2 GiB (``rammer_testing.sandbox``). Every result but a clear error or a correct run is shrunk and
stored. ``value`` judges the numbers with the reference implementations.
"""
