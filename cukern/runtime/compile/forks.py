"""Makes os.fork safe while other threads compile.

A child process inherits the locks that these threads hold, but not the threads, and would deadlock. So a fork
waits until no other thread compiles, and new compilations wait for the fork.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

_Value = TypeVar("_Value")

_LONGEST_S = 120.0  # limit of the wait, because a compiling thread may wait for a lock of the forking one

_changed = threading.Condition()
_busy: set[int] = set()  # threads that a fork must not interrupt
_forking = 0


@contextlib.contextmanager
def no_fork() -> Iterator[None]:
    """Inside the block, forks in other threads wait. Used around locks and imports (which take locks)."""
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


class cached_property(Generic[_Value]):
    """functools.cached_property without the lock that it has before Python 3.12, which a child process could
    inherit."""

    def __init__(self, function: Callable[[Any], _Value]):
        self.function, self.__doc__ = function, function.__doc__

    def __get__(self, instance: Any, owner: type) -> _Value:
        value = instance.__dict__[self.function.__name__] = self.function(instance)
        return value


def _before() -> None:
    global _forking
    _changed.acquire()  # held until after the fork
    _forking += 1
    mine = {threading.get_ident()} & _busy  # this thread may fork while it compiles, in a signal handler
    _busy.difference_update(mine)
    _changed.notify_all()  # another thread in the same situation may wait for this one
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
