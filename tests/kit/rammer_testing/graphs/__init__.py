"""A differential fuzzer of whole graphs: random ONNX models, several reference implementations, and shrinking.

``python -m rammer_testing.graphs --device rocm --graphs 300 --seed 1`` makes random valid models over all operators
(``operators``, one description each) and runs them on the device. The results are compared with a float64 evaluation of the
lowered expressions, with ONNX Runtime and with ``onnx.reference`` (``judge``). A difference is shrunk (``shrink``) to a case that
``--case FILE`` runs again. Plugin authors can search their own devices in the same way.
"""
