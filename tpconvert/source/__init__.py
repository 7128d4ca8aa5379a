"""SOURCE, everywhere a model is named: a Hugging Face id, a folder, or a function of the user's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from tpconvert.errors import SourceError
from tpconvert.source.build.anew import Anew, anew
from tpconvert.source.callables import is_callable_name, open_callable
from tpconvert.source.huggingface import shrink
from tpconvert.source.huggingface.open import open_huggingface, skeleton
from tpconvert.source.source import Source

__all__ = ["Source", "open_skeleton", "open_source", "twin"]


def open_source(
    name: str,
    *,
    task: str | None = None,
    weights: str | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> Source:
    """The model that ``name`` stands for, without its weights in memory."""
    if is_callable_name(name):
        for option, given in (("--task", task), ("--revision", revision)):
            if given:
                raise SourceError(f"{option} is for Hugging Face models; {name} is a function.")
        source = open_callable(name, weights=weights)
    else:
        if weights:
            raise SourceError(f"--weights is for functions; {name} brings its own.")
        source = open_huggingface(name, task=task, trust_remote_code=trust_remote_code, revision=revision)
    versions = {"torch": torch.__version__, "tpconvert": version("tpconvert")}
    description = {"name": name, "inputs": _shapes(source.inputs)} | versions | source.description
    again = partial(
        open_source, name, task=task, weights=weights, trust_remote_code=trust_remote_code, revision=revision
    )
    return anew(replace(source, description=description), again)


def twin(source: Source) -> Source:
    """The source of a shrunk model of the same classes, with seeded weights; its notes say what became of what."""
    made = shrink.twin(source)
    return anew(made, partial(_twin_of, source.build.open)) if isinstance(source.build, Anew) else made


def _twin_of(opened: Callable[[], Source]) -> Source:
    return twin(opened())


def open_skeleton(name: str, *, task: str | None = None, trust_remote_code: bool = False) -> nn.Module:
    """The module alone, parameters on meta: what a converted one is made of where the plan is known already."""
    if is_callable_name(name):
        return open_source(name).module
    return skeleton(name, task=task, trust_remote_code=trust_remote_code)


def _shapes(inputs: Any) -> Any:
    """The inputs with ``int64[2, 13]`` in place of tensors."""
    if isinstance(inputs, torch.Tensor):
        return f"{str(inputs.dtype).removeprefix('torch.')}{list(inputs.shape)}"
    if isinstance(inputs, dict):
        return {k: _shapes(v) for k, v in inputs.items()}
    if isinstance(inputs, tuple | list):
        return [_shapes(v) for v in inputs]
    return inputs if isinstance(inputs, bool | int | float | str | None) else type(inputs).__name__
