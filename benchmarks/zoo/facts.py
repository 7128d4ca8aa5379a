"""What is asked of a plan beside equality: which cut weights are Linear, what transformers cuts, and the way back."""

from __future__ import annotations

import hashlib
import re
import tempfile
from pathlib import Path
from typing import Any

from torch import nn

from benchmarks.zoo.exchanged import no_dearer

CONVOLUTIONS = (nn.modules.conv._ConvNd,)
UNUSED = "the traced forward does not use it"
DIMS = {"colwise": 0, "rowwise": 1}
"""The dim of an ``nn.Linear`` weight that transformers cuts, by the first word of its style."""


def linear_like(module: nn.Module) -> set[str]:
    """Names of the weights of Linear and transformers' Conv1D modules, and of the 3-D weights of experts."""
    found = set()
    for prefix, part in module.named_modules():
        for name, parameter in part.named_parameters(recurse=False):
            flat = parameter.dim() == 2 and name == "weight" and type(part).__name__.endswith(("Linear", "Conv1D"))
            stored = parameter.dim() == 3 and min(parameter.shape) > 1 and "position" not in name  # no table of places
            experts = stored and not isinstance(part, CONVOLUTIONS) and not name.startswith("original")
            if flat or experts:
                found.add(f"{prefix}.{name}" if prefix else name)
    return found


def agreement(module: nn.Module, inputs: Any, plan: Any) -> dict[str, Any]:
    """Of the weights that transformers' own plan cuts: how many are cut along the same dim, another, and not at all.

    And how many of those along another send no more for it (:mod:`benchmarks.zoo.exchanged`), and how many are cut here
    that it leaves whole.
    """
    styles = {k: str(v) for k, v in (getattr(module, "tp_plan", None) or {}).items() if _dim(str(v)) is not None}
    counts = {"same": 0, "other": 0, "whole": 0}
    differ: dict[str, str] = {}
    known: dict[str, str] = {}
    other: list[str] = []
    more = 0
    linear = linear_like(module)
    for verdict in plan.verdicts:
        place = verdict.name.removesuffix(".weight")
        style = next((v for k, v in styles.items() if re.fullmatch(_pattern(k), place)), None)
        if verdict.name not in linear or len(verdict.shape) != 2 or verdict.tied_to or UNUSED in verdict.reason:
            continue
        if style is None:
            more += verdict.layout.cut
            continue
        kind = "whole" if not verdict.layout.cut else "same" if verdict.layout.dim == _dim(style) else "other"
        counts[kind] += 1
        known[verdict.name] = style
        other += [verdict.name] if kind == "other" else []
        if kind != "same":
            differ.setdefault(re.sub(r"\d+", "*", verdict.name), f"{verdict.reason} (theirs: {style})")
    found: dict[str, Any] = {"theirs": counts, "theirs_differ": list(differ.items())[:6], "more_than_theirs": more}
    if other:
        cheap = no_dearer(module, inputs, plan, known)
        found["theirs_no_cheaper"] = sum(cheap.get(name, False) for name in other)
    return found if sum(counts.values()) else {}


def _dim(style: str) -> int | None:
    return next((dim for word, dim in DIMS.items() if word in style and "embedding" not in style), None)


def _pattern(key: str) -> str:
    return rf"(.*\.)?{re.escape(key)}".replace(r"\*", r"\d+")


def way_back(module: Any, plan: Any) -> str:
    """Whether a saved checkpoint that is sharded and merged comes back byte for byte: ``identical``, or what is not."""
    from tpconvert.checkpoint import merge, shard
    from tpconvert.source.huggingface.conversion import hf_weights

    with tempfile.TemporaryDirectory(prefix="coverage-") as scratch:
        folder = Path(scratch) / "saved"
        try:
            module.save_pretrained(folder)
        except Exception as error:  # transformers checks a configuration anew when it is saved
            return f"not saved: {type(error).__name__}: {error}".splitlines()[0][:300]
        try:
            shard(hf_weights(folder, module), plan, Path(scratch) / "ranks")
            merge(Path(scratch) / "ranks", Path(scratch) / "back")
        except Exception as error:
            return f"{type(error).__name__}: {error}".splitlines()[0][:300]
        saved, back = _hashes(folder), _hashes(Path(scratch) / "back")
        differ = sorted(n for n in saved.keys() | back.keys() if saved.get(n) != back.get(n))
        return f"differs: {differ[0]}" if differ else "identical"


def _hashes(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.glob("*.safetensors*")}
