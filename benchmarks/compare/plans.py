"""The plans of all cases, made at once in processes of their own."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from benchmarks.compare import models
from benchmarks.compare.case import Case
from benchmarks.compare.processes import CONTEXT
from tpconvert import make_plan

Key = tuple[str, int, float, int]


def key(case: Case) -> Key:
    """What a plan depends on."""
    return case.model, case.layers, case.width, case.tp


def make_plans(cases: Iterable[Case], toy: bool, workers: int) -> Mapping[Key, tuple[str, float]]:
    """``(plan, seconds it took)`` of each converted case."""
    wanted = list(dict.fromkeys(key(c) for c in cases if c.way == "converted"))
    with ProcessPoolExecutor(max(min(workers, len(wanted)), 1), mp_context=CONTEXT) as pool:
        return dict(zip(wanted, pool.map(_made, wanted, [toy] * len(wanted)), strict=True))


def _made(wanted: Key, toy: bool) -> tuple[str, float]:
    began = time.monotonic()
    return make_plan_text(*wanted, toy), time.monotonic() - began


def make_plan_text(kind: str, layers: int, width: float, tp: int, toy: bool) -> str:
    """The plan of a model, as JSON."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    config: Any = models.config_of(kind, layers, width, toy)
    return make_plan(models.skeleton_of(kind, config), models.example_of(kind, config), tp=tp).dumps()
