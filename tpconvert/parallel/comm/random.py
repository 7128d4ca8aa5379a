"""Random numbers: the same on every tp rank where values are whole, each rank its own where they are cut.

All tp ranks hold the default generator in the same state.  Where a cut region that draws begins, one number is
taken from it, and until the region ends the default generator runs on from that number and the rank::

    whole   ... r1  r2  seed ........................ r3  r4 ...     the same on all ranks
    cut                   `- seed + rank: c1  c2 -'                  different, and of any count

So ranks that draw unequally many numbers (uneven parts) stay together, and the cut numbers are a function of the
whole state: activation checkpointing, which saves and restores that, gets both back.

Streams are changed while any part of the model is in training mode, dropout alone say; where a forward draws cut
numbers in evaluation too, always.  Code being compiled makes no switches: there, cut regions draw the same numbers on
each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tpconvert.spec.plan import Switch

if TYPE_CHECKING:
    from tpconvert.parallel.comm.mesh import Mesh

SEEDS = 2**32
"""The CPU's generator looks at this many seeds only; what a seed has above them is free to mark a cut stream."""
CUT = 0x74706375
"""The mark.  Being in the generator's own state, it is saved and restored with it."""
APART = 0x9E3779B1
"""Between the seeds of two neighbours; odd, so no two ranks share a seed."""


@dataclass(eq=False)
class Tape:
    """What a forward that is recorded as a CUDA graph draws from: a graph knows generators, and no seeds.

    There is a generator for each time that the forward begins to draw cut numbers, in this order; before each replay
    they are given the seeds that the forward would have taken.
    """

    rank: int
    whole: torch.Generator
    """The state of the device's generator."""
    cuts: tuple[torch.Generator, ...]
    begun: int = 0
    """Times that cut numbers were drawn."""
    cut: bool = False

    def turn(self, cut: bool) -> None:
        """From now on draw cut numbers, or whole ones."""
        device = generator(self.whole.device)
        if cut:
            device.graphsafe_set_state(self.cuts[self.begun])
            self.begun += 1
        else:
            device.graphsafe_set_state(self.whole)
        self.cut = cut

    def seed(self) -> None:
        """Make ready for a replay."""
        for each in self.cuts:
            each.manual_seed(cut_seed(self.rank))


def cut_seed(rank: int) -> int:
    """The seed of a cut stream that begins now; the whole stream of the CPU moves on by one number."""
    return CUT * SEEDS + (drawn(torch.default_generator) + rank * APART) % SEEDS


def drawn(source: torch.Generator) -> int:
    """A seed from a generator of the CPU, so that no GPU is waited for; no mode takes it for a draw of the model's."""
    with torch._C.DisableTorchFunction():
        return int(torch.randint(SEEDS, (), dtype=torch.int64, device="cpu", generator=source))


@dataclass(eq=False)
class Streams:
    """Which stream the default generator draws from, and the whole one while it draws cut numbers."""

    whole: dict[torch.device, Tensor] = field(default_factory=dict)
    outer: list[bool] = field(default_factory=list)
    """Whether numbers were cut around each module that is running."""
    on: bool = False
    """Whether the root's last forward changed streams."""
    held: bool = False
    """Whether all ranks draw the whole numbers everywhere, as the whole model does: to be compared with it."""
    begun: int = 0
    """Times that cut numbers were drawn."""
    tape: Tape | None = None
    """While a forward is recorded as a CUDA graph: in place of seeds."""

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Make no switches."""
        self.held = True
        try:
            yield
        finally:
            self.held = False

    @property
    def cut(self) -> bool:
        """Whether numbers are drawn cut now."""
        return self.tape.cut if self.tape is not None else torch.default_generator.initial_seed() // SEEDS == CUT

    def draw(self, cut: bool, rank: int, device: torch.device) -> None:
        """From now on draw cut numbers, or whole ones."""
        if cut == self.cut:
            return
        if self.tape is not None:
            self.tape.turn(cut)
        elif cut:
            seed, self.begun = cut_seed(rank), self.begun + 1
            self.whole = {d: generator(d).get_state() for d in {torch.device("cpu"), device}}
            for d in self.whole:
                generator(d).manual_seed(seed)
        else:
            for d, state in self.whole.items():
                generator(d).set_state(state)
            self.whole = {}

    @contextmanager
    def sharing(self, rank: int) -> Iterator[Callable[[], int]]:
        """Within it, what is yielded gives seeds that are the same on all tp ranks, though numbers be drawn cut.

        A forward seeds its generators with them.  Where numbers were cut, they are again when it has ended.
        """
        cut, whole, cpu = self.cut, dict(self.whole), torch.device("cpu")
        source = torch.default_generator
        if cut and whole:
            source = torch.Generator().set_state(whole[cpu])
        seeds: list[torch.Generator] = []

        def seed() -> int:
            if not seeds:
                seeds.append(torch.Generator().manual_seed(drawn(source)))
            return drawn(seeds[0])

        try:
            yield seed
        finally:
            if cut and whole and seeds:
                self.whole = whole | {cpu: source.get_state()}
            if cut and not self.cut:
                for device in whole:
                    generator(device).manual_seed(CUT * SEEDS + (seed() + rank * APART) % SEEDS)


def generator(device: torch.device) -> torch.Generator:
    """The default generator of a device."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    return module.default_generators[module.current_device() if device.index is None else device.index]


