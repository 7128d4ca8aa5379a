"""The model of a sharded folder on this rank, what it is called with, and its loss.

Nothing is traced again: the plan in the folder says everything.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tpconvert.errors import ConfigError
from tpconvert.parallel import Mesh, cross_entropy, load_local, parallelize
from tpconvert.parallel.compiled.layers import compile_layers, layers_of
from tpconvert.parallel.convert import output_gathers
from tpconvert.parallel.fits import check_plan
from tpconvert.planning.slices import divided
from tpconvert.source import Source, open_source
from tpconvert.spec.layout import Block, Layout
from tpconvert.spec.plan import NAME as PLAN
from tpconvert.spec.plan import Boundary, Plan
from tpconvert.train.data.batch import IGNORE, Batch, OwnBatch, moved
from tpconvert.train.data.packed import Packing, Trial, find_packing, is_padding_left_out
from tpconvert.train.model.forwards import Checkpointed, Selective, give_forward
from tpconvert.train.model.shards import Shards
from tpconvert.train.settings.config import Config, Parallelism

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""What a forward runs in, where that is not the dtype of the parameters."""


def master_dtype(precision: str) -> torch.dtype:
    """Of parameters, gradients and optimizer state."""
    return torch.float64 if precision == "fp64" else torch.float32


@dataclass(frozen=True, slots=True)
class Call:
    """How the forward is called with a batch."""

    ids: str | int
    """The keyword or place of the token ids."""
    mask: str | None
    constants: Mapping[str, Any]
    decoder: str | None = None
    """The keyword of the decoder's ids, which are made of the labels."""
    words: Tensor | None = None
    """Ids that the model knows."""
    types: str | None = None
    """The keyword of which text each position is of."""

    def __call__(self, module: nn.Module, batch: Batch, *, padded: bool, packing: Packing | None = None) -> Any:
        """The module's output; the mask is given where there is padding."""
        kwargs: dict[str, Any] = {}
        if packing is not None and batch.documents is not None:
            kwargs = packing.arguments(batch.documents, batch.positions, next(module.parameters()).dtype)
        elif padded and self.mask is not None:
            kwargs = {self.mask: batch.attention}
        if self.types is not None and batch.types is not None:
            kwargs[self.types] = batch.types
        if self.decoder is not None:
            kwargs[self.decoder] = decoder_inputs(module, batch.labels)
        return self.with_ids(module, batch.ids, kwargs)

    def with_ids(self, module: nn.Module, ids: Tensor, more: Mapping[str, Any]) -> Any:
        """The module's output for ids and further arguments."""
        if isinstance(self.ids, int):
            return module(ids, **{**self.constants, **more})
        return module(**{**self.constants, self.ids: ids, **more})


