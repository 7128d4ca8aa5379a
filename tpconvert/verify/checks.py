"""Compare the whole model with the converted one, on every rank of a mesh."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpconvert.checkpoint.pieces import take_pieces
from tpconvert.parallel import Mesh, clip_grad_norm_, parallelize
from tpconvert.spec.plan import Plan
from tpconvert.verify.modes import Exact, loss_of, perturb, tensors_of
from tpconvert.verify.result import FLOAT32, FLOAT64, Check, Result, Tolerance

STEPS, RATE = 2, 1e-2


def compare_on_rank(
    whole: nn.Module,
    inputs: Any,
    plan: Plan,
    mesh: Mesh,
    *,
    seed: int = 0,
    disturb: Callable[[nn.Module, Mesh], None] | None = None,
) -> Result | None:
    """The result on rank 0, None on the others; all ranks of ``mesh`` call it with equal arguments.

    ``whole`` is a real CPU module, which is perturbed in place.  ``disturb`` may change the converted module: the
    tests use it to plant faults.
    """
    perturb(whole, seed)
    tolerance, inputs = precision(whole, inputs)
    local = copy.deepcopy(whole)
    parallelize(local, plan, mesh)
    if disturb is not None:
        disturb(local, mesh)
    pair = _Pair(whole, local, inputs, plan, mesh, tolerance)
    pair.run_modes()
    pair.run_steps()
    return Result(tuple(pair.checks), tolerance, pair.parted) if mesh.rank == 0 else None


def precision(module: nn.Module, inputs: Any) -> tuple[Tolerance, Any]:
    """Make the model float64 where its kernels have float64, else float32."""
    double = _floats(inputs, torch.float64)
    module.double()
    try:
        with torch.no_grad(), Exact():
            call(module, double)
        return FLOAT64, double
    except (RuntimeError, NotImplementedError):
        module.float()
        return FLOAT32, _floats(inputs, torch.float32)


class _Pair:
    """The two models, and what was found."""

    def __init__(
        self, whole: nn.Module, local: nn.Module, inputs: Any, plan: Plan, mesh: Mesh, tolerance: Tolerance
    ) -> None:
        self.whole, self.local, self.inputs, self.plan, self.mesh = whole, local, inputs, plan, mesh
        self.bound = tolerance.bound
        self.widen = tolerance is FLOAT64
        self.checks: list[Check] = []
        self.parted = ""
        self.names = [v.name for v in plan.verdicts if v.kind == "parameter" and not v.tied_to]

    def add(self, kind: str, name: str, error: float, mode: str) -> None:
        self.checks.append(Check(kind, name, error, self.bound, mode))

    def run_modes(self) -> None:
        """Outputs in eval, with and without autograd, and in train mode; gradients in both."""
        for module in (self.whole, self.local):
            module.eval()
        with torch.no_grad():
            self.outputs(
                call(self.whole, self.inputs), call(self.local, self.inputs), "no grad", bound=max(self.bound, 1e-5)
            )
        for mode in ("eval", "train"):
            for module in (self.whole, self.local):
                module.train(mode == "train")
                module.zero_grad(set_to_none=True)
            losses = []
            buffers = [{n: b.clone() for n, b in m.named_buffers()} for m in (self.whole, self.local)]
            records: list[dict[str, Tensor]] = [{}, {}]
            for module, record in zip((self.whole, self.local), records, strict=True):
                with Exact(self.widen), _Recording(module, record):
                    output = call(module, self.inputs)
                    losses.append((output, loss_of(output)))
            self.outputs(losses[0][0], losses[1][0], mode)
            self.add("loss", "loss", relative(losses[1][1], losses[0][1]), mode)
            self.part(records)
            with Exact(self.widen):
                for _, loss in losses:
                    loss.backward()
            self.gradients(mode)
            with torch.no_grad():  # running statistics moved in train mode
                for module, kept in zip((self.whole, self.local), buffers, strict=True):
                    for n, b in module.named_buffers():
                        b.copy_(kept[n])

    def outputs(self, whole: Any, local: Any, mode: str, bound: float | None = None) -> None:
        """Every output of this rank; the worst over ranks counts."""
        theirs = dict(tensors_of(local))
        for name, tensor in tensors_of(whole):
            error = relative(theirs[name], tensor) if name in theirs else float("inf")
            error = self.over_ranks(error)
            self.checks.append(Check("output", name, error, bound or self.bound, mode))

    def gradients(self, mode: str) -> None:
        """Every parameter's gradient, put together through its layout."""
        whole = dict(self.whole.named_parameters(remove_duplicate=False))
        floor = 1e-6 * max(
            (float(p.grad.abs().max()) for p in whole.values() if p.grad is not None and p.numel()), default=0.0
        )
        for name, parts in self.parts(lambda p: p.grad if p.grad is not None else torch.zeros_like(p)):
            if self.mesh.rank:
                continue
            want = whole[name].grad
            want = torch.zeros_like(whole[name]) if want is None else want
            self.add("gradient", name, self.worst(name, parts, want, floor), mode)

    def run_steps(self) -> None:
        """Two steps of SGD with clipping: a wrong gradient scale or norm shows in the parameters."""
        steps = [
            (self.whole, lambda limit: torch.nn.utils.clip_grad_norm_(self.whole.parameters(), limit)),
            (self.local, lambda limit: clip_grad_norm_(self.local, limit, self.mesh, self.plan)),
        ]
        limit = 0.5 * float(
            torch.sqrt(sum(p.grad.double().square().sum() for p in self.whole.parameters() if p.grad is not None))
        )  # type: ignore[arg-type]
        for _ in range(STEPS):
            for module, clip in steps:
                clip(limit)
                with torch.no_grad():
                    for p in module.parameters():
                        if p.grad is not None:
                            p -= RATE * p.grad
                module.zero_grad(set_to_none=True)
                with Exact(self.widen):
                    loss_of(call(module, self.inputs)).backward()
        whole = dict(self.whole.named_parameters(remove_duplicate=False))
        for name, parts in self.parts(lambda p: p.detach()):
            if self.mesh.rank:
                continue
            self.add("after 2 steps", name, self.worst(name, parts, whole[name].detach(), 1e-30), "train")

    def worst(self, name: str, parts: list[Tensor], want: Tensor, floor: float) -> float:
        """The largest error of any rank's part; ranks that share entries are each held to the same value."""
        layout, degree = self.plan[name].layout, self.mesh.degree
        scale = max(floor, float(want.abs().max()) if want.numel() else 0.0)
        return max(relative(p, take_pieces(want, layout, r, degree), scale) for r, p in enumerate(parts))

    def parts(self, value: Callable[[Tensor], Tensor]):  # type: ignore[no-untyped-def]
        """``(name, every rank's part)``; the parts are there on rank 0 alone."""
        local = dict(self.local.named_parameters(remove_duplicate=False))
        mine = {name: value(local[name]).detach().clone() for name in self.names}
        gathered: list[Any] | None = [None] * self.mesh.degree if self.mesh.rank == 0 else None
        if self.mesh.degree == 1:
            gathered = [mine]
        else:
            dist.gather_object(mine, gathered, group=self.mesh.group, group_dst=0)
        for name in self.names:
            yield name, [g[name] for g in gathered] if gathered is not None else []

    def part(self, records: list[dict[str, Tensor]]) -> None:
        """Find the first module whose output differs though its shape does not."""
        for name, tensor in records[0].items():
            other = records[1].get(name)
            if other is None or other.shape != tensor.shape:
                continue
            if self.over_ranks(relative(other, tensor)) > self.bound:
                self.parted = self.parted or name
                return

    def over_ranks(self, error: float) -> float:
        """The largest error of any rank."""
        if self.mesh.degree == 1:
            return error
        worst = torch.tensor([error if error == error else float("inf")], dtype=torch.float64)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=self.mesh.group)
        return float(worst)


