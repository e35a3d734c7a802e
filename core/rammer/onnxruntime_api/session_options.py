"""Options of sessions and runs, with ONNX Runtime's names. Options without an effect are reported once through ``logging``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from enum import Enum
from typing import Any, ClassVar, Final

from rammer.errors import BadInput, logger

#: Python's levels for ONNX Runtime's: verbose, info, warning, error, fatal.
_LEVELS: Final = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)


class GraphOptimizationLevel(Enum):
    """ONNX Runtime's levels. rammer always compiles in full."""

    ORT_DISABLE_ALL = 0
    ORT_ENABLE_BASIC = 1
    ORT_ENABLE_EXTENDED = 2
    ORT_ENABLE_LAYOUT = 3
    ORT_ENABLE_ALL = 99


class ExecutionMode(Enum):
    """ONNX Runtime's execution modes. rammer always schedules independent operators in parallel."""

    ORT_SEQUENTIAL = 0
    ORT_PARALLEL = 1


class ExecutionOrder(Enum):
    """ONNX Runtime's orders of operators. rammer's policy decides the order."""

    DEFAULT = 0
    PRIORITY_BASED = 1
    MEMORY_EFFICIENT = 2


class _Options:
    """Attributes with fixed names, types and defaults, and texts by key."""

    _defaults: ClassVar[dict[str, Any]] = {}
    _entries: dict[str, str]

    def __init__(self) -> None:
        object.__setattr__(self, "_entries", {})
        for name, value in self._defaults.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._defaults:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        kind = type(self._defaults[name])
        if not isinstance(value, kind):
            raise TypeError(f"{name} is a {type(value).__name__}, not a {kind.__name__}")
        object.__setattr__(self, name, value)

    def _entry(self, key: str) -> str:
        try:
            return str(self._entries[key])
        except KeyError:
            raise RuntimeError(f"{type(self).__name__} does not have configuration with key: {key}") from None


class SessionOptions(_Options):
    """The options of a session. ``enable_profiling``, ``profile_file_prefix``, ``log_severity_level``, the overrides of free
    dimensions and, on CPUs, ``intra_op_num_threads`` have an effect. The others do not change results, and are reported."""

    _defaults: ClassVar[dict[str, Any]] = {
        "enable_cpu_mem_arena": True,
        "enable_mem_pattern": True,
        "enable_mem_reuse": True,
        "enable_profiling": False,
        "execution_mode": ExecutionMode.ORT_SEQUENTIAL,
        "execution_order": ExecutionOrder.DEFAULT,
        "graph_optimization_level": GraphOptimizationLevel.ORT_ENABLE_ALL,
        "inter_op_num_threads": 0,
        "intra_op_num_threads": 0,
        "log_severity_level": -1,
        "log_verbosity_level": 0,
        "logid": "",
        "optimized_model_filepath": "",
        "profile_file_prefix": "onnxruntime_profile_",
        "use_deterministic_compute": False,
        "use_per_session_threads": True,
    }
    enable_profiling: bool
    intra_op_num_threads: int
    profile_file_prefix: str
    log_severity_level: int
    dimensions: dict[str, int]  #: Open dimensions with a fixed extent.

    #: Options that the session applies.
    _applied = (
        "intra_op_num_threads",
        "enable_profiling",
        "profile_file_prefix",
        "log_severity_level",
        "logid",
        "log_verbosity_level",
    )

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "dimensions", {})

    def add_free_dimension_override_by_name(self, dim_name: str, dim_value: int) -> None:
        """Fix an open dimension of the model."""
        self.dimensions[dim_name] = dim_value

    def add_free_dimension_override_by_denotation(self, denotation: str, dim_value: int) -> None:
        """Report that overrides by denotation have no effect: dimensions stay open, which gives the same results."""
        warn_once("add_free_dimension_override_by_denotation")

    def add_session_config_entry(self, key: str, value: str) -> None:
        """Store a text by its key."""
        self._entries[key] = value

    def get_session_config_entry(self, key: str) -> str:
        """Return the text of a key. Raises RuntimeError if it is missing."""
        return self._entry(key)

    def register_custom_ops_library(self, path: str) -> None:
        """Raise BadInput: ONNX Runtime's libraries of operators contain its own kernels."""
        raise BadInput(
            "rammer does not load ONNX Runtime's custom operators", path, "add the operator with a plugin (docs/operator.md)"
        )

    def has_providers(self) -> bool:
        """Return False: providers are given to the session."""
        return False

    def report_ignored(self) -> None:
        """Report, once for each option, options that differ from their defaults and have no effect."""
        for name in self._ignored():
            warn_once(name)

    def _ignored(self) -> Iterator[str]:
        yield from (n for n, v in self._defaults.items() if getattr(self, n) != v and n not in self._applied)
        yield from self._entries


class RunOptions(_Options):
    """The options of a run. ``terminate`` refuses the run; the others have no effect."""

    _defaults: ClassVar[dict[str, Any]] = {
        "log_severity_level": -1,
        "log_verbosity_level": 0,
        "logid": "",
        "only_execute_path_to_fetches": False,
        "terminate": False,
    }
    terminate: bool

    def add_run_config_entry(self, key: str, value: str) -> None:
        """Store a text by its key."""
        self._entries[key] = value

    def get_run_config_entry(self, key: str) -> str:
        """Return the text of a key. Raises RuntimeError if it is missing."""
        return self._entry(key)


_reported: set[str] = set()


def warn_once(name: str) -> None:
    """Report, once in a process, that an option of ONNX Runtime has no effect."""
    if name not in _reported:
        _reported.add(name)
        logger().warning("option %s of ONNX Runtime has no effect here; docs/onnxruntime.md says what replaces it", name)


def set_default_logger_severity(severity: int) -> None:
    """Set the least severity of messages: 0 verbose, 1 info, 2 warning, 3 error, 4 fatal."""
    logger().setLevel(_LEVELS[severity])


def set_seed(seed: int) -> None:
    """Accept a seed, as ONNX Runtime does. Operators that draw random numbers take their seeds from the model."""
    warn_once("set_seed")
