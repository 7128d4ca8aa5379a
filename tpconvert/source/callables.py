"""Opens a model that is a function of the user's: ``path/to/file.py:function`` or ``package.module:function``."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tpconvert.errors import SourceError
from tpconvert.source.blame import blaming
from tpconvert.source.build.frugal import frugal, parameters_to_meta, real_inputs
from tpconvert.source.build.initial import on_files
from tpconvert.source.source import Inputs, Source

if TYPE_CHECKING:
    from tpconvert.checkpoint.tensors.weights import Weights

Function = Callable[[], Any]


def is_callable_name(name: str) -> bool:
    """Whether a SOURCE names a function: ``file.py:function`` or ``package.module:function``."""
    place, colon, function = name.rpartition(":")
    return bool(colon) and function.isidentifier() and (place.endswith(".py") or _is_dotted(place))


def open_callable(name: str, *, weights: str | None = None) -> Source:
    """The source for a function that returns ``(module, inputs)``."""
    stored = Path(weights) if weights else None
    if stored and not stored.is_file():
        raise SourceError(f"--weights: there is no file {stored}.")
    function = find_function(name)
    module, inputs, notes = _on_meta(name, function)
    build = partial(_build, name, function, stored)
    return Source(
        name=name,
        module=parameters_to_meta(module).eval(),
        inputs=real_inputs(inputs),
        build=build,
        weights=partial(_weights, module, build, stored),
        initial=partial(_initial, name, function),
        description={"class": type(module).__name__},
        notes=notes,
    )


def find_function(name: str) -> Function:
    """The function that ``file.py:function`` or ``package.module:function`` names."""
    place, _, wanted = name.rpartition(":")
    module = _from_file(Path(place)) if place.endswith(".py") else _from_package(name, place)
    found = getattr(module, wanted, None)
    if not callable(found):
        names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        near = difflib.get_close_matches(wanted, names, n=1)
        raise SourceError(f"{place} has no function {wanted}.", hint=f"Did you mean {near[0]}?" if near else "")
    return found  # type: ignore[no-any-return]


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.py")], n=1)
        raise SourceError(f"There is no file {path}.", hint=f"Did you mean {path.with_name(near[0])}?" if near else "")
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    if spec is None or spec.loader is None:
        raise SourceError(f"{path} cannot be imported.")
    module = importlib.util.module_from_spec(spec)
    with blaming(f"{path} cannot be imported"), _beside(path.resolve().parent):
        # Dataclasses and pickles look a class's module up by name.
        sys.modules.setdefault(path.stem, module)
        spec.loader.exec_module(module)
    return module


def _from_package(name: str, place: str) -> ModuleType:
    with _beside(Path.cwd()):
        try:
            with blaming(f"{place} cannot be imported"):
                return importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise SourceError(f"{name}: there is no Python module {error.name}.") from None


class _beside:
    """Within it, a folder is importable, as it is for a script that lies there."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __enter__(self) -> None:
        sys.path.insert(0, self.folder)

    def __exit__(self, *_: object) -> None:
        sys.path.remove(self.folder)


def _on_meta(name: str, function: Function) -> tuple[nn.Module, Inputs, tuple[str, ...]]:
    """The function called without memory for weights; plainly where it looks at their values."""
    try:
        with frugal():
            return *_called(name, function), ()
    except SourceError:
        return *_called(name, function), (f"{name} could not be called without weights, so it was called with them.",)


def _called(name: str, function: Function, seed: int = 0) -> tuple[nn.Module, Inputs]:
    _check_arguments(name, function)
    with blaming(f"{name} failed"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        result = function()
    match result:
        case (nn.Module() as module, dict() | tuple() as inputs):
            return module, inputs
        case (nn.Module() as module, list() as inputs):
            return module, tuple(inputs)
        case (nn.Module() as module, torch.Tensor() as tensor):
            return module, (tensor,)
    raise SourceError(
        f"{name} returned {_told_type(result)}, not (module, inputs).",
        hint="Return a torch.nn.Module and its example inputs, a dict of keyword arguments or a tuple.",
    )


def _check_arguments(name: str, function: Function) -> None:
    """Raise for what cannot be called without arguments."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of C, which says nothing of itself
        return
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if needed := [p.name for p in parameters if p.default is p.empty and p.kind not in kinds]:
        raise SourceError(
            f"{name} takes arguments ({', '.join(needed)}), and a SOURCE is called without any.",
            hint="Write a function that returns (module, inputs), and name that.",
        )


def _told_type(result: Any) -> str:
    if isinstance(result, tuple):
        return f"a tuple of {', '.join(type(item).__name__ for item in result) or 'nothing'}"
    return type(result).__name__


def _build(name: str, function: Function, stored: Path | None) -> nn.Module:
    module, _ = _called(name, function)
    if stored:
        from safetensors.torch import load_file

        _check_names(module, load := load_file(stored), stored)
        module.load_state_dict(load, strict=False)
    return module.eval()


def _check_names(module: nn.Module, tensors: dict[str, torch.Tensor], stored: Path) -> None:
    """Raise unless the file fits the module; one stored name of several tied ones is enough."""
    own = module.state_dict(keep_vars=True)
    held = {id(own[name]) for name in tensors if name in own}
    for name, value in own.items():
        if id(value) not in held:
            raise SourceError(f"{stored} has no tensor {name}.", hint=_near_name(name, tensors))
        if name in tensors and tensors[name].shape != value.shape:
            raise SourceError(f"{name} is {list(tensors[name].shape)} in {stored}, {list(value.shape)} in the module.")
    if unknown := sorted(set(tensors) - set(own)):
        hint = _near_name(unknown[0], own)
        raise SourceError(f"{stored} has a tensor {unknown[0]} that the module has not.", hint=hint)


def _near_name(name: str, names: Any) -> str:
    near = difflib.get_close_matches(name, list(names), n=1)
    return f"It has {near[0]}." if near else ""


def _weights(module: nn.Module, build: Callable[[], nn.Module], stored: Path | None) -> Weights:
    from tpconvert.checkpoint.tensors.weights import file_weights, module_weights, ties_of

    return file_weights(stored, tied=ties_of(module)) if stored else module_weights(build())


def _initial(name: str, function: Function, seed: int) -> Weights:
    from tpconvert.checkpoint.tensors.weights import module_weights

    with on_files():
        module, _ = _called(name, function, seed)
    weights = module_weights(module)
    weights.source |= {"name": name, "seed": seed}
    return weights


def _is_dotted(place: str) -> bool:
    return bool(place) and all(part.isidentifier() for part in place.split("."))
