"""ONNX's operators for classical models (``ai.onnx.ml``) as functions over its others: importing this defines them all."""

from rammer.frontend.lower.ml import encoders, ensembles, rows, vectors

__all__ = ["encoders", "ensembles", "rows", "vectors"]
