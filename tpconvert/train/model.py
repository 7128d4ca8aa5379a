"""The model of a sharded folder on this rank, what it is called with, and its loss.

Nothing is traced again: the plan in the folder says everything.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tpconvert.errors import ConfigError
from tpconvert.parallel import Mesh, cross_entropy, load_local, parallelize
from tpconvert.parallel.convert import output_gathers
from tpconvert.planning.slices import divided
from tpconvert.source import Source, open_source
from tpconvert.spec.layout import Block
from tpconvert.spec.plan import Boundary, Plan
from tpconvert.train.config import Parallelism
from tpconvert.train.data import IGNORE, Batch
from tpconvert.train.shards import Shards

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""What a forward runs in, where that is not the dtype of the parameters."""


def master_dtype(precision: str) -> torch.dtype:
    """Of parameters, gradients and optimizer state."""
    return torch.float64 if precision == "fp64" else torch.float32


_DEAR = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product", "_scaled_mm", "_grouped_mm")
"""Products and attention, which selective checkpointing runs once."""


@dataclass(frozen=True, slots=True)
class Call:
    """How the forward is called with a batch."""

    ids: str | int
    """The keyword or place of the token ids."""
    mask: str | None
    constants: Mapping[str, Any]

    def __call__(self, module: nn.Module, batch: Batch, *, padded: bool) -> Any:
        """The module's output; the mask is given where there is padding."""
        kwargs = dict(self.constants)
        if padded and self.mask is not None:
            kwargs[self.mask] = batch.attention
        if isinstance(self.ids, int):
            return module(batch.ids, **kwargs)
        return module(**{self.ids: batch.ids}, **kwargs)


@dataclass(frozen=True, slots=True)
class Model:
    """This rank's part, ready to train."""

    module: nn.Module
    call: Call
    cut: tuple[Block, ...]
    """How the last dim of the logits is dealt; empty where they are whole."""
    mesh: Mesh
    padded: bool
    precision: str
    shards: Shards

    def loss(self, batch: Batch) -> Tensor:
        """The sum of the cross entropies of all labels, the same on each tp rank."""
        low = AUTOCAST.get(self.precision)
        with torch.autocast(self.mesh.device.type, low, enabled=low is not None):
            logits = logits_of(self.call(self.module, batch, padded=self.padded))
        if self.cut:
            return cross_entropy(logits, batch.labels, self.mesh, self.cut, ignore_index=IGNORE, reduction="sum")
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(wide.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE, reduction="sum")


def open_module(folder: Path, plan: Plan, *, trust_remote_code: bool = False) -> Source:
    """The source that a sharded folder was made of, by the configuration kept in it, or the function it names."""
    if (folder / "config.json").is_file():
        task = plan.source.get("task") or None
        return open_source(str(folder), task=task, trust_remote_code=trust_remote_code)
    return open_source(str(plan.source.get("name", "")))


def limits(folder: Path, plan: Plan) -> tuple[int | None, int | None]:
    """``(words, positions)`` that the model has, where the plan or the configuration in the folder says."""
    try:
        held = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        held = {}
    held = held | (held.get("text_config") or {}) if isinstance(held, dict) else {}
    cut = [axis.size for axis in plan.axes if axis.pattern == "vocabulary"]
    words, places = max(cut, default=held.get("vocab_size")), held.get("max_position_embeddings")
    return words if isinstance(words, int) else None, places if isinstance(places, int) and places > 0 else None


def make_call(source: Source) -> Call:
    """How to call the forward: as it was traced, with a batch's ids and mask in place of the example's."""
    if isinstance(source.inputs, tuple):
        if len(source.inputs) != 1 or not _is_ids(source.inputs[0]):
            raise _not_text(source, "more than one tensor of token ids")
        return Call(0, None, {})
    tensors = {name: value for name, value in source.inputs.items() if isinstance(value, Tensor)}
    mask = "attention_mask" if "attention_mask" in tensors else None
    found = [name for name, value in tensors.items() if name != mask and _is_ids(value)]
    if len(found) != 1 or len(tensors) != 1 + bool(mask):
        raise _not_text(source, ", ".join(tensors))
    if mask is None and "attention_mask" in inspect.signature(source.module.forward).parameters:
        mask = "attention_mask"
    constants = {name: value for name, value in source.inputs.items() if name not in tensors}
    return Call(found[0], mask, constants)


