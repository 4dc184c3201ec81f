"""The files of datasets that are compared with those of another run."""

from pathlib import Path

__all__ = ["files_of"]


def files_of(folder: Path) -> list[Path]:
    """Every file below a folder, sorted, but caches, which depend on when they were written."""
    return [p for p in sorted(folder.rglob("*")) if p.is_file() and p.parent.name != "cache"]
