"""The lowerings, one file per operator family; importing this package fills the registry. Every module of the folder is imported,
so adding an operator changes one file only."""

from __future__ import annotations

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
