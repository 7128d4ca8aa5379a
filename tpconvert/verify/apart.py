"""Work in a process of its own, so that this one can still fork ranks.

A backward pass starts the threads of all GPUs that a machine has, even where nothing is on a GPU; after that, neither
autograd nor CUDA works in a forked process.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from tpconvert.errors import NotRunError, PlanError, TPConvertError


def apart(make: Callable[[], str]) -> str:
    """What ``make`` returns or raises, made in a forked process where this machine has GPUs."""
    if not torch.cuda.device_count() or not hasattr(os, "fork"):
        return make()
    context: Any = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_make, args=(make, theirs))
    process.start()
    theirs.close()
    try:
        hint, text = ours.recv()
    except EOFError:
        process.join()
        raise NotRunError(f"The process that planned died (exit code {process.exitcode}).") from None
    finally:
        if process.is_alive():
            process.terminate()
        process.join()
    if hint is not None:
        raise PlanError(text, hint=hint)
    return str(text)


def _make(make: Callable[[], str], pipe: Connection) -> None:
    try:
        pipe.send((None, make()))
    except TPConvertError as error:
        pipe.send((error.hint, error.message))
    except Exception:  # a fault of ours: all of it is told
        pipe.send(("", traceback.format_exc()))
