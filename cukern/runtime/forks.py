"""os.fork while other threads compile: the child inherits the locks that they hold, but not the threads, and would wait for ever.

So a fork waits until no other thread compiles, and those that are about to begin wait for the fork.
"""

import contextlib
import os
import threading
from collections.abc import Iterator

_LONGEST_S = 120.0  # a fork waits no longer: a thread that compiles may wait for what the forking one holds

_changed = threading.Condition()
_busy: set[int] = set()  # threads that must not be cut off
_forking = 0


@contextlib.contextmanager
def no_fork() -> Iterator[None]:
    """While it is open, forks in other threads wait. For locks, and for imports, which are locks too."""
    me = threading.get_ident()
    outermost = me not in _busy
    try:
        if outermost:
            with _changed:
                _changed.wait_for(lambda: not _forking, _LONGEST_S)
                _busy.add(me)
        yield
    finally:
        if outermost:
            with _changed:
                _busy.discard(me)
                _changed.notify_all()


def _before() -> None:
    global _forking
    _changed.acquire()  # held until after the fork
    _forking += 1
    mine = {threading.get_ident()} & _busy  # it forks while it compiles, in a signal handler perhaps
    _busy.difference_update(mine)
    _changed.notify_all()  # another that does the same may wait for this one
    _changed.wait_for(lambda: not _busy, _LONGEST_S)
    _busy.update(mine)


def _after_in_parent() -> None:
    global _forking
    _forking -= 1
    _changed.notify_all()
    _changed.release()


def _after_in_child() -> None:
    global _changed, _forking
    _changed, _forking = threading.Condition(), 0
    _busy.intersection_update({threading.get_ident()})


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
