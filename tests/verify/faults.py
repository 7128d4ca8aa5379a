"""Seeded faults: each is planted in a plan, in the converted module of each rank, or in the runtime."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import nn

from tests.parallel.same import columns, plan_of, rows
from tests.verify.disturbances import (
    Unjoined,
    attribute,
    buffer_whole,
    clip_counting_copies,
    clip_locally,
    dropping_always,
    forward_of,
    halves_swapped,
    last_logits_lost,
    last_word_lost,
    nudged,
    on_last_rank,
    parts_exchanged,
    scaled_gradient,
    scores_by_local_size,
    slopes_of_rank_0,
    stale_weight,
    summing_product,
    untied,
    words_shifted,
)
from tests.verify.frame import built, planned, proved
from tpconvert.parallel import Mesh
from tpconvert.spec.layout import Block, Layout
from tpconvert.spec.plan import Boundary, Plan
from tpconvert.verify import Result

Change = Callable[[Plan], Plan]


def unchanged(plan: Plan) -> Plan:
    """The plan as it is."""
    return plan


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, on the smallest model where it matters."""

    model: str
    plan: Change = unchanged
    disturb: Callable[[nn.Module, Mesh], None] | None = None
    patch: tuple[str, Any] | None = None
    """What of the runtime is replaced, and by what."""
    tp: int = 2


@cache
def base(model: str, tp: int) -> Plan:
    """The right plan: the planner's own, or one by hand where the planner would cut nothing."""
    return by_hand(tp) if model == "shares" else planned(model, tp)


def planted(mesh: Mesh, name: str, plan: str) -> Result | None:
    """What verify finds with the named fault, on one rank."""
    fault = FAULTS[name]
    with ExitStack() as stack:
        if fault.patch is not None:
            stack.enter_context(mock.patch(fault.patch[0], fault.patch[1]))
        return proved(mesh, fault.model, plan, fault.disturb)


# -- changes of a plan --------------------------------------------------------------------------------------------


def drop(kind: str, module: str) -> Change:
    """Without a boundary."""
    return lambda plan: replace(plan, boundaries=tuple(b for b in plan.boundaries if b is not the(plan, kind, module)))


def add(*boundaries: Boundary) -> Change:
    """With more boundaries before the others."""
    return lambda plan: replace(plan, boundaries=(*boundaries, *plan.boundaries))


def double(kind: str, module: str) -> Change:
    """With a boundary twice."""
    return lambda plan: replace(plan, boundaries=(*plan.boundaries, replace(the(plan, kind, module))))


def turn(kind: str, at: str, /, **fields: Any) -> Change:
    """With a boundary changed."""

    def change(plan: Plan) -> Plan:
        old = the(plan, kind, at)
        return replace(plan, boundaries=tuple(replace(b, **fields) if b is old else b for b in plan.boundaries))

    return change


def the(plan: Plan, kind: str, module: str) -> Boundary:
    """The one boundary of that kind at that module."""
    (found,) = (b for b in plan.boundaries if (b.kind, b.module) == (kind, module))
    return found


def verdict(*names: str, **fields: Any) -> Change:
    """With other verdicts for some tensors; each must differ from what it was."""

    def change(plan: Plan) -> Plan:
        assert all(replace(plan[n], **fields) != plan[n] for n in names)
        return replace(plan, verdicts=tuple(replace(v, **fields) if v.name in names else v for v in plan.verdicts))

    return change


def without_edit(module: str, attribute: str) -> Change:
    """Without an edit."""

    def change(plan: Plan) -> Plan:
        edits = tuple(e for e in plan.edits if (e.module, e.attribute) != (module, attribute))
        assert len(edits) == len(plan.edits) - 1
        return replace(plan, edits=edits)

    return change


def rewritten(op: str, instead: Callable[[dict[str, Any]], dict[str, Any]]) -> Change:
    """With the one node of that op in a rewritten forward replaced."""

    def change(plan: Plan) -> Plan:
        (rewrite,) = plan.rewrites
        assert sum(n["op"] == op for n in rewrite.nodes) == 1
        nodes = tuple(instead(n) if n["op"] == op else n for n in rewrite.nodes)
        return replace(plan, rewrites=(replace(rewrite, nodes=nodes),))

    return change


def identity(node: dict[str, Any]) -> dict[str, Any]:
    """A node that gives its argument."""
    return {"name": node["name"], "op": "call", "target": "torch.Tensor.view_as", "args": node["args"] * 2}


def first_half(node: dict[str, Any]) -> dict[str, Any]:
    """A node that gives every rank the part of rank 0."""
    return {"name": node["name"], "op": "call", "target": "torch.Tensor.narrow", "args": [*node["args"], 0, 0, 6]}


def chain(*changes: Change) -> Change:
    """One change after the other."""

    def change(plan: Plan) -> Plan:
        for each in changes:
            plan = each(plan)
        return plan

    return change


