"""Parallel layers: real ``nn.Linear`` and ``nn.Embedding`` subclasses whose parameters are a rank's part.

Shapes: B any leading dims, I in, O out, V words; ``_r`` a rank's part::

    column   y_BO_r = x_BI   @ W_O_rI^T + b_O_r                 the output is cut
    row      y_BO   = sum over ranks (x_BI_r @ W_OI_r^T) + b_O  the input is cut
    vocab    y_BI   = sum over ranks (W_V_rI[ids], 0 where another rank holds the word)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from tpconvert.errors import PlanError
from tpconvert.parallel.comm.collectives import Parts, reduce, transformed
from tpconvert.parallel.comm.mesh import Mesh
from tpconvert.parallel.layers.products import (
    dtype_of,
    kept_product,
    lacking,
    reduced_product,
    summed_product,
    was_gathered,
)
from tpconvert.parallel.layers.unsummed import refusing_unsummed

PLAIN = (Tensor, nn.Parameter)
"""Weights that are no class of their own, which may compute products in another way."""
LEAST = 256
"""Tokens of a wave at least: fewer are computed no faster, and summed no faster."""


class ColumnParallelLinear(nn.Linear):
    """A linear layer that computes this rank's part of its output features."""

    tp_whole: tuple[int, int]
    tp_mesh: Mesh
    tp_path: str
    tp_apart = False
    """Whether rows of the output may begin further apart than they are long, as in the loss of cut logits."""
    product = staticmethod(F.linear)
    """How the input meets the weight; training in float8 sets another."""

    def become(self, whole: tuple[int, int], mesh: Mesh, path: str) -> None:
        """Take on the sizes of the part that ``weight`` now is."""
        self.tp_whole, self.tp_mesh, self.tp_path = whole, mesh, path
        self.out_features = self._parameters["weight"].shape[0]

    def forward(self, x_BI: Tensor) -> Tensor:
        """This rank's features; of an input that was gathered from slices, a backward keeps the slice only."""
        weight_OI, bias_O = self.weight, self.bias
        if x_BI.requires_grad and torch.is_grad_enabled() and not self.tp_mesh.dry and not transformed():
            x_BI = refusing_unsummed(x_BI, self.tp_path)
        if self.product is not F.linear:
            return self.product(x_BI, weight_OI, bias_O)
        plain = type(weight_OI) in PLAIN and not self.tp_mesh.dry
        more = lacking(x_BI, weight_OI) if plain and not transformed() else 0
        if not more and not (was_gathered(x_BI) and weight_OI.requires_grad):
            return F.linear(x_BI, weight_OI, bias_O)
        dtype = dtype_of(x_BI, weight_OI)
        weight_OI, bias_O = weight_OI.to(dtype), None if bias_O is None else bias_O.to(dtype)
        y_BO = kept_product(x_BI, weight_OI, bias_O, more)
        return y_BO.contiguous() if more and not self.tp_apart else y_BO

    def extra_repr(self) -> str:
        """The local sizes, then the whole weight's shape and the degree."""
        return f"{super().extra_repr()}, whole={self.tp_whole}, tp={self.tp_mesh.degree}"


