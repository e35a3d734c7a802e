"""A differential fuzzer of whole graphs: random ONNX models, several voices that say what they compute, and shrinking.

``python -m rammer_testing.graphs --device rocm --graphs 300 --seed 1`` makes random valid models over all operators
(``operators``, one description each), runs them on the device and compares with our own float64 evaluation of the
lowered expressions, with ONNX Runtime and with ``onnx.reference`` (``judge``). What differs is shrunk (``shrink``) to a case
that ``--case FILE`` runs again. A plugin author gets the same search for a device of his own.
"""