def by_hand(tp: int, model: str = "shares") -> Plan:
    """The hidden features cut, in a model whose planner leaves them whole."""
    module, _ = built(model)
    cut = {"core.up.weight": rows(84), "core.up.bias": rows(84), "core.down.weight": columns(84)}
    boundaries = [Boundary("copy", "norm", "output", ("",)), Boundary("reduce", "core.down", "output", ("",))]
    if model == "shares":
        boundaries.append(Boundary("scatter", "core.weights", "output", ("",), dim=0, blocks=(Block(84),)))
    return plan_of(module, tp, cut, {"core.down.bias": {"once": True}}, boundaries=tuple(boundaries))


CONTIGUOUS = Layout(0, (Block(168),))
DOWN = "core.down"
HALVES = (Block(30), Block(30))
LINEAR, SCATTER = "tpconvert.parallel.layers.linear", "tpconvert.parallel.calls.boundaries.scatter"
CLIP = "tpconvert.verify.compare.checks.clip_grad_norm_"

FAULTS: dict[str, Fault] = {
    # copies
    "a copy dropped": Fault("gated_mlp_bias", drop("copy", "core")),
    "the copy before the head dropped": Fault("gated_mlp_bias", drop("copy", "head")),
    "the copy of the model's input dropped": Fault("mlp", drop("copy", "0")),
    "a copy twice": Fault("gated_mlp_bias", double("copy", "core")),
    "a copy on a value that is also used whole": Fault(
        "gated_mlp_bias", turn("copy", "core", module="inp", side="output", slots=("",))
    ),
    "a copy before the norm instead of after": Fault(
        "gated_mlp_bias", turn("copy", "core", module="norm")
    ),
    "a copy for the first call only": Fault("called_twice", turn("copy", "core.layer", call=0)),
    "a copy's span one short at its end": Fault("latent_attention", turn("copy", "core.kv_a", span=(16, 19))),
    "a copy's span one short at its start": Fault("latent_attention", turn("copy", "core.kv_a", span=(17, 20))),
    "a copy's span one too long": Fault("latent_attention", turn("copy", "core.kv_a", span=(15, 20))),
    "the router's copy dropped": Fault("soft_moe", drop("copy", "core.router")),
    "one expert's copy dropped": Fault("soft_moe", drop("copy", "core.experts.2")),
    "a copy dropped in a rewritten forward": Fault("inline", rewritten("copy", identity)),
    # reduces
    "a reduce dropped": Fault("gated_mlp_bias", drop("reduce", DOWN)),
    "a reduce twice": Fault("gated_mlp_bias", double("reduce", DOWN)),
    "a reduce after the residual": Fault(
        "gated_mlp_bias", turn("reduce", DOWN, module="head", side="input", slots=("args.0",))
    ),
    "one expert reduced twice": Fault("soft_moe", add(Boundary("reduce", "core.experts.1.down", "output", ("",)))),
    "the first of two reduces dropped": Fault("mlp_tied_pair", drop("reduce", "core.a.2")),
    "a reduce dropped in a rewritten forward": Fault("inline", rewritten("reduce", identity)),
    "the embedding's reduce dropped": Fault("vocab_odd", disturb=attribute("embed", tp_sums=False)),
    "a convolution's reduce dropped": Fault("conv_mixer", drop("reduce", "mix")),
    "a reduce that sums its gradient too": Fault("gated_mlp", patch=(f"{LINEAR}.summed_product", summing_product)),
    # biases of rows
    "a row bias added tp times": Fault("gated_mlp_bias", verdict("core.down.bias", once=False)),
    "a row bias's gradient divided": Fault("gated_mlp_bias", disturb=scaled_gradient("core.down.bias")),
    # fused weights
    "segments of a fused weight in the wrong order": Fault("fused_gated_mlp", disturb=halves_swapped),
    "a contiguous cut of a fused weight": Fault(
        "fused_gated_mlp", verdict("core.gate_up.weight", "core.gate_up.bias", layout=CONTIGUOUS)
    ),
    "a fused bias alone cut contiguously": Fault("fused_gated_mlp", verdict("core.gate_up.bias", layout=CONTIGUOUS)),
    "heads that hold q, k, v each read as three segments": Fault(
        "fused_per_head", verdict("core.qkv.weight", "core.qkv.bias", layout=rows((12, 5), (12, 5), (12, 5)))
    ),
    "interleaved gate and up read as halves": Fault(
        "interleaved_gated_mlp", verdict("core.gate_up.weight", "core.gate_up.bias", layout=rows(84, 84))
    ),
    "columns dealt unlike the rows before them": Fault(
        "gated_mlp", verdict("core.down.weight", layout=columns(42, 42))
    ),
    # vocabulary
    "the vocabulary's offset off by one": Fault("vocab_odd", disturb=words_shifted),
    "the last word lost": Fault("vocab_odd", disturb=last_word_lost),
    "the last logits lost": Fault("vocab_odd", drop("gather", "head"), forward_of("head", last_logits_lost)),
    "the logits left cut": Fault("tied_padding", drop("gather", "head")),
    "pieces of a gather in the wrong order": Fault("tied_padding", turn("gather", "head", blocks=HALVES)),
    "a padding word that is trained": Fault("tied_padding", disturb=attribute("embed", padding_idx=None)),
    "a padding word counted from the rank's rows": Fault("tied_padding", disturb=attribute("embed", padding_idx=15)),
    "a tied weight split in two": Fault("tied_padding", disturb=untied),
    # per-head values
    "computed ALiBi without the rank's offset": Fault("alibi_computed", rewritten("scatter", first_half)),
    "ALiBi slopes of the first rank everywhere": Fault("alibi_buffer", disturb=slopes_of_rank_0),
    "a buffer not cut": Fault("sliced", disturb=buffer_whole),
    "a relative bias of the wrong heads": Fault("relative_bias", verdict("core.bias.weight", layout=columns(6, 6))),
    "an attention scale from a local size": Fault("attention", disturb=forward_of("core", scores_by_local_size)),
    "an edit missing where shapes still fit": Fault("grouped", without_edit("core", "groups")),
    # gradients of whole and of shared parameters
    "sum_grad missing on a per-head norm": Fault("head_norms", verdict("core.q_norm.weight", sum_grad=False)),
    "sum_grad missing on a router": Fault("stacked_moe", verdict("core.router", sum_grad=False)),
    "sum_grad missing on a row's scale": Fault("scaled_linear", verdict("core.down.scale", sum_grad=False)),
    "sum_grad missing on a convolution": Fault("conv_mixer", verdict("mix.weight", sum_grad=False)),
    "sum_grad where it must not be": Fault("gated_mlp", verdict("norm.weight", sum_grad=True)),
    "gradients of a shared key head not summed": Fault("gqa_few", verdict("core.k.weight", sum_grad=False), tp=4),
    "gradients of a shared value's bias not summed": Fault("gqa_few", verdict("core.v.bias", sum_grad=False), tp=4),
    "scatter backward without joining": Fault("shares", patch=(SCATTER, Unjoined.apply)),
    "gradients divided by tp": Fault("gated_mlp", disturb=scaled_gradient()),
    "a parameter frozen by mistake": Fault(
        "gated_mlp", disturb=lambda module, mesh: module.norm.bias.requires_grad_(False)
    ),
    "a parameter trained by mistake": Fault(
        "frozen", disturb=lambda module, mesh: module.core.up.bias.requires_grad_(True)
    ),
    # replicas and parts
    "one replica unequal": Fault("gated_mlp", disturb=on_last_rank("norm.weight", nudged)),
    "one replica of an idle parameter unequal": Fault("frozen", disturb=on_last_rank("core.idle", nudged)),
    "one replica of a shared key head unequal": Fault("gqa_few", disturb=on_last_rank("core.k.weight", nudged), tp=4),
    "one replica of a buffer unequal": Fault("rotary", disturb=on_last_rank("core.cos", nudged)),
    "ranks that hold one another's parts": Fault("gated_mlp", disturb=parts_exchanged),
    "a part rounded to bfloat16": Fault(
        "gated_mlp", disturb=on_last_rank("core.up.weight", lambda t: t.bfloat16().to(t.dtype))
    ),
    # training
    "a clipping norm that counts whole parameters tp times": Fault(
        "gated_mlp", patch=(CLIP, clip_counting_copies)
    ),
    "a clipping norm of one rank": Fault(
        "gated_mlp", patch=(CLIP, clip_locally)
    ),
    "a layer that does not see its weight change": Fault(
        "gated_mlp_bias", disturb=forward_of("core.up", stale_weight)
    ),
    "dropout left on": Fault("dropping", disturb=forward_of("core.outer", dropping_always)),
    "dropout lost": Fault("dropping", disturb=attribute("core.outer", p=0.0)),
    "ranks that draw unlike numbers for a whole value": Fault(
        "dropping", lambda plan: replace(plan, switches=tuple(s for s in plan.switches if s.cut))
    ),
    "a forward that errs in training only": Fault(
        "gated_mlp", disturb=forward_of("core", lambda old, m, x: old(x) * (1 + 1e-6 * m.training))
    ),
    "a forward that errs without gradients only": Fault(
        "gated_mlp", disturb=forward_of("core", lambda old, m, x: old(x) * (1 + 1e-3 * (not torch.is_grad_enabled())))
    ),
    "running statistics that stand still": Fault("conv_net", disturb=attribute("bn2", momentum=0.0)),
    # statistics
    "norm statistics over a cut width": Fault("hand_norm", lambda plan: by_hand(plan.tp, "hand_norm")),
    "a norm with another epsilon": Fault("gated_mlp", disturb=attribute("norm", eps=1e-4)),
    # outputs
    "an output missing": Fault("dict_output", disturb=forward_of("", lambda old, m, x: {"logits": old(x)["logits"]})),
    "an output too many": Fault("dict_output", disturb=forward_of("", lambda old, m, x: old(x) | {"more": x})),
    "outputs of another type": Fault("tuple_output", disturb=forward_of("", lambda old, m, x: list(old(x)))),
    "an output that is not a number": Fault(
        "gated_mlp", disturb=forward_of("", lambda old, m, x: old(x).masked_fill(torch.arange(10) == 3, float("nan")))
    ),
}  # fmt: skip
