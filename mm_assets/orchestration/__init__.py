"""The only package that imports Dagster: declarations become assets, checks, jobs, a sensor and a schedule.

Bodies here read configuration, call one library function of `mm_assets.pipeline` and report.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mm_assets.orchestration.build import build_definitions
    from mm_assets.orchestration.component import ShardDataset
    from mm_assets.orchestration.resources import StorageRoot

__all__ = ["ShardDataset", "StorageRoot", "build_definitions"]

# Imported when used: commands import modules of this package that do not need Dagster.
_MODULES = {"ShardDataset": "component", "StorageRoot": "resources", "build_definitions": "build"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:  # Dagster finds component types by it
    return sorted({*globals(), *__all__})
