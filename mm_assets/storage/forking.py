"""Locks that a forked child can take, although a thread of the parent held them when it forked.

That thread does not exist in the child, so no thread would ever release its lock. The state that a lock guards here is
consistent between any two statements, or belongs to the parent and is dropped: a new lock is all that the child needs.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

__all__ = ["renew_in_children"]


class _HoldsLocks(Protocol):
    def renew_locks(self) -> None:
        """Replaces the locks by free ones."""


_HOLDERS: weakref.WeakSet[_HoldsLocks] = weakref.WeakSet()


def renew_in_children(holder: _HoldsLocks) -> None:
    """From now on `holder.renew_locks` is called in each forked child, as long as the holder is referenced."""
    _HOLDERS.add(holder)


def _renew() -> None:
    for holder in list(_HOLDERS):
        holder.renew_locks()


if hasattr(os, "register_at_fork"):  # other systems do not fork
    os.register_at_fork(after_in_child=_renew)
