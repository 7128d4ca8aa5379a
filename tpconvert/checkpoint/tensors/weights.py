"""What a module's tensors are made of: stored tensors, as they are or by a recipe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tpconvert.checkpoint.files.header import dtype_name
from tpconvert.checkpoint.tensors.compose import Box, compose, full
from tpconvert.checkpoint.tensors.pieces import same_bytes
from tpconvert.checkpoint.tensors.store import Store, open_store, other_files
from tpconvert.errors import CheckpointError
from tpconvert.spec.manifest import NAME, Original
from tpconvert.spec.recipe import Recipe, Take, invert, takes

KEPT_APART = {NAME, "plan.json"}


class Weights:
    """The tensors of a module by its own names, each read from a store when asked."""

    def __init__(
        self,
        store: Store,
        recipes: Mapping[str, Recipe],
        *,
        tied: Mapping[str, str] | None = None,
        again: Mapping[str, str] | None = None,
        source: Mapping[str, Any] | None = None,
    ) -> None:
        self.store = store
        self.recipes = dict(recipes)
        """Module name -> how it is made of stored tensors."""
        self.tied = dict(tied or {})
        """Later names of a module tensor -> the name it is kept under."""
        self.again = dict(again or {})
        """Stored names of a second copy of a tied tensor -> the module name that stands for it."""
        self.source = {"fingerprint": store.fingerprint(), **(source or {})}
        for name, recipe in self.recipes.items():
            dtypes = {store.info(take.name)[1] for take in takes(recipe)}
            if len(dtypes) > 1:
                raise CheckpointError(
                    f"{name} is made of tensors of several dtypes: {_words(map(dtype_name, dtypes))}."
                )

    def names(self) -> list[str]:
        """The module's names, each tensor once."""
        return list(self.recipes)

    def info(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape, and dtype as stored."""
        recipe = self._recipe(name)
        return recipe.shape, self.store.info(takes(recipe)[0].name)[1]

    def read(self, name: str, start: int = 0, stop: int | None = None, dim: int = 0) -> Tensor:
        """Rows ``start`` to ``stop`` of ``dim``.  It may be a view of the file: clone it before changing it."""
        shape, _ = self.info(name)
        box = list(full(shape))
        if shape:
            box[dim] = (start, shape[dim] if stop is None else stop)
        return self.box(name, tuple(box))

    def box(self, name: str, box: Box) -> Tensor:
        """The elements of a box; a view of the file where it is stored as it is."""
        return compose(self._recipe(name), box, self.store.tensor).view(self.info(name)[1])

    def original(self) -> Original:
        """The files of the source, and how a merge makes each tensor in them."""
        recipes = invert(self.recipes)
        for stored, name in self.again.items():
            recipes[stored] = Take(name, self.recipes[name].shape)
        kept, left = other_files(self.store)
        extra = tuple(name for name in self.store.names() if name not in recipes)
        if self.store.pickled:  # second copies of tied tensors are an artefact of pickling
            recipes = {name: recipe for name, recipe in recipes.items() if name not in self.again}
            extra = tuple(name for name in extra if name not in self.again)
        return Original(
            files=self.store.original_files(dict.fromkeys((*recipes, *extra))),
            recipes=recipes,
            extra=extra,
            copied={name: _place(name) for name in kept if not (self.store.pickled and name.endswith(".index.json"))},
            left_out=tuple(left),
        )

    def _recipe(self, name: str) -> Recipe:
        name = self.tied.get(name, name)
        if name not in self.recipes:
            raise CheckpointError(f"The source has nothing for the module's tensor {name}.")
        return self.recipes[name]


def tie(weights: Weights, ties: Mapping[str, str]) -> Weights:
    """The same weights where ``ties`` (later name -> first name) are one tensor, kept under its first name.

    A source may store any of the names, or several; several must hold the same bytes.
    """
    recipes, again, tied = dict(weights.recipes), dict(weights.again), dict(weights.tied)
    for name, first in ties.items():
        first = tied.get(first, first)
        if name == first:
            continue
        tied[name] = first
        if name not in recipes:
            continue
        recipe = recipes.pop(name)
        if first not in recipes:
            recipes[first] = recipe
            continue
        if not same_bytes(weights.read(name), weights.read(first)):
            raise CheckpointError(
                f"{name} and {first} are one tensor in the module, but the source stores two with other values.",
                hint="Set tie_word_embeddings to false in its config, or remove the one that is not meant.",
            )
        if not isinstance(recipe, Take):
            raise CheckpointError(f"{name} is tied to {first}, but stored in parts; this is not supported.")
        again[recipe.name] = first
    return Weights(weights.store, recipes, tied=tied, again=again, source=weights.source)


def ties_of(module: nn.Module) -> dict[str, str]:
    """Later names of the module's parameters and buffers -> the first name of the same tensor."""
    first: dict[int, str] = {}
    out = {}
    tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    for name, tensor in tensors:
        if first.setdefault(id(tensor), name) != name:
            out[name] = first[id(tensor)]
    return out


def plain_weights(store: Store, *, prefix: str = "", tied: Mapping[str, str] | None = None, **source: Any) -> Weights:
    """The weights of a module whose names are the stored ones, after ``prefix``."""
    names = (name for name in store.names() if name.startswith(prefix))
    recipes = {name.removeprefix(prefix): Take(name, store.info(name)[0]) for name in names}
    return tie(Weights(store, recipes, source=source), tied or {})


def file_weights(path: Path, *, tied: Mapping[str, str] | None = None) -> Weights:
    """The weights of a file or folder whose names are the module's."""
    return plain_weights(open_store(path), tied=tied, name=str(path))


def tensor_weights(tensors: Mapping[str, Tensor], *, tied: Mapping[str, str] | None = None) -> Weights:
    """The weights of tensors in memory, which a merge writes as one ``model.safetensors``."""
    return plain_weights(Store({"model.safetensors": dict(tensors)}), tied=tied)


def module_weights(module: nn.Module) -> Weights:
    """The weights that a module holds now: its state dict."""
    tensors = {name: value.detach() for name, value in module.state_dict(keep_vars=True).items()}
    ties = {name: first for name, first in ties_of(module).items() if name in tensors}
    kept = {name: value for name, value in tensors.items() if name not in ties}
    return tensor_weights(kept, tied=ties)


def _place(name: str) -> str:
    """Where a copied file of the source goes: apart, if it would be taken for one of ours or an index of weights."""
    apart = name in KEPT_APART or name.startswith(("rank-", "source/")) or name.endswith(".index.json")
    return f"source/{name}" if apart else name


def _words(items: Iterable[str]) -> str:
    return ", ".join(sorted(items))
