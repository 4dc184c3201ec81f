"""Secrets among the options of storages and in URLs: used, and shown as `***` wherever the command prints something."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from mm_assets.errors import MASK, masked_urls

__all__ = ["MASK", "forget_secrets", "is_secret", "masked", "masked_json", "masked_options", "note_secrets"]

_NAMED = re.compile(
    r"secret|token|passw|passphrase|credential|authorization|cookie|connection_string|signature|sas|key", re.I
)
_SHORT = 4  # characters: a shorter text is hardly a secret, and its mask would garble the output

_secrets: set[str] = set()


def is_secret(name: str) -> bool:
    """Whether an option of this name holds a secret, such as ``secret``, ``account_key`` or ``Authorization``."""
    return _NAMED.search(name) is not None


def note_secrets(options: Mapping[str, Any]) -> None:
    """Has the secrets among options masked from here on."""
    _secrets.update(value for value in _values(options, is_inside=False) if len(value) >= _SHORT)


def forget_secrets() -> None:
    """Masks nothing from here on: another command begins."""
    _secrets.clear()


def masked(text: str) -> str:
    """A text without the noted secrets, and without those of URLs."""
    for secret in _secrets:
        text = text.replace(secret, MASK)
    return masked_urls(text)


def masked_json(text: str) -> str:
    """JSON without the noted secrets, which it has escaped, and without those of URLs."""
    for secret in _secrets:
        text = text.replace(json.dumps(secret)[1:-1], MASK)
    return masked_urls(text)


def masked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with each secret masked, whatever its value."""
    return {
        name: MASK if is_secret(name) else masked_options(value) if isinstance(value, Mapping) else value
        for name, value in options.items()
    }


def _values(value: Any, *, is_inside: bool) -> Iterator[str]:
    """The texts below names of secrets."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _values(inner, is_inside=is_inside or is_secret(str(name)))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _values(inner, is_inside=is_inside)
    elif is_inside and value is not None and not isinstance(value, bool):
        yield str(value)
