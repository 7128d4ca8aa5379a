"""``tp_plan``: the dict by which transformers cuts a model, written from a plan, and read to be compared with one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from tpconvert.errors import PlanError
from tpconvert.formats.dealt import Dealt
from tpconvert.formats.express import Abilities, Expressed, folded
from tpconvert.formats.layerwise import Style

NAMES: dict[Style, str] = {
    "column": "colwise",
    "column-gathered": "colwise_gather_output",
    "packed-column": "packed_colwise",
    "row": "rowwise",
    "vocabulary": "embedding_rowwise",
    "sum-grad": "replicated_with_grad_allreduce",
    "experts": "moe_tp_experts",
    "parts": "local_params",
    "segment": "mla_kv_a_proj",
    "rows": "colwise",
    "packed-rows": "packed_colwise",
    "features": "rowwise",
    "lent": "colwise",
}

WHOLE = "replicate"

CUTS = {
    "colwise": (-2, False),
    "colwise_gather_output": (-2, False),
    "colwise_rep": (-2, False),
    "rowwise": (-1, False),
    "rowwise_split_input": (-1, False),
    "rowwise_rep": (-1, False),
    "packed_colwise": (-2, True),
    "packed_rowwise": (-1, True),
    "embedding_rowwise": (0, False),
    "embedding_colwise": (1, False),
}
"""Style -> the dim that it cuts (the only one of a tensor of one dim), and whether it cuts both halves."""

WHOLES = frozenset(
    [
        "replicate", "replicated_with_grad_allreduce", "all_reduce", "sequence_parallel", "mla_kv_a_proj",
        "moe_tp_experts", "moe_identity_expert", "local_params",
    ]
)  # fmt: skip
"""Styles that cut no parameter."""

SUMMING = "replicated_with_grad_allreduce"


def abilities(module: nn.Module) -> Abilities:
    """What a ``tp_plan`` can say of a module of transformers; PlanError for any other."""
    own_tp_plan(module)
    return Abilities("a tp_plan of transformers", frozenset(NAMES), alike=True, segments=_segments(module))


def tp_plan(module: nn.Module, expressed: Expressed) -> dict[str, str]:
    """The dict for ``DistributedConfig(tp_plan=...)``: module and parameter patterns -> styles.

    transformers adds a plan to the model's own one, so what that cuts and this does not is named as whole.
    """
    plan = {folded(name): NAMES[style] for name, style in expressed.styles.items()}
    return plan | {pattern: WHOLE for pattern in own_tp_plan(module) if pattern not in plan}


def own_tp_plan(module: nn.Module) -> dict[str, str]:
    """The plan a model of transformers brings along, which may be empty; PlanError for a module that has none."""
    found = getattr(module, "tp_plan", None)
    if not isinstance(found, Mapping) or not hasattr(module, "config"):
        raise PlanError(f"{type(module).__name__} is no model of transformers, so it takes no tp_plan.")
    return dict(found)


def style_of(name: str, plan: Mapping[str, str]) -> str:
    """The style that a plan gives to a parameter: its own, or its module's."""
    pattern = folded(name)
    return plan.get(pattern) or plan.get(pattern.rpartition(".")[0], "")


def cut_by(style: str, name: str, shape: Sequence[int]) -> Dealt | None:
    """How a style cuts a parameter; None where it leaves it whole.  PlanError for a style not known here."""
    if style and style not in CUTS and style not in WHOLES:
        raise PlanError(f"{name}: {style!r} is no style of transformers known here.")
    if style not in CUTS or not shape:
        return None
    at, packed = CUTS[style]
    whole = name.endswith(".bias") if style.startswith("rowwise") else style == "packed_rowwise" and len(shape) == 1
    return None if whole else Dealt(at % len(shape) if len(shape) > 1 else 0, packed and len(shape) > 1)


def _segments(module: nn.Module) -> dict[str, int]:
    """For every linear layer, the features whose gradient ``mla_kv_a_proj`` sums: the config has their number."""
    config: Any = getattr(module, "config", None)
    size = getattr(config.get_text_config(), "qk_rope_head_dim", None)
    return {name: size for name, m in module.named_modules() if isinstance(m, nn.Linear)} if size else {}
