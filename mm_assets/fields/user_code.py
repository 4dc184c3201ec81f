"""A digest of a user's class, so that what it made is made again when its code changes."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType
from weakref import WeakKeyDictionary

__all__ = ["code_digest", "is_own"]

_OWN = __name__.partition(".")[0]


def is_own(cls: type) -> bool:
    """Whether a class belongs to this package, whose stages carry versions instead."""
    return cls.__module__.partition(".")[0] == _OWN


_known: WeakKeyDictionary[type, str] = WeakKeyDictionary()


def code_digest(cls: type) -> str:
    """What a class is known by: the `version` that it declares, else SHA-256 over the modules that define it.

    These are its module and those of the classes that it derives from, without this package and the standard library;
    what they import is not looked at. A module counts by its source, a compiled one by its file, and one without a file
    by the version of the distribution that installed it. The first call counts for as long as the process lives: a
    source that changes later is not what runs.

    Returns:
        ``version`` and the declared version, or 64 hexadecimal digits.
    """
    if cls not in _known:
        _known[cls] = _digest(cls)
    return _known[cls]


def _digest(cls: type) -> str:
    settings = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    declared = None if "version" in settings else getattr(cls, "version", None)
    if isinstance(declared, str | int) and declared != "":
        return f"version {declared}"
    names = dict.fromkeys(base.__module__ for base in cls.__mro__)
    counted = [name for name in names if name.partition(".")[0] not in {_OWN, *sys.stdlib_module_names}]
    digest = hashlib.sha256(cls.__qualname__.encode())
    for name in counted:
        digest.update(b"\0" + name.encode() + b"\0" + _content(name, sys.modules.get(name)))
    return digest.hexdigest()


def _content(name: str, module: ModuleType | None) -> bytes:
    """What a module is known by; empty where nothing is."""
    try:
        return b"" if module is None else inspect.getsource(module).encode()
    except (OSError, TypeError):  # compiled, or made in a shell
        file = getattr(module, "__file__", None)
    try:
        return b"" if file is None else Path(file).read_bytes()
    except OSError:  # in a zip archive, without its source
        package = name.partition(".")[0]
        found = metadata.packages_distributions().get(package, ())
        return " ".join(metadata.version(distribution) for distribution in found).encode()
