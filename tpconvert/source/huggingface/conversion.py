"""The weights of a transformers model: its stored tensors, renamed and fused as ``from_pretrained`` would.

transformers declares for each architecture how stored tensors become module tensors, as renamings and as operations on
tensors.  Here the operations run on stand-ins that record which view of which stored tensor each result is, so that
the bytes can be read lazily, and a merge can give them back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tpconvert.checkpoint.tensors.store import Store, open_store
from tpconvert.checkpoint.tensors.weights import Weights, tie, ties_of
from tpconvert.errors import SourceError
from tpconvert.spec.recipe import Join, Narrow, Permute, Recipe, Reshape, Take


def hf_weights(folder: Path, model: nn.Module) -> Weights:
    """The weights in ``folder`` by the names of ``model``, a transformers model on meta; nothing is read yet."""
    store = open_store(Path(folder))
    recipes = _recipes(store, model)
    ties = ties_of(model)
    state = model.state_dict(keep_vars=True)
    for name, recipe in recipes.items():
        if recipe.shape != tuple(state[name].shape):
            raise SourceError(
                f"{folder}: {name} is {list(recipe.shape)}, but the model of its config has {list(state[name].shape)}.",
                hint="Is the config of another size, or another --task meant?",
            )
    weights = tie(Weights(store, recipes, source={"name": str(folder)}), {n: f for n, f in ties.items() if n in state})
    missing = [name for name in state if weights.tied.get(name, name) not in weights.recipes]
    if missing:
        names = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise SourceError(
            f"{folder}: does not store {names}, which {type(model).__name__} needs.",
            hint="Choose the --task it was saved for; its config.json names it under architectures.",
        )
    return weights


def _recipes(store: Store, model: nn.Module) -> dict[str, Recipe]:
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key

    rename = _renamer(model)
    stand_ins: dict[str, Tensor] = {}
    recorder = _Recorder()
    state = model.state_dict()
    jobs: dict[str, Any] = {}
    for stored in sorted(store.names(), key=dot_natural_key):
        shape, dtype = store.info(stored)
        name, converter, pattern = rename(stored)
        if name not in state:
            continue
        stand_ins[stored] = recorder.stand_in(Take(stored, shape), dtype)
        if name not in jobs:
            jobs[name] = deepcopy(converter) if converter else WeightRenaming(stored, name)
        jobs[name].add_tensor(name, stored, pattern or stored, stand_ins[stored])
    recipes: dict[str, Recipe] = {}
    for name, job in jobs.items():
        if not isinstance(job, WeightConverter):
            stored = next(iter(job.layer_targets[name]))
            recipes[name] = recorder.recipe(stand_ins[stored])
            continue
        for made, recipe in _converted(name, job, model, recorder).items():
            if made in state:
                recipes[made] = recipe
    return recipes


def _renamer(model: nn.Module) -> Callable[[str], tuple[str, Any, str | None]]:
    """A function from a stored name to ``(module name, converter or None, the converter's pattern)``."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    prefix = getattr(model, "base_model_prefix", "") or ""
    state = model.state_dict()

    def rename(stored: str) -> tuple[str, Any, str | None]:
        name, pattern = rename_source_key(stored, renamings, converters, prefix, state)
        if name not in state and stored in state:
            name, pattern = rename_source_key(stored, [], [], prefix, state)
        return name, by_pattern[pattern] if pattern is not None else None, pattern

    return rename


def _converted(name: str, job: Any, model: nn.Module, recorder: _Recorder) -> dict[str, Recipe]:
    """What one converter of transformers makes, recorded on stand-ins."""
    try:
        with recorder:
            made = job.convert(name, model=model, config=model.config)
        values = {key: value[0] if isinstance(value, list) else value for key, value in made.items()}
        return {key: recorder.recipe(value) for key, value in values.items()}
    except SourceError as error:
        raise SourceError(f"{name}: {error.message}", hint=error.hint) from None
    except Exception as error:
        ops = ", ".join(type(op).__name__ for op in job.operations)
        raise SourceError(
            f"{name}: transformers makes it with {ops}, which fails on the stored tensors: {error}",
            hint="Is a tensor missing in the source, or is its config of another size?",
        ) from error


class _Recorder(TorchFunctionMode):
    """Knows the recipe of each stand-in (a meta tensor), and follows it through operations that only move elements."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[Tensor, Recipe]] = {}

    def stand_in(self, recipe: Recipe, dtype: torch.dtype) -> Tensor:
        """A meta tensor that stands for the recipe."""
        return self._note(torch.empty(recipe.shape, dtype=dtype, device="meta"), recipe)

    def recipe(self, tensor: Tensor) -> Recipe:
        """What a tensor that came out is."""
        if id(tensor) not in self._known:
            raise SourceError(
                "transformers computes new values for it on loading, so its stored bytes could not be given back.",
                hint="Load it with from_pretrained, save it with save_pretrained, and convert that.",
            )
        return self._known[id(tensor)][1]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _RECORDED and _is_known(self._known, args[0] if args else kwargs.get("tensors")):
            self._follow(_RECORDED[name], args, kwargs, out)
        return out

    def _follow(self, record: Any, args: Any, kwargs: Any, out: Any) -> None:
        outs = list(out) if isinstance(out, tuple | list) else [out]
        first = args[0] if args else kwargs["tensors"]
        given = [self.recipe(t) for t in first] if isinstance(first, tuple | list) else self.recipe(first)
        dtype = first[0].dtype if isinstance(first, tuple | list) else first.dtype
        for value, recipe in zip(outs, record(given, outs, args[1:], kwargs), strict=True):
            if id(value) not in self._known and value.dtype == dtype:
                self._note(value, recipe)

    def _note(self, tensor: Tensor, recipe: Recipe) -> Tensor:
        assert tuple(tensor.shape) == recipe.shape, f"recorded {recipe.shape} for {tuple(tensor.shape)}"
        self._known[id(tensor)] = (tensor, recipe)  # held, so that the id stays its own
        return tensor


def _is_known(known: Mapping[int, Any], first: Any) -> bool:
    items = first if isinstance(first, tuple | list) else [first]
    return all(id(t) in known for t in items) and bool(items)


Made = Iterable[Recipe]


def _dim(args: Any, kwargs: Any, rank: int, at: int = 0) -> int:
    dim: int = args[at] if len(args) > at else kwargs.get("dim", 0)
    return dim % max(rank, 1)


def _reshape(given: Recipe, outs: list[Tensor], args: Any, kwargs: Any) -> Made:
    return [given if tuple(outs[0].shape) == given.shape else Reshape(given, tuple(outs[0].shape))]


def _same(given: Recipe, outs: list[Tensor], args: Any, kwargs: Any) -> Made:
    return [given]


def _transpose(given: Recipe, outs: list[Tensor], args: Any, kwargs: Any) -> Made:
    rank = len(given.shape)
    names = [*args, *(kwargs[k] for k in ("dim0", "dim1") if k in kwargs)]
    dims = list(range(rank))
    a, b = names[0] % rank, names[1] % rank
    dims[a], dims[b] = dims[b], dims[a]
    return [Permute(given, tuple(dims))]


def _permute(given: Recipe, outs: list[Tensor], args: Any, kwargs: Any) -> Made:
    dims = args[0] if args and isinstance(args[0], tuple | list) else args or kwargs["dims"]
    return [Permute(given, tuple(d % len(given.shape) for d in dims))]


def _cat(given: list[Recipe], outs: list[Tensor], args: Any, kwargs: Any) -> Made:
    return [Join(_dim(args, kwargs, outs[0].dim()), tuple(given))]


def _stack(given: list[Recipe], outs: list[Tensor], args: Any, kwargs: Any) -> Made:
    dim = _dim(args, kwargs, outs[0].dim())
    ones = (Reshape(g, (*g.shape[:dim], 1, *g.shape[dim:])) for g in given)
    return [Join(dim, tuple(ones))]


def _split(given: Recipe, outs: list[Tensor], args: Any, kwargs: Any) -> Iterator[Recipe]:
    dim, at = _dim(args, kwargs, len(given.shape), 1), 0
    for out in outs:
        yield Narrow(given, dim, at, at + out.shape[dim])
        at += out.shape[dim]


def _unbind(given: Recipe, outs: list[Tensor], args: Any, kwargs: Any) -> Iterator[Recipe]:
    dim = _dim(args, kwargs, len(given.shape))
    for i, out in enumerate(outs):
        yield Reshape(Narrow(given, dim, i, i + 1), tuple(out.shape))


_RECORDED: Mapping[str, Any] = {
    "cat": _cat,
    "concat": _cat,
    "stack": _stack,
    "chunk": _split,
    "split": _split,
    "unbind": _unbind,
    "transpose": _transpose,
    "permute": _permute,
    "reshape": _reshape,
    "view": _reshape,
    "flatten": _reshape,
    "unflatten": _reshape,
    "squeeze": _reshape,
    "unsqueeze": _reshape,
    "contiguous": _same,
    "clone": _same,
}
