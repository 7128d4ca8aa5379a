"""How a model is told that packed documents are not to see one another: found by trying, not by its name.

Two documents are run side by side in one sequence, in each way that the forward's arguments allow, and the outputs
compared: each document's must not move when the other changes, and must be those of the document by itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from tpconvert.parallel import Mesh
from tpconvert.train.data.batch import Batch
from tpconvert.train.together.ranks import gathered

Kind = Literal["none", "bool", "float"]
_LENGTH = 6
"""Tokens of a tried document, times tp."""
_LEAK, _SEEN = 1e-6, 1e-4
"""Relative to the spread of the outputs: what may move that must not, and what must where nothing is done."""


@dataclass(frozen=True, slots=True)
class Packing:
    """The arguments that keep documents apart."""

    positions: str | None = None
    """Takes the place of each token in its document."""
    mask: str | None = None
    """Takes a block-diagonal mask ``[B, 1, T, T]``."""
    kind: Kind = "none"
    """Of the mask: True where attention goes, or numbers that are added."""
    causal: bool = True
    """Whether a mask leaves out what comes later."""

    def arguments(self, documents: Tensor, positions: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """What to call the forward with, beside the ids."""
        given = {self.positions: positions} if self.positions is not None else {}
        if self.mask is None:
            return given
        seen = documents[:, None, :, None] == documents[:, None, None, :]
        if self.causal:
            seen = seen & seen.new_ones(seen.shape[-2:]).tril()
        if self.kind == "float":
            seen = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)
        return given | {self.mask: seen}


def ways(module: nn.Module, causal: bool) -> Iterator[Packing]:
    """What might keep documents apart, by the names of the forward's arguments; the cheapest first."""
    takes = inspect.signature(module.forward).parameters
    positions = "position_ids" if "position_ids" in takes else None
    mask = "attention_mask" if "attention_mask" in takes else None
    if positions is not None:
        yield Packing(positions)
    kinds: tuple[Kind, ...] = ("bool", "float")
    for kind in kinds if mask is not None else ():
        yield Packing(positions, mask, kind, causal)


Run = Callable[[Tensor, Mapping[str, Tensor]], Tensor]
"""The outputs ``[B, T, ...]`` for ids and further arguments."""


def find_packing(module: nn.Module, run: Run, trial: Trial, mesh: Mesh, causal: bool) -> Packing | None:
    """The first way in which documents are proved to be apart; None where there is none."""
    training = module.training
    module.eval()
    try:
        with torch.no_grad():
            for way in ways(module, causal):
                if all(gathered(mesh, _is_proved(run, way, trial, mesh))):
                    return way
    finally:
        module.train(training)
    return None


@dataclass(frozen=True, slots=True)
class Trial:
    """What a way is tried with."""

    words: Tensor
    """Ids that the model knows."""
    seq_len: int
    dtype: torch.dtype
    """Of the parameters."""
    off: float
    """Largest difference of what is computed anew, relative to the spread of the outputs."""


def is_padding_left_out(
    module: nn.Module, run: Callable[[Batch], Tensor], trial: Trial, mesh: Mesh, *, shown: bool = True
) -> bool:
    """Whether the outputs for a text are the same with padding after it as without, and whatever stands there.

    Unless that is to be ``shown``, it is enough that there are outputs.
    """
    short = trial.seq_len // 2 // mesh.degree * mesh.degree
    text, other = _texts(trial, 2, 2 * short, mesh)

    def outputs(ids: Tensor) -> Tensor:
        used = (torch.arange(ids.shape[1], device=mesh.device) < short).long()[None]
        out = run(Batch(ids, text[:, :short], used))
        return out[:, :short] if out.dim() > 2 else out

    training = module.training
    module.eval()
    try:
        with torch.no_grad():
            alone, one = outputs(text[:, :short]), outputs(text)
            another = outputs(torch.cat([text[:, :short], other[:, short:]], 1))
            good = not shown or (torch.equal(one, another) and _gap(one, alone) <= trial.off * alone.abs().max().item())
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
        good = False
    finally:
        module.train(training)
    return all(gathered(mesh, good))


def _is_proved(run: Run, way: Packing, trial: Trial, mesh: Mesh) -> bool:
    """Whether a way keeps documents apart, and does nothing else to one that fills the sequence."""
    try:
        return _is_apart(run, way, trial, mesh) and (way.mask is None or _is_plain(run, way, trial, mesh))
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
        return False


def _is_apart(run: Run, way: Packing, trial: Trial, mesh: Mesh) -> bool:
    """Whether documents packed in this way neither see nor push one another, which they do when nothing is done."""
    length = max(1, min(_LENGTH, trial.seq_len // 2 // mesh.degree)) * mesh.degree
    a, b, c = _texts(trial, 3, length, mesh)
    documents = torch.arange(2, device=mesh.device).repeat_interleave(length)[None]
    positions = torch.arange(length, device=mesh.device).repeat(2)[None]
    more = way.arguments(documents, positions, trial.dtype)

    def first_and_second(one: Tensor, other: Tensor, given: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        out = run(torch.cat([one, other], 1), given)
        return out[:, :length], out[:, length:]

    plain = [first_and_second(one, b, {})[1] for one in (a, c)]
    ab, cb, ac = (first_and_second(one, other, more) for one, other in ((a, b), (c, b), (a, c)))
    alone = run(torch.cat([a, b]), {})
    spread = alone.float().std().item()
    seen = _gap(*plain) > _SEEN * spread
    still = max(_gap(ab[1], cb[1]), _gap(ab[0], ac[0])) <= _LEAK * spread
    return seen and still and _gap(torch.cat(ab), alone) <= trial.off * spread


def _is_plain(run: Run, way: Packing, trial: Trial, mesh: Mesh) -> bool:
    """Whether one document as long as the sequence is what it is without the arguments: a mask replaces the model's."""
    length = trial.seq_len // mesh.degree * mesh.degree
    (text,) = _texts(trial, 1, length, mesh)
    positions = torch.arange(length, device=mesh.device)[None]
    plain = run(text, {})
    return _gap(run(text, way.arguments(torch.zeros_like(positions), positions, trial.dtype)), plain) <= (
        trial.off * plain.float().std().item()
    )


def _texts(trial: Trial, count: int, length: int, mesh: Mesh) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    words = trial.words.flatten().cpu()
    return [words[torch.randint(len(words), (1, length), generator=draw)].to(mesh.device) for _ in range(count)]


def _gap(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().max().item()
