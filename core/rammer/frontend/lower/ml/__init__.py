"""ONNX's operators for classical models (``ai.onnx.ml``) as functions over other operators; importing defines all of them."""

from rammer.frontend.lower.ml import encoders, ensembles, rows, vectors

__all__ = ["encoders", "ensembles", "rows", "vectors"]
