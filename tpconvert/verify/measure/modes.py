"""How a model is run to be compared: in float64 throughout, without dropout, with no parameter at a special value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tpconvert.analyze.capture.run import descending_into_functionals
from tpconvert.analyze.trace.entering import Entered
from tpconvert.analyze.trace.trees import tensor_slots
from tpconvert.source.blame import told

DROPOUTS = frozenset(
    f"{kind}dropout{end}" for kind in ("", "alpha_", "feature_", "feature_alpha_", "native_") for end in ("", "_")
)

MASKS = frozenset(["bernoulli", "bernoulli_"])
"""Draws of zeros and ones: dropout that is written by hand makes its mask of them."""

CASTS = {Tensor.float: torch.float32, Tensor.half: torch.float16, Tensor.bfloat16: torch.bfloat16}
NAMES = {
    torch.float16: "torch.HalfTensor",
    torch.bfloat16: "torch.BFloat16Tensor",
    torch.float32: "torch.FloatTensor",
    torch.float64: "torch.DoubleTensor",
}


class Widened(TorchFunctionMode):
    """``dtype`` wherever the code asks for a narrower one: norms, rotary tables, softmax, a part in bfloat16.

    Models that go down to float32 inside would part at 1e-7 on rounding alone, and a part whose weights were made
    ``dtype`` would be given what its caller casts to the dtype they had.
    """

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.dtype = dtype
        narrow = (torch.bfloat16, torch.float16, torch.float32, torch.complex32, torch.complex64)
        self.wider: dict[Any, Any] = {d: self.like(d) for d in narrow if d.itemsize < self.like(d).itemsize}
        self.wider |= {NAMES[d]: NAMES[dtype] for d in NAMES if d in self.wider}

    def __enter__(self) -> Widened:
        self.default = torch.get_default_dtype()
        if self.default in self.wider:  # of what a forward makes from nothing, or of integers and a number
            torch.set_default_dtype(self.dtype)
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        torch.set_default_dtype(self.default)

    def like(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype itself for real numbers, for complex ones theirs."""
        return self.dtype.to_complex() if dtype.is_complex else self.dtype

    def made(self, tensor: Tensor) -> Tensor:
        """A tensor of floating or complex numbers in this dtype, wider ones too; any other as it is."""
        given = tensor.dtype
        return tensor.to(self.like(given)) if given.is_floating_point or given.is_complex else tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in CASTS:
            return args[0].to(self.widened(CASTS[func]))
        return func(*map(self.widened, args), **{k: self.widened(v) for k, v in (kwargs or {}).items()})

    def widened(self, value: Any) -> Any:
        """An argument, a wider dtype in the place of one that is too narrow."""
        if isinstance(value, torch.dtype):
            return self.wider.get(value, value)
        if isinstance(value, str | type):  # tensor types, as ``Tensor.type`` takes them
            name = value if isinstance(value, str) else f"{value.__module__}.{value.__name__}"
            return self.wider.get(name, value)
        return value


