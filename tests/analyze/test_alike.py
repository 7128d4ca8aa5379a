"""Two forwards that were recorded of one module: alike, alike but for what they check, or not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tpconvert.analyze.rewrite.alike import same_forward, stricter
from tpconvert.spec.plan import Rewrite


def rewrite(*checks: str, prefix: str = "t", target: str = "torch.Tensor.relu") -> Rewrite:
    """``relu(x)``, and before it a check of a size for each text."""
    nodes: list[dict[str, Any]] = []
    for says in checks:
        size, asked = (f"{prefix}{len(nodes) + i}" for i in range(2))
        nodes.append({"name": size, "op": "size", "args": [{"$": "args.0"}, 1]})
        nodes.append(
            {"name": asked, "op": "check", "target": "operator.eq", "args": [{"$": size}, 1],
             "value": False, "says": says}
        )  # fmt: skip
    nodes.append({"name": f"{prefix}out", "op": "call", "target": target, "args": [{"$": "args.0"}], "kwargs": {}})
    return Rewrite("layer", "why", {"args.0": "tensor"}, tuple(nodes), {"$": f"{prefix}out"})


def test_names_do_not_matter_and_all_else_does() -> None:
    assert same_forward(rewrite("a"), rewrite("a", prefix="other"))
    assert not same_forward(rewrite("a"), rewrite())
    assert not same_forward(rewrite(), rewrite(target="torch.Tensor.tanh"))
    assert not same_forward(rewrite(), replace(rewrite(), signature={"args.0": "tensor", "args.1": {"const": None}}))


@pytest.mark.parametrize("swap", [False, True])
def test_of_two_that_differ_in_checks_the_stricter_one_is_for_both(swap: bool) -> None:
    few, many = rewrite("a"), rewrite("b", "a", prefix="other")
    assert stricter(*((many, few) if swap else (few, many))) is many
    assert stricter(rewrite("a"), rewrite("b")) is None
    assert stricter(rewrite("a", "a"), rewrite("a", "b")) is None
    assert stricter(few, rewrite("b", "a", target="torch.Tensor.tanh")) is None
