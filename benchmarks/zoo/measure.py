"""What is found of one model type: built, planned, equal."""

from __future__ import annotations

import gc
import re
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Tell = Callable[[dict[str, Any]], None]
TP = 2
GATHERED = ("*=gathered",)
"""Layers that no axis runs through are cut by themselves."""
LONG = 8.0
"""CPU seconds: what takes longer to build, plan and check at tp=2 is not planned for at further degrees."""


def measure(model_type: str, tell: Tell, keep: Path | None = None, degrees: Sequence[int] = ()) -> None:
    """Tell step by step what is found; each telling adds to or replaces those before.

    With ``keep``, the module, its inputs and its plan are left in that file for real ranks.  ``degrees`` are further
    ones that are planned for and emulated.
    """
    from benchmarks.zoo import facts
    from benchmarks.zoo.build import NotBuiltError, build
    from benchmarks.zoo.named import never_named
    from benchmarks.zoo.reach import untouched
    from tpconvert.analyze.trace.copies import copied
    from tpconvert.errors import TPConvertError
    from tpconvert.planning import make_plan

    tell({"type": model_type, "stage": "build"})
    start, began = time.monotonic(), time.process_time()
    try:
        built = build(model_type)
    except NotBuiltError as error:
        return tell({"outcome": "not built", "why": str(error)})
    module, inputs = built.module, built.inputs
    tell(
        {
            "class": type(module).__name__,
            "by": built.by,
            "parameters": sum(p.numel() for p in module.parameters()),
            "inputs": sorted(n for n, v in inputs.items() if hasattr(v, "shape")),
            "build_s": round(time.monotonic() - start, 1),
            "stage": "plan",
        }
    )
    tell({"untouched": untouched(module, inputs)})
    linear = facts.linear_like(module)
    start = time.monotonic()
    try:
        plan = make_plan(copied(module), inputs, tp=TP, overrides=GATHERED)
    except TPConvertError as error:
        return tell({"outcome": "refused", "why": f"{type(error).__name__}: {error}"})
    except Exception as error:
        return tell(crashed(error, "plan"))
    linear_ones = [v for v in plan.verdicts if v.name in linear and not v.tied_to]
    reached = [v for v in linear_ones if facts.UNUSED not in v.reason]
    found = {"linear_cut": _share(linear_ones), "linear_cut_reached": _share(reached)}
    unused = {v.name for v in linear_ones if facts.UNUSED in v.reason}
    never = sorted({folded(name) for name in never_named(module, unused)})
    tell(_of_plan(plan) | found | {"linear_whole": _left_whole(linear_ones), "linear_never": never})
    tell(facts.agreement(module, inputs, plan))
    tell({"linear_cut_default": _share_by_default(module, inputs, linear)})
    tell({"plan_s": round(time.monotonic() - start, 1), "stage": "emulate"})
    kept = keep is not None and _kept(module, inputs, plan, keep)
    start = time.monotonic()
    tell(_emulated(module, inputs, plan))
    tell({"emulate_s": round(time.monotonic() - start, 1), "stage": "merge"})
    tell({"way_back": facts.way_back(module, plan), "stage": "degrees"})
    if time.process_time() - began < LONG:
        tell({"degrees": {tp: _at_degree(module, inputs, tp) for tp in degrees}, "stage": "export"})
        tell({"export": _exported(module, inputs)})
    tell({"stage": "done"})
    if keep is not None and not kept:
        tell({"ranks": _on_forked_ranks(module, inputs, plan)})


def _share_by_default(module: Any, inputs: Any, linear: Any) -> float | None:
    """The share of Linear weights that a plan without options cuts."""
    from tpconvert.analyze.trace.copies import copied
    from tpconvert.planning import make_plan

    try:
        plan = make_plan(copied(module), inputs, tp=TP)
    except Exception:  # told by the plan that is compared
        return None
    return _share([v for v in plan.verdicts if v.name in linear and not v.tied_to])


def _at_degree(module: Any, inputs: Any, tp: int) -> dict[str, Any]:
    """The share of matrices cut, and whether equal, at another degree."""
    from tpconvert.analyze.trace.copies import copied
    from tpconvert.errors import TPConvertError
    from tpconvert.planning import make_plan

    try:
        plan = make_plan(copied(module), inputs, tp=tp, overrides=GATHERED)
    except TPConvertError as error:
        return {"outcome": "refused", "why": f"{type(error).__name__}: {error}"}
    except Exception as error:
        return crashed(error, "plan")
    found = {k: v for k, v in _of_plan(plan).items() if k in ("cut", "matrices_cut")} | _emulated(module, inputs, plan)
    return {k: v for k, v in found.items() if k in ("cut", "matrices_cut", "outcome", "why")}


