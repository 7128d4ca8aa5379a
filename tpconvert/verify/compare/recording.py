"""What the modules of a model return in a run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tpconvert.analyze.watch.unseen import transforming
from tpconvert.spec.plan import Plan
from tpconvert.verify.measure.modes import tensors_of

Record = dict[tuple[str, str], Tensor]
"""Path of a module, slot of its output -> value."""


class Recording:
    """Keeps each module's first output, in order of return."""

    def __init__(self, module: nn.Module, record: Record) -> None:
        self.module, self.record = module, record

    def __enter__(self) -> None:
        def hook(path: str) -> Any:
            def keep(module: nn.Module, args: Any, output: Any) -> None:
                if transforming() or torch.compiler.is_compiling():
                    return  # tensors of torch.vmap cannot leave it, nor those of a branch of torch.cond
                for slot, tensor in tensors_of(output):
                    if tensor.is_floating_point():
                        self.record.setdefault((path, slot), tensor.detach().clone())

            return keep

        self.handles = [
            part.register_forward_hook(hook(path))
            for path, part in self.module.named_modules()
            if not isinstance(part, torch.jit.ScriptModule)  # which takes no hooks
        ]

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()


def pends(plan: Plan, path: str) -> bool:
    """Whether a module may return a term of a sum, which is made further on."""
    summing = [b.module for b in plan.boundaries if b.kind == "reduce" and b.side == "output"]
    summing += [r.module for r in plan.rewrites]
    if any(b.kind == "reduce" and b.side == "input" for b in plan.boundaries):
        return True
    return any(path != m and (not m or path.startswith(f"{m}.")) for m in summing)
