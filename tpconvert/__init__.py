"""Automatic tensor parallelism for any PyTorch model, proved equal.

The public names below are imported when they are first used, so that ``import tpconvert`` stays light::

    plan = tpconvert.make_plan(model, inputs, tp=2)
    tpconvert.parallelize(model, plan, tpconvert.make_mesh(tp=2, device="cuda"))
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "clip_grad_norm_": "tpconvert.parallel.grads.clip",
    "compile_layers": "tpconvert.parallel.compiled.layers",
    "cross_entropy": "tpconvert.parallel.layers.loss",
    "GraphedStep": "tpconvert.parallel.compiled.graphed",
    "inspect": "tpconvert.checkpoint",
    "load": "tpconvert.loading",
    "make_mesh": "tpconvert.parallel.comm.mesh",
    "make_plan": "tpconvert.planning",
    "merge": "tpconvert.checkpoint",
    "Mesh": "tpconvert.parallel.comm.mesh",
    "open_source": "tpconvert.source",
    "parallelize": "tpconvert.parallel.convert",
    "Plan": "tpconvert.spec.plan",
    "reshard": "tpconvert.checkpoint",
    "save": "tpconvert.train.saving.save",
    "shard": "tpconvert.checkpoint",
    "TPConvertError": "tpconvert.errors",
    "verify": "tpconvert.verify",
}

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tpconvert' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__


class _Package(ModuleType):
    """Keeps ``tpconvert.verify`` the function: importing a package of that name would put the package in its place."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
