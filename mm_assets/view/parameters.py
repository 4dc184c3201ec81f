"""Parameters of a request's query: each function refuses what is not what it says, with an `HTTPException` of 400."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request

__all__ = ["optional_of", "text_of", "whole_of"]

MAX_TEXT = 64 << 10  # characters of a parameter
_MOST = 10**18


def text_of(request: Request, name: str) -> str:
    """A text; "" where it is not given."""
    text = request.query_params.get(name, "")
    if len(text) > MAX_TEXT:
        raise HTTPException(400, f"`{name}` has {len(text):,} characters, expected at most {MAX_TEXT:,}.")
    return text


def whole_of(request: Request, name: str, default: int, most: int = _MOST) -> int:
    """A whole number from 0."""
    found = optional_of(request, name, most)
    return default if found is None else found


def optional_of(request: Request, name: str, most: int = _MOST) -> int | None:
    """A whole number from 0, or None where it is not given."""
    text = request.query_params.get(name, "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 18) or int(text) > most:
        raise HTTPException(400, f"`{name}` is {text[:40]!r}, expected a whole number from 0 to {most}.")
    return int(text)