def _is_ids(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2 and value.dtype in (torch.int64, torch.int32)


def _not_text(source: Source, takes: str) -> ConfigError:
    return ConfigError(
        f"{source.name}: its forward takes {takes}; the trainer gives one tensor of token ids.",
        hint="Write your own loop, as in examples/own_loop.py.",
    )


def build(
    source: Callable[[], Source],
    plan: Plan,
    mesh: Mesh,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
    sequence_parallel: bool = False,
) -> tuple[nn.Module, Call, tuple[Block, ...]]:
    """``(module, how to call it, how its logits are cut)`` of this rank, in train mode, on the mesh's device.

    The logits stay cut where the last thing the forward does is to gather them, which one small forward shows.
    """
    gathers = [b for b in output_gathers(plan) if b.side == "output" and b.dim is not None]
    for left_out in (gathers, []) if len(gathers) == 1 and mesh.degree > 1 else ([],):
        opened = source()
        inputs = divided(opened.inputs, plan) if sequence_parallel else opened.inputs
        module = parallelize(opened.module, plan, mesh, gather_output=not left_out, sequence_parallel=sequence_parallel)
        load_local(module, tensors)
        module.to(mesh.device)
        for tensor in module.buffers():
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
        if not left_out or _ends_in(module, inputs, left_out[0], mesh):
            return module.train(), make_call(opened), left_out[0].blocks if left_out else ()
    raise AssertionError("the second round has nothing left out")


def _ends_in(module: nn.Module, inputs: Any, gather: Boundary, mesh: Mesh) -> bool:
    """Whether the tensor at the boundary is what the forward returns as logits, with nothing in between."""
    seen: list[Any] = []
    hook = module.get_submodule(gather.module).register_forward_hook(lambda _m, _a, out: seen.append(out))
    try:
        with torch.no_grad(), contextlib.suppress(RuntimeError, ValueError, IndexError, TypeError):
            inputs = _moved(inputs, mesh.device)
            output = module(*inputs) if isinstance(inputs, tuple) else module(**inputs)
            logits = logits_of(output)
            return any(
                t.data_ptr() == logits.data_ptr() and t.shape == logits.shape for out in seen for t in _tensors(out)
            )
    finally:
        hook.remove()
    return False


def logits_of(output: Any) -> Tensor:
    """The logits of what a forward returned: the tensor itself, ``.logits``, or the first item."""
    if isinstance(output, Tensor):
        return output
    found = getattr(output, "logits", None)
    if found is None and isinstance(output, Mapping):
        found = output.get("logits")
    if found is None and isinstance(output, tuple | list) and output:
        found = output[0]
    if not isinstance(found, Tensor):
        raise ConfigError(
            f"The model returns {type(output).__name__}, which has no logits.",
            hint="Use a language-model task, or your own loop as in examples/own_loop.py.",
        )
    return found


def layers_of(module: nn.Module) -> Iterator[nn.Module]:
    """The repeated layers: members of the outermost lists of modules of one class that have parameters."""
    for child in module.children():
        items = list(child.children())
        listed = isinstance(child, nn.ModuleList | nn.Sequential) and len(items) > 1
        if listed and len({type(i) for i in items}) == 1 and next(items[0].parameters(), None) is not None:
            yield from items
        else:
            yield from layers_of(child)


def speed_up(module: nn.Module, settings: Parallelism) -> None:
    """Checkpoint and compile each layer, as configured."""
    if settings.activation_checkpointing == "none" and not settings.compile:
        return
    layers = list(layers_of(module))
    if not layers:
        raise ConfigError(
            f"{type(module).__name__} has no list of equal layers to checkpoint or compile.",
            hint="Set parallelism.activation_checkpointing: none and parallelism.compile: false.",
        )
    selective = functools.partial(create_selective_checkpoint_contexts, _keep_or_repeat)
    for layer in layers:
        if settings.activation_checkpointing == "full":
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        if settings.activation_checkpointing == "selective":
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, context_fn=selective)
        if settings.compile:
            layer.compile()


def _keep_or_repeat(_context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    """Keep what is dear to compute or to fetch, and run the rest again in backward.

    The place a collective writes to is no output of an op, so it is made again; only what the traced ones
    return is kept.
    """
    name = str(op)
    dear = any(name.startswith(f"aten.{kind}") for kind in _DEAR) or name.startswith("_c10d_functional.")
    return CheckpointPolicy.MUST_SAVE if dear else CheckpointPolicy.PREFER_RECOMPUTE


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {k: _moved(v, device) for k, v in value.items()}
    return type(value)(_moved(v, device) for v in value) if isinstance(value, tuple | list) else value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