class Exact(Widened):
    """Widened, and without dropout."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__(dtype)
        self.rates: list[float] = []
        """The rate of each dropout that was left out, 0 where it was not in training mode."""

    def __enter__(self) -> Exact:
        self.descending = descending_into_functionals()
        self.descending.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.descending.__exit__(None, None, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in DROPOUTS:
            self.rates.append(rate_of(*args, **kwargs))
            kept = args[0] if args else kwargs["input"]
            return (kept, torch.ones_like(kept, dtype=torch.bool)) if name == "native_dropout" else kept
        if name == "scaled_dot_product_attention":
            rate, kwargs, args = _without_dropout(args, kwargs)
            self.rates += [rate] if rate else []
        if name in MASKS:
            return _likely(name, *args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs)


def rate_of(input: Any = None, p: float = 0.5, training: bool = True, *_: Any, **others: Any) -> float:
    """The rate of a call of dropout; ``native_dropout`` and the functions of ``torch`` say ``train``."""
    return float(p) if others.get("train", training) else 0.0


def _likely(name: str, input: Tensor, p: Any = None, **_: Any) -> Tensor:
    """Of zeros and ones those that are more likely: ranks draw other ones for their parts than the whole model does."""
    rate = p if p is not None else 0.5 if name == "bernoulli_" else input
    ones = torch.as_tensor(rate, device=input.device).detach() >= 0.5
    with torch.no_grad():
        drawn = ones.to(input.dtype).expand(input.shape)
        return input.copy_(drawn) if name == "bernoulli_" else drawn.clone()


def _without_dropout(args: Any, kwargs: dict[str, Any]) -> tuple[float, dict[str, Any], Any]:
    """The rate of attention's own dropout, and its arguments without."""
    if len(args) > 4:
        return float(args[4]), kwargs, (*args[:4], 0.0, *args[5:])
    return float(kwargs.get("dropout_p", 0.0)), {**kwargs, "dropout_p": 0.0}, args


def differentiate(loss: Tensor) -> None:
    """``loss.backward()`` with the modes that are on, which torch would put off for its duration.

    A backward may run forwards again: those of checkpoints, and of layers that are reversible.
    """
    with descending_into_functionals(torch.autograd):
        torch.autograd.backward(loss)


def perturb(module: nn.Module, seed: int = 0) -> None:
    """Add seeded noise to every parameter and float buffer, so that no bias is zero and no norm weight one.

    Default initialisation hides faults.  Masks stay masks: infinite and huge entries, and integer and boolean
    buffers, are left alone, and what is positive stays so (variances).
    """
    with torch.no_grad():
        for i, tensor in enumerate(_once(module)):
            if not tensor.is_floating_point() or not tensor.numel():
                continue
            generator = torch.Generator().manual_seed(seed * 1_000_003 + i)
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32).to(tensor.dtype)
            plain = tensor.abs() < 1e4
            scale = 0.1 * tensor[plain].std(unbiased=False).clamp(min=0.2, max=1.0) if plain.any() else 0.1
            positive = isinstance(tensor, nn.Parameter) is False and bool((tensor >= 0).all())
            changed = tensor * (1 + 0.1 * noise.clamp(-3, 3)) if positive else tensor + noise * scale
            tensor.copy_(torch.where(plain, changed, tensor))


def _once(module: nn.Module) -> Iterator[Tensor]:
    seen: set[int] = set()
    for tensor in [*module.parameters(), *module.buffers()]:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield tensor


def tensors_of(tree: Any) -> Iterator[tuple[str, Tensor]]:
    """``(slot, tensor)`` in an output."""
    for slot, tensor in tensor_slots(tree):
        yield slot or "output", tensor


def call(module: nn.Module, inputs: Any) -> Any:
    """Call with keyword or positional inputs."""
    return module(**inputs) if isinstance(inputs, Mapping) else module(*inputs)


def takes_gradients(module: nn.Module, inputs: Any, dtype: torch.dtype, training: bool = False) -> bool:
    """Whether a model runs on inputs that have a gradient; a forward may do to them what cannot be differentiated."""
    module.train(training)
    buffers = {n: b.clone() for n, b in module.named_buffers()}
    try:
        with Exact(dtype), torch.random.fork_rng(devices=[]):
            call(module, Entered(inputs).tree)
    except Exception:  # whatever a forward raises
        return False
    finally:
        with torch.no_grad():
            for n, b in module.named_buffers():
                b.copy_(buffers[n])
    return True


def refusal(module: nn.Module, inputs: Any, dtype: torch.dtype) -> str:
    """What a model raises in train mode, which may ask for labels; empty where it runs."""
    module.train()
    try:
        with Exact(dtype), torch.random.fork_rng(devices=[]):
            call(module, inputs)
    except Exception as error:  # whatever a forward raises
        return told(error)
    return ""
