"""The files of datasets that are compared with those of another run."""

from pathlib import Path

__all__ = ["files_of"]


def files_of(folder: Path) -> list[Path]:
    """Returns every file below a folder, sorted, but those that depend on when and by whom they were written."""
    varies = ("attempts", "cache", "claims")
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return [path for path in files if path.parent.name not in varies and path.name != "clean.json"]
