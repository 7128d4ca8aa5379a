"""Where the recorder stands among a module's hooks: inside the user's, as the collectives at its boundaries do."""

from __future__ import annotations

import dis
import inspect
import sys
import sysconfig
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

UNNAMED = frozenset(["locals", "vars", "dir", "eval", "exec", "_getframe", "currentframe", "stack"])
"""Ways to a variable that do not name it."""


@contextmanager
def standing_inside(module: nn.Module, before: Callable[..., None], after: Callable[..., None]) -> Iterator[None]:
    """Call ``before`` after the user's input hooks, ``after`` before the user's output hooks.

    What those hooks do is then the caller's, and what they return is what the module is given and gives.  Hooks of
    this package belong to the module.
    """
    with ExitStack() as stack:
        stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        hooks = module._forward_pre_hooks
        for key in list(hooks)[_last_of_user(hooks) + 1 : -1]:
            hooks.move_to_end(key)
        stack.callback(module.register_forward_hook(after, prepend=True, with_kwargs=True).remove)
        hooks = module._forward_hooks
        for key in reversed(list(hooks)[1 : _first_of_user(hooks, 1)]):
            hooks.move_to_end(key, last=False)
        yield


def hooked(module: nn.Module) -> bool:
    """Whether hooks that are not of this package stand at a module."""
    return any(map(_of_user, (*module._forward_pre_hooks.values(), *module._forward_hooks.values())))


def sees_inputs(module: nn.Module) -> bool:
    """Whether a hook of the user's may look at what the module is given."""
    theirs = partial(_of_caller, module)
    return any(map(theirs, module._forward_pre_hooks.values())) or any(
        map(_looks_at_inputs, filter(theirs, module._forward_hooks.values()))
    )


def sees_outputs(module: nn.Module) -> bool:
    """Whether a hook of the user's may look at what the module gives."""
    return any(_of_caller(module, hook) for hook in module._forward_hooks.values())


def _looks_at_inputs(hook: Any) -> bool:
    """Whether an output hook may look at its second argument: a plain function that never names it does not."""
    code = getattr(hook, "__code__", None) if inspect.isfunction(hook) else None
    if code is None or code.co_argcount < 3 or not UNNAMED.isdisjoint(code.co_names):
        return True
    name = code.co_varnames[1]
    named = (i.argval if isinstance(i.argval, tuple) else (i.argval,) for i in dis.get_instructions(code))
    return name in code.co_cellvars or any(name in names for names in named)


def _last_of_user(hooks: OrderedDict[int, Any]) -> int:
    return max((i for i, hook in enumerate(hooks.values()) if _of_user(hook)), default=-1)


def _first_of_user(hooks: OrderedDict[int, Any], start: int = 0) -> int:
    return next((i for i, hook in enumerate(hooks.values()) if i >= start and _of_user(hook)), len(hooks))


def _of_user(hook: Any) -> bool:
    """Whether a hook is not of this package; a callable object is of the module of its class."""
    return not str(getattr(hook, "__module__", "")).startswith("tpconvert.")


def _of_caller(module: nn.Module, hook: Any) -> bool:
    """Whether a hook is of whoever uses a class.

    One that the installed library of the class has put there is a part of that library's forwards: what it does with
    values is recorded as all that forwards do, and what it would do when asked for more (every layer's attention) is
    another path, taken or not as others are.  The tools of torch are put there by whoever builds a model of its layers.
    """
    package, _, _ = str(getattr(hook, "__module__", "")).partition(".")
    own = package == type(module).__module__.partition(".")[0] != "torch" and _is_installed(package)
    return _of_user(hook) and not own


def _is_installed(package: str) -> bool:
    """Whether a package lies where installed ones do, rather than with a user's own code."""
    file = getattr(sys.modules.get(package), "__file__", None)
    places = {Path(path).resolve() for name, path in sysconfig.get_paths().items() if name in ("purelib", "platlib")}
    return file is not None and not places.isdisjoint(Path(file).resolve().parents)
