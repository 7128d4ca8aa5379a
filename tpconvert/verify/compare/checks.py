"""Compare the whole model with the converted one, on every rank of a mesh."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpconvert.analyze.trace.copies import copied
from tpconvert.analyze.trace.entering import Entered
from tpconvert.analyze.trace.trees import map_tensors
from tpconvert.checkpoint.tensors.pieces import take_pieces
from tpconvert.errors import NotRunError, TPConvertError, VerifyError
from tpconvert.parallel import Mesh, clip_grad_norm_, parallelize
from tpconvert.parallel.calls.surroundings import surround
from tpconvert.parallel.comm.collectives import summed
from tpconvert.planning.slices import divided
from tpconvert.source.blame import told
from tpconvert.spec.plan import Plan
from tpconvert.verify.compare.recording import Record, Recording, pends
from tpconvert.verify.compare.ways import LOOSE, compare_other_size, compare_random, compare_ways
from tpconvert.verify.measure.dealt import Deal
from tpconvert.verify.measure.decided import Decisions, apart
from tpconvert.verify.measure.dtypes import dtype_of, generators, precision
from tpconvert.verify.measure.lastbits import measured, nudge, restore, state, widened
from tpconvert.verify.measure.modes import (
    Exact,
    Widened,
    call,
    differentiate,
    perturb,
    refusal,
    takes_gradients,
    tensors_of,
)
from tpconvert.verify.measure.values import UNEQUAL, densify, form, gradient_of, largest, loss_of, relative, spread_of
from tpconvert.verify.result import FLOAT32, FLOAT64, Check, Result, Tolerance

STEPS, RATE, SEED = 2, 1e-2, 0


@torch.inference_mode(False)
@torch.enable_grad()
def compare_on_rank(
    whole: nn.Module,
    inputs: Any,
    plan: Plan,
    mesh: Mesh,
    *,
    seed: int = 0,
    disturb: Callable[[nn.Module, Mesh], None] | None = None,
    sequence_parallel: bool = False,
    tolerances: Sequence[Tolerance] = (FLOAT64, FLOAT32),
) -> Result | None:
    """The result on rank 0, None on the others; all ranks of ``mesh`` call it with equal arguments.

    ``whole`` is a real CPU module, which is perturbed in place, and moved to the mesh's device.  ``disturb`` may change
    the converted module: the tests use it to plant faults.  ``sequence_parallel`` converts it so, and cuts sequences
    off that cannot be shared.  It is run in the dtype of the first of ``tolerances`` in which it can be.
    """
    perturb(whole, seed)
    whole, inputs = whole.to(mesh.device), map_tensors(lambda t: t.to(mesh.device), inputs)
    surround(whole, plan, mesh)  # it would be shown the ranks of tp as well
    tolerance, inputs = precision(whole, inputs, tolerances)
    before = state(whole) if mesh.rank == 0 else {}
    local = copied(whole)
    parallelize(local, plan, mesh, sequence_parallel=sequence_parallel)
    if disturb is not None:
        disturb(local, mesh)
    fit = (lambda given: divided(given, plan)) if sequence_parallel else None
    pair = Pair(whole, local, inputs, plan, mesh, tolerance, fit)
    pair.run_modes()
    if pair.lacks:
        raise NotRunError(pair.lacks)
    pair.run_steps()
    compare_random(pair)
    if mesh.rank:
        return None

    def again(draw: int) -> list[Check]:
        restore(whole, before)
        whole.zero_grad(set_to_none=True)
        other = copied(whole)
        nudge(other, draw)
        alone = Pair(whole, other, inputs, plan, Mesh(0, 1, None, mesh.device), tolerance, fit)
        alone.run_modes()
        alone.run_steps()
        return alone.checks

    checks = widened(pair.checks, tolerance, again)
    parted = "" if all(c.equal for c in checks) else pair.parted
    return Result(tuple(checks), tolerance, parted, (*pair.notes, *measured(checks, (c.bound for c in pair.checks))))


class Pair:
    """The two models, and what was found."""

    def __init__(
        self,
        whole: nn.Module,
        local: nn.Module,
        inputs: Any,
        plan: Plan,
        mesh: Mesh,
        tolerance: Tolerance,
        fit: Callable[[Any], Any] | None = None,
    ) -> None:
        self.whole, self.local, self.plan, self.mesh = whole, local, plan, mesh
        self.fit, self.sliced = fit or (lambda given: given), fit is not None
        self.inputs = self.fit(inputs) or inputs
        self.bound, self.floor = tolerance.bound, tolerance.floor
        self.dtype = dtype_of(tolerance)
        self.plain: Callable[[], AbstractContextManager[object]] = nullcontext
        self.checks: list[Check] = []
        self.notes: list[str] = []
        self.parted = ""
        self.drops = False
        self.trains = True
        self.lacks = "No gradients were compared."
        self.mislaid = False
        self.chance: Decisions | None = None
        """What fell by chance in the last forward of the whole model that was differentiated."""

    def add(self, kind: str, name: str, error: float, mode: str, bound: float | None = None) -> None:
        """One check."""
        self.checks.append(Check(kind, name, error, self.bound if bound is None else bound, mode))

    def run(self, module: nn.Module, inputs: Any = None) -> Any:
        """What a model returns; a converted one that fails where the whole one runs is not equal to it.

        Both draw the same random numbers, for those draws that no mode leaves out (an LSTM's own dropout).
        """
        try:
            with torch.random.fork_rng(devices=generators(self.mesh.device)):
                torch.manual_seed(SEED)
                random.seed(SEED)
                numpy.random.seed(SEED)  # some models draw their masks there
                return call(module, self.inputs if inputs is None else inputs)
        except TPConvertError:
            raise
        except Exception as error:
            if module is self.whole:
                raise
            raise VerifyError(f"The converted model fails where the whole one runs: {told(error)}") from error

    def decisions(self) -> Decisions:
        """What is to fall alike for both."""
        return Decisions(self.dtype, Deal(self.plan, self.mesh.rank, self.mesh.degree))

    def run_modes(self) -> None:
        """Outputs in eval, with and without autograd, and in train mode; gradients in both."""
        for module in (self.whole, self.local):
            module.eval()
        with torch.no_grad():
            self.outputs(*self.run_plain(), "no grad", bound=max(self.bound, LOOSE))
        compare_other_size(self)
        if not self.sliced:  # a form that is planned for the example inputs alone
            compare_ways(self)
        for mode in ("eval", "train"):
            self.run_mode(mode)

    @contextmanager
    def exact(self) -> Iterator[Exact]:
        """Without dropout, and so with no need of numbers of each rank's own: all draw what the whole model draws.

        A switch of streams takes a number, and a layer that is left out at random would be another one.
        """
        with self.mesh.streams.holding(), Exact(self.dtype) as running:
            yield running

    def run_plain(self) -> tuple[Any, Any]:
        """What both return without a mode, which keeps them off their fast paths, if the whole one runs so.

        One that casts to a dtype by name, which its parts no longer have, does not; one that multiplies a mask of
        integers by the least number of its parts' dtype, which the default one does not have, gets no numbers.
        """
        try:
            whole = self.run(self.whole)
            runs = not any(tensor.isnan().any() for _, tensor in tensors_of(whole))
        except RuntimeError:
            runs = False
        if not runs:
            self.plain = lambda: Widened(self.dtype)
            with self.plain():
                whole = self.run(self.whole)
        with self.plain():
            local = self.run(self.local)
        if self.over_ranks(apart(whole, local)) > self.bound:  # which ties and draws may be the cause of
            decisions = self.decisions()
            with self.plain(), self.mesh.streams.holding(), decisions.of(True):
                whole = self.run(self.whole)
            with self.plain(), self.mesh.streams.holding(), decisions.of(False):
                local = self.run(self.local)
        return whole, local

    def run_mode(self, mode: str, way: str = "") -> None:
        """Outputs, loss and gradients in one mode, without dropout; but its rates must be the same.

        ``way`` is another way in which the models are called.
        """
        buffers = [{n: b.clone() for n, b in m.named_buffers()} for m in (self.whole, self.local)]
        self.run_and_differentiate(mode, way or mode)
        with torch.no_grad():  # running statistics moved in train mode
            for module, kept in zip((self.whole, self.local), buffers, strict=True):
                for n, b in module.named_buffers():
                    b.copy_(kept[n])

    def run_and_differentiate(self, mode: str, named: str) -> None:
        """Forward and backward of both."""
        runs = []
        records: list[Record] = [{}, {}]
        takes = takes_gradients(copied(self.whole), self.inputs, self.dtype, mode == "train")  # it may keep what it saw
        if mode == "train" and not takes and (why := refusal(copied(self.whole), self.inputs, self.dtype)):
            return self.ungraded(f"Train mode was not compared: the whole model does not run in it ({why}).")
        entered, decisions = [Entered(self.inputs, takes) for _ in records], self.decisions()
        for module, record, given in zip((self.whole, self.local), records, entered, strict=True):
            module.train(mode == "train")
            module.zero_grad(set_to_none=True)
            with self.exact() as running, decisions.of(module is self.whole), Recording(module, record):
                output = self.run(module, given.tree)
                runs.append((output, loss_of(output), running.rates))
        (whole, whole_loss, rates), (local, local_loss, local_rates) = runs
        self.outputs(whole, local, named)
        if whole_loss is None:
            return self.ungraded("The model has no output to take a gradient of, so gradients cannot be compared.")
        if local_loss is None:
            raise VerifyError("The converted model has no output to take a gradient of; the whole one has.")
        self.add("loss", "loss", relative(local_loss, whole_loss, spread_of(whole)), named)
        self.chance = decisions
        self.drops = bool(decisions.drawn) or bool(self.over_ranks(max(*rates, *local_rates, 0.0, 0.0)))
        if rates or local_rates:
            self.add("dropout rates", "every dropout", self.over_ranks(0.0 if rates == local_rates else UNEQUAL), named)
        self.part(records)
        decisions = self.decisions()  # a backward may run forwards again
        try:
            with self.exact(), decisions.of(True):
                differentiate(whole_loss)
        except Exception as error:  # a backward of its own may be for training alone, and a cache for one step
            return self.ungraded(f"The whole model has no gradients in {mode} mode ({told(error)}).")
        with self.exact(), decisions.of(False):
            differentiate(local_loss)
        if named != mode and self.lost(named):
            return
        self.trains, self.lacks = True, ""
        self.gradients(named)
        self.input_gradients(named, *entered)

    def ungraded(self, why: str) -> None:
        """Note why a mode has no gradients to compare, which is told if none has."""
        self.trains, self.lacks = False, self.lacks and why
        self.note(why)

    def lost(self, way: str) -> bool:
        """Whether the whole model itself has gradients that are no numbers, as where attention sees nothing."""
        lost = [n for n, p in self.whole.named_parameters() if p.grad is not None and gradient_of(p).isnan().any()]
        if not self.over_ranks(float(bool(lost))):
            return False
        self.note(f"The gradients of a call {way} were not compared: the whole model itself has none for {lost[:1]}.")
        self.mislaid = True
        return True

    def outputs(self, whole: Any, local: Any, mode: str, bound: float | None = None) -> None:
        """Every output of this rank; the worst over ranks counts."""
        theirs = dict(tensors_of(local))
        for name, tensor in tensors_of(whole):
            error = relative(theirs[name], tensor) if name in theirs else UNEQUAL
            self.add("output", name, self.over_ranks(error), mode, bound)
            if tensor.is_floating_point() and tensor.isnan().any():
                self.note(f"The whole model itself gives an output that is not a number ({name}).")
        same = form(whole) == form(local)
        self.add("output", "types and names", self.over_ranks(0.0 if same else UNEQUAL), mode)

    def gradients(self, mode: str) -> None:
        """Every parameter's gradient, put together through its layout; the same parameters must be trained."""
        whole, local = (_named(m.named_parameters) for m in (self.whole, self.local))
        floor = self.floor * max((largest(gradient_of(p)) for p in whole.values()), default=0.0)

        def mine(name: str) -> Tensor:
            if local[name].requires_grad is not whole[name].requires_grad:
                return torch.full_like(local[name], float("nan"))
            return gradient_of(local[name])

        for name, parts in self.parts("parameter", mine):
            self.add("gradient", name, self.worst(name, parts, gradient_of(whole[name]), floor), mode)
            if gradient_of(whole[name]).isnan().any():
                self.note(f"The whole model itself gives a gradient that is not a number ({name}).")

    def input_gradients(self, mode: str, whole: Entered, local: Entered) -> None:
        """The gradient of every floating input, which is the model's part of a larger one's; whole on every rank."""
        floor = self.floor * max((largest(gradient_of(p)) for p in self.whole.parameters()), default=0.0)
        for (name, mine), (_, theirs) in zip(tensors_of(whole.tree), tensors_of(local.tree), strict=True):
            if (leaf := whole.given.get(id(mine))) is not None:
                want, have = gradient_of(leaf), gradient_of(local.given[id(theirs)])
                self.add("gradient", f"input {name}", self.over_ranks(relative(have, want, floor)), mode)

    def run_steps(self) -> None:
        """Two steps of SGD with clipping: a wrong gradient scale or norm shows in the parameters."""
        if not self.trains:
            return
        densify(self.whole)  # torch has no norm of sparse gradients
        gradients = [p.grad for p in self.whole.parameters() if p.grad is not None]
        limit = 0.5 * float(torch.nn.utils.get_total_norm(gradients))
        for step in range(STEPS):
            norms = [
                torch.nn.utils.clip_grad_norm_(self.whole.parameters(), limit),
                clip_grad_norm_(self.local, limit, self.mesh, self.plan),
            ]
            self.add("gradient norm", f"step {step + 1}", self.over_ranks(relative(norms[1], norms[0])), "train")
            decisions = self.decisions()
            for module in (self.whole, self.local):
                with torch.no_grad():
                    for p in module.parameters():
                        if p.grad is not None:
                            p -= RATE * p.grad
                module.zero_grad(set_to_none=True)
                with self.exact(), decisions.of(module is self.whole):
                    differentiate(loss_of(self.run(module)))  # type: ignore[arg-type]  # it was there in train mode
                densify(module)
        for kind in ("parameter", "buffer"):
            whole, local = (
                _named(m.named_parameters if kind == "parameter" else m.named_buffers) for m in (self.whole, self.local)
            )
            for name, parts in self.parts(kind, lambda n, local=local: local[n].detach()):  # type: ignore[misc]
                self.add("after 2 steps", name, self.worst(name, parts, whole[name].detach(), 0.0), "train")

    def worst(self, name: str, parts: list[Tensor], want: Tensor, floor: float) -> float:
        """The largest error of any rank's part; ranks that share entries are each held to the same value."""
        layout, degree, want = self.plan[name].layout, self.mesh.degree, want.cpu()
        scale = max(floor, largest(want))
        return max(relative(p, take_pieces(want, layout, r, degree), scale) for r, p in enumerate(parts))

    def parts(self, kind: str, value: Callable[[str], Tensor]) -> Iterator[tuple[str, list[Tensor]]]:
        """``(name, every rank's part)`` of each parameter or buffer, on rank 0's CPU; nothing on the others."""
        names = [v.name for v in self.plan.verdicts if v.kind == kind]
        mine = {name: value(name).detach().cpu().clone() for name in names}  # a GPU's would come back on that GPU
        gathered: list[Any] | None = [mine] * self.mesh.degree if self.mesh.rank == 0 else None
        if self.mesh.degree > 1:
            dist.gather_object(mine, gathered, group=self.mesh.group, group_dst=0)
        for name in names if gathered else ():
            yield name, [g[name] for g in gathered or ()]

    def part(self, records: list[Record]) -> None:
        """Find the first module whose output differs though its shape does not."""
        for (path, slot), tensor in records[0].items():
            other = records[1].get((path, slot))
            same_shape = other is not None and other.shape == tensor.shape
            if self.over_ranks(0.0 if same_shape else UNEQUAL) or other is None:
                continue
            error = self.over_ranks(relative(other, tensor))
            if error > self.bound and pends(self.plan, path):
                error = self.over_ranks(relative(summed(other, self.mesh), tensor))
            if error > self.bound:
                self.parted = self.parted or f"{path or 'the model'} ({slot})"
                return

    def note(self, text: str) -> None:
        """Say something, once."""
        if text not in self.notes:
            self.notes.append(text)

    def over_ranks(self, error: float) -> float:
        """The largest error of any rank."""
        if self.mesh.degree == 1:
            return error
        worst = torch.tensor([error if error == error else UNEQUAL], dtype=torch.float64)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=self.mesh.group)
        return float(worst)


def _named(source: Any) -> dict[str, Tensor]:
    return dict(source(remove_duplicate=False))