def turn(mesh: Mesh, cut: bool) -> None:
    """Draw cut numbers, or whole ones, from now on."""
    if mesh.degree > 1 and not mesh.dry and not mesh.streams.held and not torch.compiler.is_compiling():
        mesh.streams.draw(cut, mesh.rank, mesh.device)


@dataclass(frozen=True)
class Turn:
    """Hook: one switch."""

    mesh: Mesh
    cut: bool

    def __call__(self, module: nn.Module, *_: Any) -> None:
        """Change streams."""
        if module.training or self.mesh.streams.on:
            turn(self.mesh, self.cut)


@dataclass(frozen=True)
class Within:
    """Hooks of a module that draws cut, or whole, from its input to its output, and then as around it."""

    mesh: Mesh
    cut: bool

    def enter(self, module: nn.Module, args: Any) -> None:
        """Change streams and remember the one around."""
        if (module.training or self.mesh.streams.on) and not torch.compiler.is_compiling():
            self.mesh.streams.outer.append(self.mesh.streams.cut)
            turn(self.mesh, self.cut)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Return to the stream around."""
        on = module.training or self.mesh.streams.on
        if on and not torch.compiler.is_compiling() and self.mesh.streams.outer:
            turn(self.mesh, self.mesh.streams.outer.pop())


@dataclass(frozen=True)
class Frame:
    """Hooks of the root: a forward begins and ends whole, also after one that failed in a cut region."""

    mesh: Mesh
    always: bool

    def __call__(self, module: nn.Module, *_: Any) -> None:
        """Return to the whole stream."""
        if not torch.compiler.is_compiling():
            self.mesh.streams.on = self.always or any(m.training for m in module.modules())
            self.mesh.streams.outer.clear()
            turn(self.mesh, False)


def add_switches(root: nn.Module, switches: Iterable[Switch], mesh: Mesh) -> None:
    """Hook each switch to its module: first of the input hooks, last of the output hooks."""
    of_module: dict[str, dict[str, bool]] = {}
    switches = list(switches)
    for switch in switches:
        of_module.setdefault(switch.module, {})[switch.side] = switch.cut
    for path, sides in of_module.items():
        module = root.get_submodule(path)
        if sides in ({"input": True, "output": False}, {"input": False, "output": True}):
            within = Within(mesh, sides["input"])
            module.register_forward_pre_hook(within.enter, prepend=True)
            module.register_forward_hook(within.leave)
            continue
        if "input" in sides:
            module.register_forward_pre_hook(Turn(mesh, sides["input"]), prepend=True)
        if "output" in sides:
            module.register_forward_hook(Turn(mesh, sides["output"]))
    if of_module:
        frame = Frame(mesh, any(s.always for s in switches))
        root.register_forward_pre_hook(frame, prepend=True)
        root.register_forward_hook(frame, always_call=True)


def draws_apart(module: nn.Module) -> bool:
    """Whether ranks begin to draw numbers of their own here."""
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return any(isinstance(o, Turn | Within) and o.cut for o in (getattr(hook, "__self__", hook) for hook in hooks))


def meshes_of(root: nn.Module) -> list[Mesh]:
    """The meshes of the converted modules within ``root`` that change streams."""
    hooks = [hook for module in root.modules() for hook in module._forward_pre_hooks.values()]
    return list({id(h.mesh): h.mesh for h in hooks if isinstance(h, Frame)}.values())


def seed_ranks(seed: int, mesh: Mesh) -> None:
    """Bring the tp ranks of one dp rank into the same random state, those of different dp ranks into different ones."""
    torch.manual_seed((seed + mesh.dp_rank * APART) % SEEDS)
