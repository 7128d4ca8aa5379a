"""The ways a model is run; each gives one training step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tpconvert
from benchmarks.compare import models
from benchmarks.compare.case import Case
from tpconvert import cross_entropy, make_mesh, parallelize
from tpconvert.parallel.compiled.graphed import GraphedStep
from tpconvert.parallel.compiled.layers import norms_of
from tpconvert.parallel.convert import output_gathers, part
from tpconvert.parallel.grads.clip import grad_norm
from tpconvert.spec.plan import Plan
from tpconvert.train.model.open import logits_of

OWN = ("inductor", "plain", "cudagraphs", "graphed", "collectives")
"""Options of a case that are not for ``parallelize``."""


@dataclass(frozen=True)
class Step:
    """One training step of a prepared model."""

    module: nn.Module
    loss: Callable[[], Tensor]
    norm: Callable[[], float] | None = None
    """The gradient norm of the whole model."""

    def run(self, optimizer: torch.optim.Optimizer | None = None) -> Tensor:
        """Forward, backward, and the optimizer where there is one; gradients are given up as ``zero_grad`` does."""
        loss = self.loss()
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        self.module.zero_grad()
        return loss


@dataclass(frozen=True)
class RecordedStep(Step):
    """The same of one batch as a CUDA graph, recorded when it is first run."""

    recorded: list[GraphedStep] = field(default_factory=list)

    def run(self, optimizer: torch.optim.Optimizer | None = None) -> Tensor:
        """As :meth:`Step.run`."""
        if not self.recorded:
            self.recorded.append(GraphedStep(self.module, self.loss, ()))
        loss = self.recorded[0]()
        if optimizer is not None:
            optimizer.step()
        self.module.zero_grad()
        return loss


def prepare(case: Case, plan: str | None, device: torch.device, toy: bool) -> Step:
    """The model of a case on this rank, with its weights."""
    graphed = bool(dict(case.options).get("graphed"))
    config = models.config_of(case.model, case.layers, case.width, toy, models.UNMASKED if graphed else "sdpa")
    if case.way == "megatron":
        from benchmarks.compare.megatron import megatron

        return megatron(case, config, device)
    module = models.skeleton_of(case.model, config)
    inputs, labels = models.batch_of(case.model, config, case.tokens, case.batch, device)
    step = WAYS[case.way](case, module, plan, device, inputs, labels)
    return RecordedStep(step.module, step.loss, step.norm) if graphed else step


def whole(
    case: Case, module: nn.Module, plan: str | None, device: torch.device, inputs: dict[str, Any], labels: Tensor
) -> Step:
    """The model as it is, on one device."""
    fill(module, device, lambda name, value: value)
    compile_layers(case, module)
    lossy = whole_loss(case)

    def loss() -> Tensor:
        return lossy(logits_of(module(**inputs)), labels)

    def norm() -> float:
        return float(torch.nn.utils.get_total_norm([p.grad.float() for p in module.parameters() if p.grad is not None]))

    return Step(module, loss, norm)


def converted(
    case: Case, module: nn.Module, plan: str | None, device: torch.device, inputs: dict[str, Any], labels: Tensor
) -> Step:
    """What tpconvert makes of it; its logits stay cut where the plan lets them be."""
    assert plan is not None
    made = Plan.loads(plan)
    collectives = "auto" if device.type == "cpu" else dict(case.options).get("collectives", "auto")
    mesh = make_mesh(case.tp, device=device, collectives=collectives)
    options, own = ({k: v for k, v in case.options if (k in OWN) is mine} for mine in (False, True))
    gathers, layouts = output_gathers(made), made.layouts()
    shapes = {name: p.shape for name, p in module.named_parameters()}
    parallelize(
        module, made, mesh, gather_output=not gathers, sequence_parallel=case.sequence_parallel, **options
    )  # fmt: skip
    if "_micro_pipeline_tp" in own.get("inductor", ()):
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        assert mesh.group is not None
        enable_symm_mem_for_group(mesh.group.group_name)
    fill(module, device, lambda name, value: part(value, layouts[name], mesh), shapes)
    compile_ours(case, module)
    lossy = torch.compile(cross_entropy) if case.compiled else cross_entropy
    fallback = whole_loss(case)

    def loss() -> Tensor:
        if own.get("cudagraphs"):
            torch.compiler.cudagraph_mark_step_begin()
        logits = logits_of(module(**inputs))
        return lossy(logits, labels, mesh, gathers[0].blocks) if gathers else fallback(logits, labels)

    return Step(module, loss, lambda: float(grad_norm(module, mesh, made)))


def of_transformers(
    case: Case, module: nn.Module, plan: str | None, device: torch.device, inputs: dict[str, Any], labels: Tensor
) -> Step:
    """transformers' own tensor parallelism, by the plan that the model brings along."""
    from transformers.distributed import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    mesh = dist.init_device_mesh(device.type, (case.tp,), mesh_dim_names=("tp",))
    tp_plan, _, _ = module._resolve_parallel_plans(DistributedConfig(tp_size=case.tp))
    apply_tensor_parallelism(module, mesh, tp_plan)
    return filled(case, module, device, inputs, labels, parallel_loss=False)


