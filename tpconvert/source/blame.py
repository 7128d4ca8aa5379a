"""An exception out of code that is not ours, as one line that points at the line to mend."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tpconvert.errors import SourceError, TPConvertError

_OURS = str(Path(__file__).parent.parent)


@contextmanager
def blaming(what: str) -> Iterator[None]:
    """Within it, any exception of the user's code becomes a SourceError: ``what`` failed at file:line, with its text.

    An exception without a line outside tpconvert, torch and the standard library is a fault of ours and goes through.
    """
    try:
        yield
    except (TPConvertError, KeyboardInterrupt):
        raise
    except Exception as error:
        line = users_line(error)
        if line is None:
            raise
        raise SourceError(f"{what}: {line.filename}:{line.lineno} in {line.name}: {told(error)}") from error


def users_line(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost line of the traceback that is neither ours, nor torch's, nor Python's own."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return traceback.FrameSummary(error.filename, error.lineno, "<module>")
    return next((frame for frame in reversed(frames) if not _foreign(frame.filename)), None)


def told(error: BaseException) -> str:
    """The type and the first line of the text of an exception."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    if not lines:
        return type(error).__name__
    said = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]  # as of a list of what is wrong
    return f"{type(error).__name__}: {said}"


def _foreign(filename: str) -> bool:
    parts = Path(filename).parts
    if "site-packages" in parts:
        package = parts[parts.index("site-packages") + 1]
        return package in ("torch", "click")
    return filename.startswith(("<", _OURS, sysconfig.get_path("stdlib")))
