"""Tracebacks of faults: the lines of the user's program and the report, without the frames of the simulator.

CUKERN_TRACEBACK=1 shows all frames. Python's hook is replaced when a launch first meets a fault, IPython asks
the exception, and pytest asks the modules that a launch goes through (`__tracebackhide__`)."""

import os
import sys
import traceback
from pathlib import Path
from types import TracebackType

_OWN = str(Path(__file__).parents[1])
_LIBRARIES = (f"{os.sep}torch{os.sep}", f"{os.sep}triton{os.sep}runtime", "contextlib.py", "functools.py")


def whole() -> bool:
    """True if all frames are wanted."""
    return os.environ.get("CUKERN_TRACEBACK", "0") not in ("", "0")


class Report:
    """Mixed into the exceptions of a launch whose message says all."""

    def _render_traceback_(self) -> list[str] | None:
        """What IPython prints."""
        return None if whole() else [f"{type(self).__name__}: {self}"]


def install() -> None:
    """Print the next uncaught Report without internal frames. Other exceptions are printed as before."""
    before = sys.excepthook
    if getattr(before, "of_cukern", False):
        return

    def hook(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        if not isinstance(error, Report) or whole():
            return before(kind, error, tb)
        frames = [
            f
            for f in traceback.extract_tb(tb)
            if not f.filename.startswith(_OWN) and not any(x in f.filename for x in _LIBRARIES)
        ]
        lines = ["Traceback (most recent call last):\n", *traceback.format_list(frames)] if frames else []
        print(*lines, f"{kind.__module__}.{kind.__qualname__}: {error}", sep="", file=sys.stderr)

    hook.of_cukern = True  # type: ignore[attr-defined]
    sys.excepthook = hook