def dtensor(
    case: Case, module: nn.Module, plan: str | None, device: torch.device, inputs: dict[str, Any], labels: Tensor
) -> Step:
    """torch's ``parallelize_module`` with the usual styles, and its loss over cut logits; a Llama only."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = dist.init_device_mesh(device.type, (case.tp,), mesh_dim_names=("tp",))
    styles = {}  # words whole: with a cut embedding compiled layers failed in the backward pass
    for name in ("q_proj", "k_proj", "v_proj"):
        styles[f"model.layers.*.self_attn.{name}"] = ColwiseParallel()
    for name in ("gate_proj", "up_proj"):
        styles[f"model.layers.*.mlp.{name}"] = ColwiseParallel()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        styles[f"model.layers.*.{name}"] = RowwiseParallel()
    styles["lm_head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(module, mesh, styles)
    return filled(case, module, device, inputs, labels, parallel_loss=True)


def fsdp(
    case: Case, module: nn.Module, plan: str | None, device: torch.device, inputs: dict[str, Any], labels: Tensor
) -> Step:
    """FSDP2 alone: each layer, and the rest; every rank runs the whole micro-batch."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh(device.type, (case.tp,), mesh_dim_names=("dp",))
    for layer in models.layers_of(module):
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return filled(case, module, device, inputs, labels, parallel_loss=False)


WAYS: Mapping[str, Callable[..., Step]] = {
    "whole": whole,
    "converted": converted,
    "transformers": of_transformers,
    "dtensor": dtensor,
    "fsdp": fsdp,
}


def filled(
    case: Case,
    module: nn.Module,
    device: torch.device,
    inputs: dict[str, Any],
    labels: Tensor,
    *,
    parallel_loss: bool,
) -> Step:
    """A step of a model whose parameters are DTensors, once they have their values."""
    from torch.distributed.tensor import DTensor, distribute_tensor
    from torch.distributed.tensor.parallel import loss_parallel

    old = dict(module.named_parameters())

    def own(name: str, value: Tensor) -> Any:
        like = old[name]
        if not isinstance(like, DTensor):
            return value
        return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)

    fill(module, device, own, {name: p.shape for name, p in old.items()})
    compile_layers(case, module)
    lossy = whole_loss(case)

    def loss() -> Tensor:
        logits = logits_of(module(**inputs))
        if not parallel_loss:
            return lossy(logits, labels)
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, -2), labels.flatten())

    def norm() -> float:
        total = torch.zeros((), device=device)
        for p in module.parameters():
            if isinstance(p.grad, DTensor):
                total += p.grad.float().norm().full_tensor() ** 2
            elif p.grad is not None:
                total += p.grad.float().norm() ** 2
        return float(total.sqrt())

    return ParallelLossStep(module, loss, norm, loss_parallel) if parallel_loss else Step(module, loss, norm)


@dataclass(frozen=True)
class ParallelLossStep(Step):
    """A step of which forward and backward are in a context."""

    context: Callable[[], Any] = torch.enable_grad

    def run(self, optimizer: torch.optim.Optimizer | None = None) -> Tensor:
        """As :meth:`Step.run`."""
        with self.context():
            loss = self.loss()
            loss.backward()
        if optimizer is not None:
            optimizer.step()
        self.module.zero_grad()
        return loss


def fill(
    module: nn.Module,
    device: torch.device,
    own: Callable[[str, Tensor], Any],
    shapes: Mapping[str, torch.Size] | None = None,
) -> None:
    """Give every parameter what this rank owns of its value, and move buffers to the device."""
    done: dict[int, nn.Parameter] = {}
    tensors = dict(module.named_parameters(remove_duplicate=False))
    for name, old in tensors.items():
        path, _, attribute = name.rpartition(".")
        if id(old) not in done:
            value = models.value_of(name, shapes[name] if shapes else old.shape, device)
            done[id(old)] = nn.Parameter(own(name, value))
        parameters = module.get_submodule(path)._parameters
        parameters[attribute] = done[id(old)]
    for part_of_module in module.modules():
        for name, buffer in part_of_module._buffers.items():
            if buffer is not None:
                part_of_module._buffers[name] = buffer.to(device)
    module.train()


def whole_loss(case: Case) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of whole logits, compiled where the layers are."""
    return torch.compile(models.whole_loss) if case.compiled else models.whole_loss


def compile_ours(case: Case, module: nn.Module) -> None:
    """Compile a converted model as the runner does; ``plain`` and other settings of inductor as torch does."""
    if not case.compiled or not torch.cuda.is_available() or {"plain", "inductor"} & dict(case.options).keys():
        compile_layers(case, module)
        return
    graphs = bool(dict(case.options).get("cudagraphs"))
    tpconvert.compile_layers(module, **({"triton.cudagraphs": True} if graphs else {}))


def compile_layers(case: Case, module: nn.Module) -> None:
    """Compile layer by layer, and the last norm, where the case says so: whole models compiled at once were slower."""
    if not case.compiled:
        return
    import torch._dynamo

    torch._dynamo.config.cache_size_limit = 64
    for name in dict(case.options).get("inductor", ()):
        import torch._inductor.config

        setattr(torch._inductor.config, name, True)
    backend = "inductor" if torch.cuda.is_available() else "aot_eager"
    for layer in models.layers_of(module):
        layer.compile(fullgraph=case.way in ("whole", "converted"), backend=backend)
    for norm in norms_of(module):
        norm.compile(backend=backend)  # torch's own, alone, it leaves as they are
