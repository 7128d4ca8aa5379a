"""Uses of the elementwise ops."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.rules.one import Case, bits, case, numbers, places, positive

X, Y, Z = (3, 5), (5, 7), (3, 5, 7)


def inplace(name: str, *extra: object):  # type: ignore[no-untyped-def]
    """``x.clone().name_(...)``."""
    return lambda x, *more: getattr(x.clone(), name)(*more, *extra)


def unary(names: str, operand: object = X) -> dict[str, list[Case]]:
    """Elementwise ops of one operand, tensor methods, functions of torch or of ``F``."""
    out = {}
    for name in names.split():
        home = next(h for h in (Tensor, torch, F) if hasattr(h, name))
        out[name] = [case(getattr(home, name), operand)]
    return out


def binary(names: str, left: object = X, right: object = (5,)) -> dict[str, list[Case]]:
    """Elementwise ops of two operands, one of which is broadcast, and of an operand and a number."""
    out = {}
    for name in names.split():
        home = next(h for h in (Tensor, torch) if hasattr(h, name))
        out[name] = [case(getattr(home, name), left, right)]
    return out


ELEMENTWISE: dict[str, list[Case]] = {
    **unary("neg __neg__ float double half bfloat16 long int short bool positive detach clone contiguous cpu"),
    **unary("square expm1 log1p abs gelu silu relu mish hardswish relu6 hardtanh leaky_relu elu selu celu tanh"),
    **unary("sigmoid softplus logsigmoid softsign softshrink"),
    **unary("hardsigmoid hardshrink nan_to_num isfinite isinf isnan logical_not zeros_like ones_like"),
    **unary("exp erf floor sin rsqrt ceil sqrt log", positive(*X)),
    **binary("mul multiply sub subtract add maximum minimum lerp logical_and logical_or atan2"),
    **binary("div true_divide divide __truediv__ __rtruediv__ __rdiv__ __mod__ __rmod__ remainder"),
    **binary("__mul__ __rmul__ __add__ __radd__ __sub__ __rsub__ __eq__ __ne__ __lt__ __gt__ __le__ __ge__"),
    **binary("pow float_power __pow__ __rpow__", positive(*X), positive(5)),
    **binary("__and__ __rand__ __or__ __ror__ __xor__", bits(3, 5), bits(5)),
    **binary("__floordiv__ __rfloordiv__ floor_divide", places(3, 5, below=4) + 1, places(5, below=4) + 1),
    **binary("__lshift__ __rshift__", places(3, 5, below=4), places(5, below=4)),
}


def elementwise() -> dict[str, list[Case]]:
    out = {name: list(uses) for name, uses in ELEMENTWISE.items()}
    fills = {"fill_": (0.3,)}
    for name in ["normal_", "uniform_", "bernoulli_", "exponential_"]:
        out[name] = [case(lambda x, n=name: x + 0 * getattr(x.detach().clone(), n)(), X)]
    out["empty_like"] = [case(lambda x: x + torch.empty_like(x.detach()).fill_(0.3), X)]  # unfilled, it may hold a NaN
    for name in ["rand_like", "randn_like", "bernoulli"]:
        out[name] = [case(lambda x, n=name: x + 0 * getattr(torch, n)(x.detach().abs().clamp(0, 1)), positive(*X))]
    for name in ["detach_", "zero_", "erfinv_", "fill_", "requires_grad_"]:
        out[name] = [case(inplace(name, *fills.get(name, ())), X)]
    out["lerp"] = [case(lambda x, y: torch.lerp(x, y, 0.3), X, (5,)), case(torch.lerp, X, X, (5,))]
    for name in ["add", "sub", "mul", "div", "pow"]:
        operand = positive(*X) if name == "pow" else X
        out[name] += [
            case(inplace(f"{name}_"), operand, positive(5)),
            case(lambda x, n=name: getattr(torch, n)(x, 2.0), operand),
            case(inplace(f"__i{'truediv' if name == 'div' else name}__", 2.0), operand),
        ]
        out[f"{name}_"] = [case(inplace(f"{name}_"), operand, positive(5))]
    out["sub"] += [case(lambda x, y: torch.sub(x, y, alpha=3.0), X, (5,)), case(lambda x: x - 0.0, X)]
    out["add"] += [case(lambda x, y: x.add(y, alpha=3.0), X, (5,)), case(lambda x, y: torch.add(x, y), (3, 1), (5,))]
    out["div"] += [case(lambda x: torch.div(x, 0.3, rounding_mode="floor"), X)]
    out["mul"] += [case(lambda x: x * x, X), case(lambda x, y: x * y * x, X, (5,))]
    out["__rsub__"] += [case(lambda x: 2.0 - x, X)]
    out["__rdiv__"] += [case(lambda x: 2.0 / x, X)]
    for name in ("__iand__", "__ior__"):
        out[name] = [case(inplace(name), bits(3, 5), bits(5))]
    out["__invert__"] = [case(Tensor.__invert__, bits(3, 5))]
    out |= {
        "masked_fill": [
            case(lambda x, m: x.masked_fill(m, 0.0), X, bits(5)),
            case(lambda x, m: x.masked_fill(m, -2.0), X, bits(3, 5)),
            case(lambda x, m: x.clone().masked_fill_(m, 3.0), X, bits(3, 5)),
            case(lambda x, m, v: x.masked_fill(m, v), X, bits(3, 5), ()),
        ],
        "where": [case(torch.where, bits(3, 5), X, (5,)), case(lambda m, x: torch.where(m, x, 0.0), bits(5), X)],
        "addcmul": [
            case(torch.addcmul, X, (5,), X),
            case(lambda x, y, z: x.clone().addcmul_(y, z, value=2.0), X, (5,), X),
        ],
        "clamp": [case(lambda x: x.clamp(-0.3, 0.4), X), case(lambda x, y: x.clamp(min=y), X, (5,))],
        "clip": [case(lambda x: x.clip(min=0.0), X)],
        "threshold": [case(lambda x: F.threshold(x, 0.2, -1.0), X)],
        "prelu": [case(F.prelu, Z, (5,)), case(F.prelu, Z, (1,)), case(F.prelu, Z, ())],
        "isin": [case(torch.isin, places(3, 5, below=9), places(7, below=9))],
        "bucketize": [case(torch.bucketize, X, torch.linspace(-1, 1, 7, dtype=torch.float64))],
        "searchsorted": [
            case(lambda x, s: torch.searchsorted(s, x), X, torch.linspace(-1, 1, 7, dtype=torch.float64)),
            case(lambda x, s: torch.searchsorted(s, x), X, numbers(3, 7).sort(-1).values),
        ],
        "copy_": [case(inplace("copy_"), X, (5,))],
        "full_like": [case(lambda x: torch.full_like(x, 0.3), X)],
        "to": [
            case(lambda x: x.to(torch.int64), X),
            case(lambda x: x.to(torch.float64), X),
            case(lambda x: x.to(torch.float32), X),
            case(lambda x: x.to("cpu"), X),
        ],
        "type": [case(lambda x: x.type(torch.float32), X)],
        "type_as": [case(lambda x, y: x.type_as(y), X, (7,))],
        ".real": [case(lambda x: torch.view_as_complex(x).real, (3, 5, 2))],
        ".imag": [case(lambda x: torch.view_as_complex(x).imag, (3, 5, 2))],
        "conj": [case(lambda x: torch.view_as_complex(x).conj().real, (3, 5, 2))],
        "conj_physical": [case(lambda x: torch.view_as_complex(x).conj_physical().real, (3, 5, 2))],
        "resolve_conj": [case(lambda x: torch.view_as_complex(x).conj().resolve_conj().real, (3, 5, 2))],
        "resolve_neg": [case(lambda x: torch.view_as_complex(x).conj().imag.resolve_neg(), (3, 5, 2))],
        ".data": [case(lambda x: x.data, X)],
        "complex": [case(torch.complex, X, (5,))],
        "polar": [case(torch.polar, X, X)],
        "broadcast_tensors": [case(torch.broadcast_tensors, (3, 1), (5,))],
        "dropout": [case(lambda x: F.dropout(x, 0.0), X)],
        "dropout_": [case(lambda x: F.dropout(x.clone(), 0.0, inplace=True), X)],
        "alpha_dropout": [case(lambda x: F.alpha_dropout(x, 0.0), X)],
        "feature_dropout": [case(lambda x: F.dropout1d(x, 0.0), Z)],
        "feature_alpha_dropout": [case(lambda x: F.feature_alpha_dropout(x, 0.0), Z)],
        "native_dropout": [case(lambda x: torch.native_dropout(x, 0.0, True), X)],
    }
    return out
