"""The registry of all tables: their contents, and the spelling of their command lines."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from rammer.errors import BadInput

if TYPE_CHECKING:
    from measuring import Settings
    from result import Result

_NONE: Final[Mapping[str, str]] = MappingProxyType({})
_RAMMER: Final = "resnext29_branches,nasnet_cifar,alexnet,deepspeech2,lstm_tc,seq2seq"
_IOS: Final = "inception_v3,randwire,nasnet_large,squeezenet_bypass"

#: The ten models of Welder (OSDI'23, table 2).
_WELDER: Final = "mobilenet_v2,bert_base,vit_s32,conformer,mobilevit_s,swin_t,nerf_mlp,nafnet,restormer,bsrn"

#: Ten models of all kinds, small enough that launches matter.
_OPENCL: Final = "squeezenet,resnet50,bert_base,mobilenet_v2,resnext29,vit_s32,efficientnet_b0,alexnet,inception_v3,densenet121"


@dataclass(frozen=True)
class Table:
    """One table. ``where`` is ``module:function`` of a function from Settings to a Result; ``models`` are the default models.

    For a script with a separate command line ``where`` is its name, and ``spelled`` maps our options to its spelling; {stem} is
    the output file without extension. ``among`` is the mapping of its models, as ``module:mapping``. ``devices`` are the default
    devices. ``aside``: its programs can be compiled ahead. ``staged``: it accepts a file of stages. ``mean``: a column of ratios,
    whose geometric mean is a note."""

    name: str
    what: str
    where: str
    models: str = ""
    spelled: Mapping[str, str] = field(default_factory=lambda: _NONE)
    devices: tuple[str, ...] = ("rocm",)
    among: str = "zoo:ZOO"
    aside: bool = False
    staged: bool = False
    mean: str = ""

    @property
    def script(self) -> bool:
        """Return True if the table is a script's."""
        return ":" not in self.where

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of all supported models."""
        module, _, name = self.among.partition(":")
        return tuple(getattr(importlib.import_module(module), name))

    def call(self, settings: Settings) -> Result:
        """Measure the table and return the result."""
        module, _, function = self.where.partition(":")
        found: Result = getattr(importlib.import_module(module), function)(settings)
        return found


_COMMON: Final = {"device": "--device", "models": "--models", "tune": "--tune", "seed": "--seed"}
_MARKED: Final = {"out": "--markdown {stem}.md"}

_TABLES: Final = (
    Table("policies", "every policy on Rammer's six models", "tables.scheduling:policies", _RAMMER, aside=True),
    Table("rammer-ablation", "Rammer's three bars on every executor", "tables.scheduling:ablation", _RAMMER, aside=True),
    Table(
        "welder",
        "no fusion, element-wise fusion and full fusion of Welder's models",
        "tables.fusion:ablation",
        _WELDER,
        aside=True,
    ),
    Table("tuning", "tuned and untuned programs of the same models", "tables.scheduling:tuning", "*"),
    Table("ios-five-bars", "Sequential, Greedy, Merge, Parallel and Both", "tables.scheduling:five_bars", _IOS, aside=True),
    Table("ios-pruning", "search and result of IOS over r and s", "tables.scheduling:pruning", _IOS, aside=True),
    Table(
        "ios-batch",
        "IOS's stages for one batch, run with another",
        "tables.matrices:batches",
        "inception_v3",
        aside=True,
        staged=True,
    ),
    Table(
        "ios-device",
        "IOS's stages for one device, run on another",
        "tables.matrices:devices",
        "inception_v3",
        devices=("rocm", "ipu_sim"),
        aside=True,
        staged=True,
    ),
    Table(
        "stitching-kernels",
        "kernels beside XLA's and torch.compile's",
        "tables.stitching:kernel_counts",
        "bert_base,transformer,dien,crnn,quartznet",
    ),
    Table(
        "cross-device",
        "the same models on every device",
        "tables.matrices:across",
        "alexnet,squeezenet,lstm80_128",
        devices=("rocm", "ipu_sim"),
    ),
    Table(
        "opencl",
        "models through OpenCL on a GPU, and through cuda without tensor cores",
        "tables.opencl:beside_cuda",
        _OPENCL,
        devices=("rocm", "cuda"),
        aside=True,
        mean="rocm / cuda",
    ),
    Table(
        "matrix",
        "every model by every policy: compiled, verified, right",
        "matrix",
        "*",
        {**_COMMON, **_MARKED, "budget": "--budget", "keep": "--keep"},
        ("rocm", "ipu_sim"),
    ),
    Table(
        "utilisation",
        "how busy the units are, by tasks, with and without waves",
        "utilisation",
        spelled={**_COMMON, "out": "--folder {folder} --name {name}", "rounds": "--rounds", "ahead": "--ahead"},
    ),
    Table(
        "batching",
        "independent products apart and as one",
        "batching",
        spelled={**_COMMON, **_MARKED, "precision": "--precision", "rounds": "--rounds"},
    ),
    Table(
        "compile-time",
        "seconds from a model file to its first result, cold and warm",
        "starts",
        spelled={**_COMMON, **_MARKED, "keep": "--keep"},
    ),
    Table("planning", "100,000 tasks scheduled, given waits and memory, and verified", "planning", spelled=_MARKED),
    Table(
        "peers",
        "rammer and its peers on the zoo",
        "peers",
        spelled={**_COMMON, "precision": "--precision", "out": "--out {stem}.jsonl --markdown {stem}.md"},
    ),
    Table(
        "devices",
        "trained models on every device beside a peer",
        "devices",
        spelled={"device": "--device", "models": "--models", "tune": "--tune"},
    ),
    Table(
        "transfers", "tensors between processes beside remote calls", "transfers_table", spelled={**_MARKED, "rounds": "--rounds"}
    ),
    Table("loops", "loops, branches and recurrent layers beside a peer", "loops", spelled={"device": "--device", **_MARKED}),
    Table("operators", "models of one operator beside ONNX Runtime", "operators", spelled=_MARKED),
    Table("memory", "peak memory of a process that compiles and runs", "memory"),
    Table(
        "ranges",
        "programs for ranges of lengths beside those for one, and beside peers",
        "ranges",
        spelled={**_COMMON, **_MARKED, "rounds": "--rounds", "budget": "--budget", "keep": "--keep", "ahead": "--ahead"},
        among="zoo.ranged:RANGED",
    ),
    Table("demo", "a trained model on every device that works here", "demo"),
)
TABLES: Final[Mapping[str, Table]] = MappingProxyType({t.name: t for t in _TABLES})


def table(name: str) -> Table:
    """Return a table by name. Raises BadInput for an unknown name."""
    if name not in TABLES:
        raise BadInput(f"unknown table {name!r}", hint=f"one of: {', '.join(TABLES)}; --list shows what they are")
    return TABLES[name]