@dataclass(frozen=True, slots=True)
class OwnCall:
    """How the forward is called with a batch of a user's dataset: all of it but the labels."""

    def __call__(self, module: nn.Module, batch: OwnBatch, *, padded: bool, packing: Packing | None = None) -> Any:
        """The module's output."""
        return module(**{name: value for name, value in batch.content.items() if name != "labels"})


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
    packing: Packing | None = None
    """How packed documents are kept apart; None where they are not."""
    own_loss: Callable[[nn.Module, Any], Tensor] | None = None
    """Instead of cross entropy: the mean loss of a batch."""

    def loss(self, batch: Batch | OwnBatch) -> Tensor:
        """The sum of the losses of all that is counted, the same on each tp rank."""
        if self.own_loss is not None:
            with lowered(self.mesh, self.precision):
                return self._own(batch)
        return self._entropy(self._logits(batch), batch.labels)

    def judged(self, batch: Batch | OwnBatch) -> tuple[Tensor, Tensor]:
        """The loss, and how many labels are what the model takes for the likeliest; none by a loss of one's own."""
        if self.own_loss is not None:
            return self.loss(batch), torch.zeros((), device=self.mesh.device)
        logits = self._logits(batch)
        best = likeliest(logits, self.mesh, self.cut)
        return self._entropy(logits, batch.labels), ((best == batch.labels) & (batch.labels != IGNORE)).sum()

    def _logits(self, batch: Batch | OwnBatch) -> Tensor:
        with lowered(self.mesh, self.precision):
            logits = logits_of(self.call(self.module, batch, padded=self.padded, packing=self.packing))
        if logits.shape[:-1] != batch.labels.shape:
            raise _other_shape(tuple(logits.shape), tuple(batch.labels.shape))
        return logits

    def _entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.cut:
            return cross_entropy(logits, labels, self.mesh, self.cut, ignore_index=IGNORE, reduction="sum")
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(wide.flatten(0, -2), labels.flatten(), ignore_index=IGNORE, reduction="sum")

    def _own(self, batch: Batch | OwnBatch) -> Tensor:
        assert self.own_loss is not None
        loss = self.own_loss(self.module, batch.content if isinstance(batch, OwnBatch) else batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            told = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigError(f"data.loss: the function returned {told}.", hint="Return the mean loss of the batch.")
        return loss.reshape(()) * batch.examples

    def count(self, batches: Sequence[Batch | OwnBatch]) -> int:
        """What the loss is a mean over: labels, or examples where the loss is the user's own."""
        return sum(batch.examples if self.own_loss is not None else batch.predicted for batch in batches)


def likeliest(logits: Tensor, mesh: Mesh, cut: tuple[Block, ...]) -> Tensor:
    """The class of the largest logit, of which each rank may have some only."""
    value, at = logits.max(-1)
    if not cut:
        return at
    held = torch.cat([torch.arange(a, z) for a, z in Layout(0, cut).pieces(mesh.rank, mesh.degree)]).to(at.device)
    mine = torch.stack([value.double(), held[at].double()])
    every = [torch.empty_like(mine) for _ in range(mesh.degree)]
    dist.all_gather(every, mine, group=mesh.group)
    values, classes = torch.stack(every, 1)
    return classes.gather(0, values.argmax(0, keepdim=True))[0].long()


def lowered(mesh: Mesh, precision: str) -> Any:
    """Within it, a forward runs in the precision of the configuration."""
    low = AUTOCAST.get(precision)
    return torch.autocast(mesh.device.type, low, enabled=low is not None)


def packing_of(module: nn.Module, call: Call, mesh: Mesh, config: Config) -> Packing | None:
    """How to keep packed documents apart, where that is wanted and a way is found."""
    wanted, causal, precision = config.data.boundaries, config.data.objective == "causal", config.training.precision
    if wanted not in ("auto", "attention"):
        return None
    dtype = next(module.parameters()).dtype

    def outputs(ids: Tensor, more: Mapping[str, Tensor]) -> Tensor:
        with lowered(mesh, precision):
            return logits_of(call.with_ids(module, ids, more))

    trial = Trial(call.words, config.training.seq_len, dtype, _ROUNDED if precision in AUTOCAST else _EXACT)
    found = find_packing(module, outputs, trial, mesh, causal)
    if found is None and wanted == "attention":
        raise ConfigError(
            "data.boundaries is attention, but it cannot be shown that this model keeps packed documents apart "
            "(by position_ids, or a mask of four dims in attention_mask).",
            hint="Use data.boundaries: labels, or data.pack: false.",
        )
    return found


def call_of_padded(module: nn.Module, call: Call, mesh: Mesh, config: Config) -> Call:
    """How to call a module with padded sequences: with a mask if it takes one.

    That is tried, for a plan may have been made without.  Ranks with slices of a sequence must show that padding is
    left out, and may do without a mask where it is.
    """
    sliced = config.parallelism.sequence_parallel

    def outputs(way: Call, batch: Batch) -> Tensor:
        with lowered(mesh, config.training.precision):
            return logits_of(way(module, batch, padded=True))

    off = _ROUNDED if config.training.precision in AUTOCAST else _EXACT
    trial = Trial(call.words, config.training.seq_len, next(module.parameters()).dtype, off)
    for way in dict.fromkeys([call.mask, None] if sliced else [call.mask]):
        chosen = replace(call, mask=way)
        if is_padding_left_out(module, functools.partial(outputs, chosen), trial, mesh, shown=sliced):
            return chosen
    if sliced:
        raise ConfigError(
            "Sequences are padded, and it cannot be shown that this model leaves padding out with slices of a "
            f"sequence at tp={mesh.degree}.",
            hint="Set parallelism.sequence_parallel: false, or train on packed documents (data.pack).",
        )
    raise ConfigError(
        f"Sequences are padded, and this model cannot be run with {call.mask} at tp={mesh.degree}: its plan was made "
        "without.",
        hint="Shard it again, or train on packed documents (data.pack).",
    )


def told_of_packing(model: Model) -> str:
    """What is done about the documents that share a sequence."""
    if model.packing is None:
        return "packed documents: attention goes across their ends; no label does"
    names = [name for name in (model.packing.positions, model.packing.mask) if name is not None]
    return f"packed documents: none sees another (by {' and '.join(names)}, tried out on this model)"


_EXACT, _ROUNDED = 1e-3, 5e-2
"""How far two computations of the same outputs may be apart, relative to their spread."""


def decoder_inputs(module: nn.Module, labels: Tensor) -> Tensor:
    """The target as the decoder is given it: moved by one, as the model itself says."""
    made = getattr(module, "prepare_decoder_input_ids_from_labels", None)
    if made is not None:
        return made(labels=labels)
    start = getattr(getattr(module, "config", None), "decoder_start_token_id", None)
    if start is None:
        raise ConfigError(
            "data.objective is seq2seq, but the model does not say how its decoder begins "
            "(decoder_start_token_id in its config.json)."
        )
    pad = getattr(module.config, "pad_token_id", None) or 0
    return torch.cat([torch.full_like(labels[:, :1], start), labels[:, :-1]], 1).where(labels != IGNORE, pad)


def _other_shape(logits: tuple[int, ...], labels: tuple[int, ...]) -> ConfigError:
    return ConfigError(
        f"The model returns logits of shape {list(logits)}, but the labels have shape {list(labels)}.",
        hint="Does data.objective fit the head? classification and tagging need one for them, as --task gives it.",
    )


def open_module(folder: Path, plan: Plan, *, trust_remote_code: bool = False) -> Source:
    """The source that a sharded folder was made of, by the configuration kept in it, or the function it names."""
    if (folder / "config.json").is_file():
        task = plan.source.get("task") or None
        opened = open_source(str(folder), task=task, trust_remote_code=trust_remote_code)
    else:
        opened = open_source(str(plan.source.get("name", "")))
    check_plan(opened.module, plan, str(folder / PLAN))
    return opened


def make_call(source: Source) -> Call:
    """How to call the forward: as it was traced, with a batch's ids and mask in place of the example's."""
    if isinstance(source.inputs, tuple):
        if len(source.inputs) != 1 or not _is_ids(source.inputs[0]):
            raise _not_text(source, "more than one tensor of token ids")
        return Call(0, None, {}, words=source.inputs[0])
    tensors = {name: value for name, value in source.inputs.items() if isinstance(value, Tensor)}
    mask = "attention_mask" if "attention_mask" in tensors else None
    decoder = "decoder_input_ids" if "decoder_input_ids" in tensors else None
    found = [name for name, value in tensors.items() if name not in (mask, decoder) and _is_ids(value)]
    if len(found) != 1 or len(tensors) != 1 + bool(mask) + bool(decoder):
        raise _not_text(source, ", ".join(tensors))
    takes = inspect.signature(source.module.forward).parameters
    if mask is None and "attention_mask" in takes:
        mask = "attention_mask"
    types = "token_type_ids" if "token_type_ids" in takes else None
    constants = {name: value for name, value in source.inputs.items() if name not in tensors}
    return Call(found[0], mask, constants, decoder, tensors[found[0]], types)


def _is_ids(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2 and value.dtype in (torch.int64, torch.int32)


def _not_text(source: Source, takes: str) -> ConfigError:
    return ConfigError(
        f"{source.name}: its forward takes {takes}; the trainer gives one tensor of token ids.",
        hint="Set data.dataset and data.loss to functions of yours, or write your own loop as in examples/own_loop.py.",
    )


def build(
    source: Callable[[], Source],
    plan: Plan,
    mesh: Mesh,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
    sequence_parallel: bool = False,
    *,
    call: Callable[[Source], Any] = make_call,
    whole: bool = False,
) -> tuple[nn.Module, Any, tuple[Block, ...]]:
    """``(module, how to call it, how its logits are cut)`` of this rank, in train mode, on the mesh's device.

    The logits stay cut where the last thing the forward does is to gather them, which one small forward shows;
    never where they are to be ``whole``.
    """
    gathers = [b for b in output_gathers(plan) if b.side == "output" and b.dim is not None]
    for left_out in (gathers, []) if len(gathers) == 1 and mesh.degree > 1 and not whole else ([],):
        opened = source()
        inputs = divided(opened.inputs, plan) if sequence_parallel else opened.inputs
        module = parallelize(opened.module, plan, mesh, gather_output=not left_out, sequence_parallel=sequence_parallel)
        load_local(module, tensors)
        module.to(mesh.device)
        for tensor in module.buffers():
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
        if not left_out or _ends_in(module, inputs, left_out[0], mesh):
            return module.train(), call(opened), left_out[0].blocks if left_out else ()
    raise AssertionError("the second round has nothing left out")


def _ends_in(module: nn.Module, inputs: Any, gather: Boundary, mesh: Mesh) -> bool:
    """Whether the tensor at the boundary is what the forward returns as logits, with nothing in between."""
    seen: list[Any] = []
    hook = module.get_submodule(gather.module).register_forward_hook(lambda _m, _a, out: seen.append(out))
    try:
        with torch.no_grad(), contextlib.suppress(RuntimeError, ValueError, IndexError, TypeError):
            inputs = moved(inputs, mesh.device)
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
    kinds = {"full": Checkpointed, "selective": Selective}
    for layer in layers if settings.activation_checkpointing != "none" else ():
        give_forward(layer, kinds[settings.activation_checkpointing])
    if settings.compile:
        compile_layers(module, fullgraph=False)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