class _Recording:
    """Keeps each module's first output, in order of return."""

    def __init__(self, module: nn.Module, record: dict[str, Tensor]) -> None:
        self.module, self.record = module, record

    def __enter__(self) -> None:
        def hook(path: str) -> Any:
            def keep(module: nn.Module, args: Any, output: Any) -> None:
                for slot, tensor in tensors_of(output):
                    if tensor.is_floating_point():
                        self.record.setdefault(f"{path or 'the model'} ({slot})", tensor.detach().clone())

            return keep

        self.handles = [m.register_forward_hook(hook(path)) for path, m in self.module.named_modules()]

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()


def call(module: nn.Module, inputs: Any) -> Any:
    """Call with keyword or positional inputs."""
    return module(**inputs) if isinstance(inputs, Mapping) else module(*inputs)


def relative(value: Tensor, want: Tensor, floor: float = 1e-30) -> float:
    """The largest difference over the largest finite entry of ``want``; infinite where shapes or infinities differ."""
    if value.shape != want.shape:
        return float("inf")
    if not want.numel():
        return 0.0
    if not want.is_floating_point() and not want.is_complex():
        return 0.0 if torch.equal(value, want) else float("inf")
    finite = torch.isfinite(want)
    if not torch.equal(torch.isfinite(value), finite):
        return float("inf")
    if not finite.any():
        return 0.0
    difference = (value - want)[finite].abs().max().item()
    return float(difference / max(want[finite].abs().max().item(), floor, 1e-30))


def _floats(tree: Any, dtype: torch.dtype) -> Any:
    if isinstance(tree, Tensor):
        return tree.to(dtype) if tree.is_floating_point() else tree
    if isinstance(tree, Mapping):
        return {k: _floats(v, dtype) for k, v in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(_floats(v, dtype) for v in tree)
    return tree
