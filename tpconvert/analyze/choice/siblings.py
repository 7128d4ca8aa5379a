"""Parameters and modules that the traced forward did not reach, which are treated as their siblings are."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import nn

from tpconvert.spec.plan import Plan


def with_moved(plan: Plan, moved: dict[str, str], idle: set[str]) -> Plan:
    """The boundaries, edits and rewrites of a traced module, again for its sibling among those that were ``idle``."""
    roots = {_roots(new, old) for new, old in moved.items() if new != old}

    def again(items: Iterable[Any]) -> list[Any]:
        out = []
        for item in items:
            out.append(item)
            for new, old in roots:
                module = new + item.module[len(old) :]
                if (item.module == old or item.module.startswith(f"{old}.")) and module in idle:
                    out.append(replace(item, module=module))
        return out

    return replace(
        plan,
        boundaries=tuple(again(plan.boundaries)),
        edits=tuple(again(plan.edits)),
        rewrites=tuple(again(plan.rewrites)),
        switches=tuple(again(plan.switches)),
    )


def _roots(new: str, old: str) -> tuple[str, str]:
    """The shortest prefixes of two paths that hold their difference."""
    a, b = new.split("."), old.split(".")
    at = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
    return ".".join(a[: at + 1]), ".".join(b[: at + 1])


def wild(name: str) -> str:
    """A name without its numbers."""
    return re.sub(r"\d+", "*", name)


def one_number_apart(a: str, b: str) -> bool:
    """Whether two names differ in one of their parts."""
    return sum(x != y for x, y in zip(a.split("."), b.split("."), strict=True)) == 1


def same_class(root: nn.Module, a: str, b: str) -> bool:
    """Whether the modules of two parameters are of one class."""
    return type(root.get_submodule(a.rpartition(".")[0])) is type(root.get_submodule(b.rpartition(".")[0]))
