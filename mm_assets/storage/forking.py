"""Locks that a forked child can take, although a thread of the parent held them when it forked.

That thread does not exist in the child, so nothing would release its lock. The state that such a lock guards is always
consistent, or belongs to the parent and is dropped: the child needs only a new lock.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

__all__ = ["renew_in_children"]


class _HoldsLocks(Protocol):
    def renew_locks(self) -> None:
        """Replace the locks by free ones."""


_HOLDERS: weakref.WeakSet[_HoldsLocks] = weakref.WeakSet()


def renew_in_children(holder: _HoldsLocks) -> None:
    """Call `holder.renew_locks` in each forked child from now on, as long as the holder is referenced."""
    _HOLDERS.add(holder)


def _renew() -> None:
    for holder in list(_HOLDERS):
        holder.renew_locks()


if hasattr(os, "register_at_fork"):  # other systems do not fork
    os.register_at_fork(after_in_child=_renew)