def _exported(module: Any, inputs: Any) -> dict[str, Any]:
    """Whether ``torch.export`` sees the same parameters flow into each other."""
    from benchmarks.zoo.exported import disagreement

    try:
        found = disagreement(module, inputs)
    except Exception as error:
        return crashed(error, "export")
    if found is None:
        return {"outcome": "no export"}
    return {"outcome": "differs", "why": found[:6]} if found else {"outcome": "agrees"}


def _kept(module: Any, inputs: Any, plan: Any, path: Path) -> bool:
    """Whether a module could be written to a file; those with hooks that are closures cannot."""
    import torch

    try:
        torch.save((module, inputs, plan.dumps()), path)
    except Exception:
        path.unlink(missing_ok=True)
        return False
    return True


def _on_forked_ranks(module: Any, inputs: Any, plan: Any) -> dict[str, Any]:
    """What real ranks find that are forked off this process, and so need no file."""
    from tpconvert.source import Source
    from tpconvert.verify.run import verify

    start = time.monotonic()
    source = Source(name="", module=module, inputs=inputs, build=lambda: module, weights=lambda: None)  # type: ignore
    try:
        found = of_result(verify(source, plan))
    except Exception as error:
        found = {"outcome": "crashed", "why": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    return found | {"seconds": round(time.monotonic() - start, 1)}


def crashed(error: BaseException, stage: str) -> dict[str, Any]:
    """The outcome of an exception that nobody expected."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "/tpconvert/" in f.filename]
    where = [f"{Path(f.filename).name}:{f.lineno} in {f.name}" for f in [*ours[-2:], frames[-1]]] if frames else []
    text = str(error).strip().splitlines()
    return {
        "outcome": "crashed",
        "stage": stage,
        "why": f"{type(error).__name__}: {text[0][:300] if text else ''}",
        "where": list(dict.fromkeys(where)),
    }


def _of_plan(plan: Any) -> dict[str, Any]:
    own = [v for v in plan.verdicts if v.kind == "parameter" and not v.tied_to]
    matrices = [v for v in own if len(v.shape) >= 2]
    whole = [v for v in own if not v.layout.cut]
    reasons = Counter(folded(v.reason) for v in whole)
    examples = {folded(v.reason): f"{v.name} {list(v.shape)}" for v in whole}
    return {
        "cut": _share(own),
        "matrices_cut": _share(matrices),
        "whole": [[reason, n, examples[reason]] for reason, n in reasons.most_common(12)],
        "rewrites": [f"{r.module}: {folded(r.reason)}" for r in plan.rewrites],
        "notes": list(plan.notes)[:8],
        "patterns": dict(Counter(v.pattern for v in own if v.pattern)),
    }


def _left_whole(verdicts: list[Any]) -> list[list[Any]]:
    """``[name with * for numbers, shape, reason]`` of those that stay whole, each once."""
    found = {folded(v.name): [list(v.shape), v.reason] for v in reversed(verdicts) if not v.layout.cut}
    return [[name, *rest] for name, rest in reversed(found.items())][:12]


def _share(verdicts: list[Any]) -> float:
    total = sum(_size(v) for v in verdicts)
    return round(sum(_size(v) for v in verdicts if v.layout.cut) / total, 6) if total else 1.0


def _size(verdict: Any) -> int:
    size = 1
    for n in verdict.shape:
        size *= n
    return size


def folded(reason: str) -> str:
    """A reason without the numbers in it."""
    return re.sub(r"\d+", "*", reason)


def _emulated(module: Any, inputs: Any, plan: Any) -> dict[str, Any]:
    from tpconvert.analyze.trace.copies import copied
    from tpconvert.errors import TPConvertError, VerifyError
    from tpconvert.verify.run import emulate_module

    gc.collect()  # graphs of the plan hang in cycles, and hold the values of all their ops
    try:
        return of_result(emulate_module(copied(module), inputs, plan))  # it perturbs, in another precision
    except VerifyError as error:
        return {"outcome": "not equal", "why": f"VerifyError: {error}"}
    except TPConvertError as error:
        return {"outcome": "crashed", "stage": "emulate", "why": f"{type(error).__name__}: {error}"}
    except Exception as error:
        return crashed(error, "emulate")


def of_result(result: Any) -> dict[str, Any]:
    """Equal or not, and the worst checks."""
    kinds = Counter(c.kind for c in result.checks)
    worst = [[c.kind, c.name, c.mode, c.error] for c in result.worst(3)]
    found = {"checks": dict(kinds), "worst": worst, "bound": result.tolerance.bound, "parted": result.parted}
    if result.equal:
        return found | {"outcome": "equal"}
    return found | {"outcome": "undecided" if result.undecided else "not equal", "why": result.verdict()}
