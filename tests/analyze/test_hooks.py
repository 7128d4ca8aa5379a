"""Hooks of the user's own: they run once, and what they see is whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.analyze.test_edits import Heads, Literal
from tests.analyze.test_flow import cut
from tests.equal import difference
from tests.zoo.frame import Framed, floats, seeded
from tpconvert.analyze.capture.run import capture
from tpconvert.analyze.watch.hooks import sees_inputs
from tpconvert.parallel import dry_mesh, parallelize
from tpconvert.planning import make_plan


def squashed(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return torch.tanh(output)


def squashed_with_inputs(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return torch.tanh(output + 0 * args[0].mean())


def squashed_before(module: nn.Module, args: Any) -> Any:
    return tuple(map(torch.tanh, args))


INNER, OUTER = "core.qkv.weight", "core.out.weight"
CASES: dict[str, tuple[type[nn.Module], str, str, Any, set[str]]] = {
    # the class of the core, where the hook is, what it is, which of the core's weights are cut
    "after a sum": (Heads, "core.out", "output", squashed, {INNER, OUTER}),
    "after parts": (Heads, "core.qkv", "output", squashed, set()),
    "after a sum, of parts": (Heads, "core.out", "output", squashed_with_inputs, set()),
    "before parts": (Heads, "core.out", "input", squashed_before, set()),
    "before a copy": (Heads, "core.qkv", "input", squashed_before, {INNER, OUTER}),
    "after a written forward": (Literal, "core", "output", squashed, {INNER, OUTER}),
    "before a written forward": (Literal, "core", "input", squashed_before, {INNER, OUTER}),
    "in a forward to be written": (Literal, "core.out", "output", squashed, set()),
    "after the model": (Literal, "", "output", squashed, {INNER, OUTER}),
}


def hooked(name: str) -> nn.Module:
    core, path, side, hook, _ = CASES[name]
    module = seeded(lambda: Framed(core(22), 22))
    at = module.get_submodule(path)
    if side == "input":
        at.register_forward_pre_hook(hook)
    else:
        at.register_forward_hook(hook)
    return module


def built(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    return hooked(name), {"x": floats(3, 7, 22)}


@pytest.mark.parametrize("name", CASES)
def test_a_model_with_a_hook_is_equal(name: str, run_ranks: Callable[..., list[Any]]) -> None:
    plan = make_plan(*built(name), tp=2)
    assert cut(plan) & {INNER, OUTER} == CASES[name][-1]
    assert run_ranks(difference, 2, __name__, plan.dumps(), name)[0] is None


def by_locals(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * len(vars()["args"])


def by_text(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * eval("len(args)")  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("hook", "looks"), [(squashed, False), (squashed_with_inputs, True), (by_locals, True), (by_text, True)]
)
def test_a_hook_that_can_reach_the_inputs_without_naming_them_is_taken_to_look(hook: Any, looks: bool) -> None:
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(hook)
    assert sees_inputs(layer) is looks


def test_what_hooks_do_is_the_callers_and_they_see_it_once() -> None:
    module = hooked("after a written forward")
    module.core.register_forward_pre_hook(squashed_before)
    trace = capture(module, {"x": floats(3, 7, 22)})
    where = [n.meta["call"].module for n in trace.nodes if n.meta["op"] == "tanh"]
    assert where == ["", ""]
    seen: list[Tensor] = []
    module.core.register_forward_hook(lambda module, args, output: seen.append(output))
    plan = make_plan(module, {"x": floats(3, 7, 22)}, tp=2)
    assert [r.module for r in plan.rewrites] == ["core"]
    seen.clear()
    parallelize(module, plan, dry_mesh(0, 2))(floats(3, 7, 22))
    assert len(seen) == 1
