"""Labels that are words: a model's classifiers count classes, and the host turns numbers into words in the end."""

from __future__ import annotations

from typing import Final

from onnx import ModelProto, NodeProto, helper

from rammer.frontend import checks

DOMAIN: Final = "ai.onnx.ml"
#: Classifier -> the attribute of labels that are integers.
_CLASSIFIERS: Final = {
    "TreeEnsembleClassifier": "classlabels_int64s", "LinearClassifier": "classlabels_ints", "SVMClassifier": "classlabels_ints",
}  # fmt: skip


def counted(model: ModelProto) -> ModelProto:
    """``model`` whose classifiers with labels of words give places among them, which a LabelEncoder makes words of: itself, if it
    has none. So scores, and all that follows from them, are computed on the device."""
    if not any(_words(n) for n in model.graph.node):
        return model
    result = ModelProto.FromString(model.SerializeToString())
    version = checks.opset_versions(result.opset_import).get(DOMAIN, 1)
    if version < 2:  # LabelEncoder knows integers and words since then
        return model
    nodes = list[NodeProto]()
    for node in result.graph.node:
        nodes.append(node)
        words = _words(node)
        if not words:
            continue
        kept = [a for a in node.attribute if a.name != "classlabels_strings"]
        del node.attribute[:]
        node.attribute.extend(kept)
        node.attribute.append(helper.make_attribute(_CLASSIFIERS[node.op_type], list(range(len(words)))))
        if node.output[0]:
            label, node.output[0] = node.output[0], f"{node.output[0]}:place"
            keys, title = list(range(len(words))), f"{node.name or node.op_type}/labels"
            nodes.append(
                helper.make_node(
                    "LabelEncoder", [node.output[0]], [label], title, domain=DOMAIN, keys_int64s=keys, values_strings=words
                )
            )
    copies = [NodeProto.FromString(n.SerializeToString()) for n in nodes]
    del result.graph.node[:]
    result.graph.node.extend(copies)
    return result


def _words(node: NodeProto) -> list[bytes]:
    """The labels of a classifier where they are words."""
    if node.domain != DOMAIN or node.op_type not in _CLASSIFIERS or not node.output:
        return []
    return next((list(a.strings) for a in node.attribute if a.name == "classlabels_strings"), [])
