"""Brace lists of shells and of WebDataset: ``{00000..00099}.tar``, ``{train,val}/a.tar``, nested or several in a text.

Text in, texts out: nothing here reads a storage. What is not a list stays as it is: ``{}``, ``{one}``, a lone brace.
"""

from __future__ import annotations

import re

__all__ = ["MAX_EXPANDED", "expand_braces"]

MAX_EXPANDED = 1_000_000  # texts, several times the shards of the largest public datasets
_MAX_DEPTH = 50  # braces in braces: each is a level of recursion
_NUMBERS = re.compile(r"(-?[0-9]{1,18})\.\.(-?[0-9]{1,18})(?:\.\.(-?[0-9]{1,18}))?")
_LETTERS = re.compile(r"(?=[a-z]\.\.[a-z]|[A-Z]\.\.[A-Z])(.)\.\.(.)(?:\.\.(-?[0-9]{1,18}))?")
_PADDED = re.compile(r"-?0[0-9]+")


def expand_braces(text: str) -> list[str]:
    """Returns the texts that a text with brace lists stands for, in order and without repetitions.

    The rules are those of Bash: a range counts in either direction, by its step if it has one, and its numbers have one
    width if one of its ends starts with a zero.

    Raises:
        ValueError: there are more than `MAX_EXPANDED` of them, or braces are nested too deeply.
    """
    return list(dict.fromkeys(_expand(text, 0, len(text), _pairs(text))))


def _pairs(text: str) -> dict[int, int]:
    """Returns the position of the closing brace of each opening one that has one."""
    pairs: dict[int, int] = {}
    waiting: list[int] = []
    for at, character in enumerate(text):
        if character == "{":
            waiting.append(at)
        elif character == "}" and waiting:
            pairs[waiting.pop()] = at
        if len(waiting) > _MAX_DEPTH:
            raise ValueError(f"has more than {_MAX_DEPTH} braces inside each other")
    return pairs


def _expand(text: str, start: int, end: int, pairs: dict[int, int]) -> list[str]:
    texts = [""]
    at = start
    while at < end:
        close = pairs.get(at)
        if close is not None:
            options, at = _options(text, at, close, pairs), close + 1
        else:
            begin, at = at, at + 1
            while at < end and at not in pairs:
                at += 1
            options = [text[begin:at]]
        _check_number(len(texts) * len(options))
        texts = [head + tail for head in texts for tail in options]
    return texts


def _options(text: str, start: int, close: int, pairs: dict[int, int]) -> list[str]:
    """Returns what a pair of braces stands for."""
    bounds = [start]
    at = start + 1
    while at < close:
        if text[at] == ",":
            bounds.append(at)
        at = pairs.get(at, at) + 1
    if len(bounds) > 1:
        options: list[str] = []
        for before, after in zip(bounds, [*bounds[1:], close], strict=True):
            options += _expand(text, before + 1, after, pairs)
            _check_number(len(options))
        return options
    inner = text[start + 1 : close]
    if match := _NUMBERS.fullmatch(inner):
        width = max(len(match[1]), len(match[2])) if any(map(_PADDED.fullmatch, match.group(1, 2))) else 0
        return [f"{number:0{width}d}" for number in _steps(int(match[1]), int(match[2]), match[3])]
    if match := _LETTERS.fullmatch(inner):
        return [chr(code) for code in _steps(ord(match[1]), ord(match[2]), match[3])]
    return ["{" + option + "}" for option in _expand(text, start + 1, close, pairs)]


def _steps(first: int, last: int, step: str | None) -> range:
    size = abs(int(step or 1)) or 1
    steps = range(first, last + 1, size) if first <= last else range(first, last - 1, -size)
    _check_number(len(steps))
    return steps


def _check_number(number: int) -> None:
    if number > MAX_EXPANDED:
        raise ValueError(f"has braces that stand for {number:,} names or more, allowed are {MAX_EXPANDED:,}")