class RowParallelLinear(nn.Linear):
    """A linear layer over this rank's part of its input features; the output is summed, then gets the bias once.

    Where ``tp_sums`` is false the output is left a term of the sum, which is made further on.  ``tp_shares`` makes the
    sum of which each rank gets a slice, to which it adds the bias.  With more ``tp_waves`` than one, one wave of tokens
    is summed while the next is computed.  None is one, but two in compiled layers where what is summed is copied
    between GPUs.
    """

    tp_whole: tuple[int, int]
    tp_mesh: Mesh
    tp_sums: bool
    tp_waves: int | None
    tp_shares: Callable[[Tensor], Tensor] | None = None
    tp_hides = False
    """Whether a compiler lets a sum run beside what is computed after it is begun."""
    product = staticmethod(F.linear)
    """How the input meets the weight; training in float8 sets another."""

    def become(
        self,
        whole: tuple[int, int],
        mesh: Mesh,
        sums: bool,
        waves: int | None,
        shares: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Take on the sizes of the part that ``weight`` now is."""
        self.tp_whole, self.tp_mesh, self.tp_sums, self.tp_waves, self.tp_shares = whole, mesh, sums, waves, shares
        self.in_features = self._parameters["weight"].shape[1]

    def forward(self, x_BI: Tensor) -> Tensor:
        """The sum over ranks, or a slice of it, plus the bias."""
        if self.tp_shares is not None:
            y_BO = self.tp_shares(self.product(x_BI, self.weight))
            return y_BO + self.bias.to(y_BO.dtype)  # whose gradient is of this slice, and summed where it is read
        if not self.tp_sums:
            return self.product(x_BI, self.weight, self.bias)
        y_BO = self._summed(x_BI, self.weight)
        bias_O = self._parameters["bias"]  # after the sum it counts on every rank, so not as others read it
        return y_BO if bias_O is None else y_BO + bias_O.to(y_BO.dtype)

    def _summed(self, x_BI: Tensor, weight_OI: Tensor) -> Tensor:
        waves = self._waves(x_BI)
        other = self.product is not F.linear or self.tp_mesh.dry or x_BI.dim() < 2
        if other or (waves == 1 and (type(weight_OI) not in PLAIN or transformed())):
            return reduce(self.product(x_BI, weight_OI), self.tp_mesh)
        if torch.is_autocast_enabled(x_BI.device.type):
            dtype = torch.get_autocast_dtype(x_BI.device.type)
            x_BI, weight_OI = x_BI.to(dtype), weight_OI.to(dtype)
        if waves == 1:
            return summed_product(x_BI, weight_OI, self.tp_mesh)
        y_NO = reduced_product(x_BI.flatten(0, -2), weight_OI, waves, self.tp_mesh)
        return y_NO.view(*x_BI.shape[:-1], len(weight_OI))

    def _waves(self, x_BI: Tensor) -> int:
        waves, peers = self.tp_waves, self.tp_mesh.peers
        if waves == 1 or (waves is None and (peers is None or not self.tp_hides)):
            return 1
        tokens = math.prod(x_BI.shape[:-1])
        if waves is None:
            waves = 2 if tokens * self.out_features * x_BI.element_size() >= 2 * peers.least else 1
        return waves if tokens >= waves * LEAST else 1

    def extra_repr(self) -> str:
        """The local sizes, then the whole weight's shape and the degree."""
        return f"{super().extra_repr()}, whole={self.tp_whole}, tp={self.tp_mesh.degree}"


class VocabParallelEmbedding(nn.Embedding):
    """An embedding that holds this rank's words; ``padding_idx`` stays the number of the whole vocabulary.

    Where ``tp_sums`` is false the output is left a term of the sum, which is made further on.
    """

    tp_whole: tuple[int, int]
    tp_mesh: Mesh
    tp_parts: Parts
    tp_sums: bool

    def become(self, whole: tuple[int, int], mesh: Mesh, sums: bool, parts: Parts) -> None:
        """Take on the sizes of the part that ``weight`` now is."""
        self.tp_whole, self.tp_mesh, self.tp_sums, self.tp_parts = whole, mesh, sums, parts
        self.num_embeddings = self._parameters["weight"].shape[0]

    def forward(self, ids_B: Tensor) -> Tensor:
        """The words' rows, each from the rank that holds it."""
        y_BI = lookup(ids_B, self.weight, self.tp_parts, self.padding_idx)
        return reduce(y_BI, self.tp_mesh) if self.tp_sums else y_BI

    def extra_repr(self) -> str:
        """The local sizes, then the whole weight's shape and the degree."""
        return f"{super().extra_repr()}, whole={self.tp_whole}, tp={self.tp_mesh.degree}"


class DataSyncBatchNorm(nn.SyncBatchNorm):
    """A batch norm over the batches of all dp ranks: tp ranks have the same batch, and of a cut one other channels."""

    tp_mesh: Mesh

    @property
    def process_group(self) -> Any:
        """The ranks that hold the same channels; torch would take all there are."""
        return self.tp_mesh.dp_group

    def forward(self, input: Tensor) -> Tensor:
        """The norm; over this rank's batch where it has all the data."""
        if self.tp_mesh.dp_group is None:
            return _BatchNorm.forward(self, input)
        return super().forward(input)

    def become(self, mesh: Mesh) -> None:
        """Take on the mesh."""
        self.tp_mesh = mesh


def lookup(ids_B: Tensor, weight_VI: Tensor, parts: Parts, padding_idx: int | None = None) -> Tensor:
    """The rows of ``weight_VI`` (a rank's part) for ``ids_B``, zeros for words that other ranks hold.

    An id outside the whole vocabulary is an index error, as it is with the whole weight.
    """
    if not parts.pieces:
        return weight_VI.new_zeros((*ids_B.shape, weight_VI.shape[1]))
    rows_B, held_B = local_rows(ids_B, parts)
    padding = None if padding_idx is None else _local_row(padding_idx % parts.size, parts)
    y_BI = F.embedding(rows_B, weight_VI, padding_idx=padding)
    return y_BI.masked_fill(~held_B.unsqueeze(-1), 0)


def local_rows(ids_B: Tensor, parts: Parts) -> tuple[Tensor, Tensor]:
    """``(row in the rank's part, whether the rank holds it)``.

    The row is 0 where the rank does not hold it, and one past the end where nobody does.
    """
    rows_B = torch.where((ids_B < 0) | (ids_B >= parts.size), sum(stop - start for start, stop in parts.pieces), 0)
    rows_B = rows_B.to(ids_B.dtype)
    held_B = torch.zeros_like(ids_B, dtype=torch.bool)
    at = 0
    for start, stop in parts.pieces:
        inside_B = (ids_B >= start) & (ids_B < stop)
        rows_B = torch.where(inside_B, ids_B - (start - at), rows_B)
        held_B = held_B | inside_B
        at += stop - start
    return rows_B, held_B


def _local_row(index: int, parts: Parts) -> int | None:
    at = 0
    for start, stop in parts.pieces:
        if start <= index < stop:
            return at + index - start
        at += stop - start
    return None


def refuse_unsupported(embedding: nn.Embedding, name: str) -> None:
    """Raise PlanError for the options whose effect needs the whole vocabulary on one rank."""
    options = {
        "max_norm": embedding.max_norm,
        "scale_grad_by_freq": embedding.scale_grad_by_freq,
        "sparse": embedding.sparse,
    }
    for option, value in options.items():
        if value:
            raise PlanError(
                f"{name}: an embedding with {option}={value} cannot be cut by words.",
                hint=f"Use --set {name}.weight=whole.",
            )
