"""Models from PyTorch: ``torch.compile(module, backend="rammer")`` and ``rammer.torch.compile``.

Both compile for inference: parameters are constants, and a call that torch would record gradients for is refused. The package
needs torch and onnxscript (the extra ``rammer-core[torch]``)."""

from rammer.errors import MissingDependency

try:
    import torch as _torch  # noqa: F401 - checks that it is installed
except ImportError as problem:
    raise MissingDependency("torch", "pip install rammer-core[torch]") from problem

from rammer.torch.compiled_module import CompiledModule, compile
from rammer.torch.dynamo_backend import backend

__all__ = ["CompiledModule", "backend", "compile"]
