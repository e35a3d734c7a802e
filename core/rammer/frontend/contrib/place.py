"""Operators that ONNX Runtime's optimiser puts into ONNX's own domain, where ONNX has none of that name at the model's opset."""

from __future__ import annotations

from typing import Final

from onnx import ModelProto, helper

from rammer.frontend import checks, schemas
from rammer.frontend.schemas import MICROSOFT

#: Operators of ONNX's domain that ONNX Runtime knows at every opset, and those that it knows up to opset 9.
EVERYWHERE: Final = ("SimplifiedLayerNormalization", "LayerNormalization")
WITHDRAWN: Final = ("Affine", "Crop", "DynamicSlice", "ImageScaler", "ParametricSoftplus", "Scale", "ScaledTanh")
_LAST_OPSET: Final = 9


def placed(model: ModelProto) -> ModelProto:
    """``model`` with these operators in ONNX Runtime's domain: itself, if it has none."""
    opset = checks.opset_versions(model.opset_import).get("", 0)
    known = (*EVERYWHERE, *(WITHDRAWN if opset <= _LAST_OPSET else ()))
    lacking = {op for op in known if not schemas.has(op, max(opset, 1), "")}
    if not any(n.op_type in lacking and not n.domain for g in checks.all_graphs(model) for n in g.node):
        return model
    result = ModelProto.FromString(model.SerializeToString())
    for node in (n for g in checks.all_graphs(result) for n in g.node if n.op_type in lacking and not n.domain):
        node.domain = MICROSOFT
    if MICROSOFT not in checks.opset_versions(result.opset_import):
        result.opset_import.append(helper.make_opsetid(MICROSOFT, 1))
    return result
