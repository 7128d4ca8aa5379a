"""The products of linear layers in float8, by torchao: on GPUs that have it, each about twice as fast as in bf16.

Inputs, weights and gradients are scaled as they are, one scale a tensor; of a cut weight each rank scales its part.
Everything else stays as in bf16, the output head included, which is no repeated layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tpconvert.errors import ConfigError
from tpconvert.parallel import Mesh
from tpconvert.parallel.layers.linear import ColumnParallelLinear, RowParallelLinear
from tpconvert.train.model.forwards import OtherProduct, give_forward
from tpconvert.train.settings.config import Training

Product = Callable[..., Tensor]
_UNIT = 16
"""Float8 products take sizes that are multiples of this."""


def check_fp8(training: Training, mesh: Mesh) -> None:
    """Raise where this device, this installation or this length has no float8."""
    hint = "Use training.precision: bf16."
    if mesh.device.type != "cuda" or torch.cuda.get_device_capability(mesh.device) < (8, 9):
        name = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else mesh.device.type
        raise ConfigError(f"training.precision is fp8, but {name} has no float8 products.", hint=hint)
    try:
        import torchao.float8  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"training.precision is fp8, which needs torchao ({error}).", hint=hint) from None
    if (tokens := training.micro_batch_size * training.seq_len) % _UNIT:
        raise ConfigError(
            f"training.precision is fp8, but micro_batch_size x seq_len is {tokens}, no multiple of {_UNIT}.", hint=hint
        )


def use_fp8(layers: Iterable[nn.Module], *, emulate: bool = False) -> int:
    """Give the linear layers within ``layers`` float8 products where that pays; how many there were."""
    return give_product(layers, _product(emulate))


def give_product(layers: Iterable[nn.Module], product: Product) -> int:
    """Let ``product(x, weight, bias)`` be how linear layers compute; all the same one, so that they compile as one."""
    count = 0
    for part in (part for layer in layers for part in layer.modules()):
        if not isinstance(part, nn.Linear) or not _pays(part.in_features, part.out_features):
            continue
        parallel = isinstance(part, ColumnParallelLinear | RowParallelLinear)
        if not parallel and (type(part).forward is not nn.Linear.forward or "forward" in vars(part)):
            continue  # a layer of the user's that does something else
        count += 1
        part.product = product  # type: ignore[assignment]
        if not parallel:
            give_forward(part, OtherProduct)
    return count


def _pays(inner: int, outer: int) -> bool:
    """Whether a float8 product is faster than one of bf16 with all that is rounded for it, as torchao measured."""
    return not (inner % _UNIT or outer % _UNIT or (inner <= 4096 and outer <= 1024))


def _product(emulate: bool) -> Product:
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args

    shape = nn.Linear(_UNIT, _UNIT, bias=False, device="meta")
    like: Any = Float8Linear.from_float(shape, config=Float8LinearConfig(emulate=emulate))

    def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        y: Tensor = matmul_with_hp_or_float8_args.apply(x, weight.t(), like.linear_mm_config, like.config)
        return y if bias is None else y + bias.to(y.dtype)

    return product
