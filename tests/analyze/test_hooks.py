"""Hooks of the user's own: they run once, and what they see is whole."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.analyze.test_edits import Heads, Literal
from tests.analyze.test_flow import cut
from tests.equal import difference
from tests.zoo.frame import Framed, floats, seeded
from tpconvert.analyze.capture.run import capture
from tpconvert.analyze.watch.hooks import sees_inputs, sees_outputs
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
    return backbone() if name == "backbone" else (hooked(name), {"x": floats(3, 7, 22)})


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


LIBRARY = """
from torch import nn

class Layer(nn.Linear):
    pass

def looks(module, args, output):
    return args[0]
"""


@pytest.mark.parametrize("place", ["purelib", "elsewhere"])
def test_hooks_that_the_installed_library_of_a_class_put_there_are_its_own(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hooking_library.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {place: str(tmp_path)})
    library = __import__("hooking_library")
    monkeypatch.setitem(sys.modules, "hooking_library", library)
    theirs, users = library.Layer(2, 2), library.Layer(2, 2)
    theirs.register_forward_hook(library.looks)
    users.register_forward_hook(squashed_with_inputs)
    assert (sees_inputs(theirs), sees_outputs(theirs)) == ((False, False) if place == "purelib" else (True, True))
    assert sees_inputs(users)
    assert sees_outputs(users)


@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_a_tool_of_torch_at_a_layer_of_torch_is_of_whoever_built_it() -> None:
    assert sees_inputs(torch.nn.utils.weight_norm(nn.Linear(2, 2)))


def backbone() -> tuple[nn.Module, dict[str, Tensor]]:
    """One whose forward hangs hooks at its attention, which would keep what it returns if that were asked for."""
    from transformers import VitPoseBackbone, VitPoseBackboneConfig

    config = VitPoseBackboneConfig(
        image_size=[16, 16], patch_size=[8, 8], hidden_size=24, num_hidden_layers=1, num_attention_heads=4
    )
    module = seeded(lambda: VitPoseBackbone(config))
    inputs = {"pixel_values": floats(2, 3, 16, 16)}
    module(**inputs)
    return module, inputs


def test_hooks_that_a_forward_hangs_at_its_own_layers_keep_nothing_whole(run_ranks: Callable[..., list[Any]]) -> None:
    module, inputs = backbone()
    attention = next(m for n, m in module.named_modules() if n.endswith("attention.attention"))
    assert attention._forward_hooks
    plan = make_plan(module, inputs, tp=2)
    assert {n.rpartition("attention.")[2] for n in cut(plan)} >= {"query.weight", "key.weight", "value.weight"}
    assert run_ranks(difference, 2, __name__, plan.dumps(), "backbone")[0] is None
