"""Random numbers: the same on every tp rank where values are whole, each rank its own where they are cut.

All tp ranks hold the default generator in the same state.  Where a cut region that draws begins, one number is
taken from it, and until the region ends the default generator runs on from that number and the rank::

    whole   ... r1  r2  seed ........................ r3  r4 ...     the same on all ranks
    cut                   `- seed + rank: c1  c2 -'                  different, and of any count

So ranks that draw unequally many numbers (uneven parts) stay together, and the cut numbers are a function of the
whole state: activation checkpointing, which saves and restores that, gets both back.

Code being compiled makes no switches: there, cut regions draw the same numbers on each rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tpconvert.spec.plan import Switch

if TYPE_CHECKING:
    from tpconvert.parallel.mesh import Mesh

SEEDS = 2**32
"""The CPU's generator looks at this many seeds only."""
APART = 0x9E3779B1
"""Between the seeds of two neighbours; odd, so no two ranks share a seed."""


@dataclass(eq=False)
class Streams:
    """The whole stream, while the default generator draws cut numbers."""

    whole: dict[torch.device, Tensor] = field(default_factory=dict)
    running: bool = False
    """Whether a forward began and has not ended."""

    def draw_cut(self, rank: int, device: torch.device) -> None:
        """From now on this rank draws numbers of its own."""
        if torch.compiler.is_compiling():
            return
        seed = int(torch.randint(SEEDS, (), dtype=torch.int64, device="cpu"))  # from the CPU: no wait for a GPU
        devices = {torch.device("cpu"), device}
        self.whole = {d: generator(d).get_state() for d in devices}
        for d in devices:
            generator(d).manual_seed((seed + rank * APART) % SEEDS)

    def draw_whole(self) -> None:
        """From now on all ranks draw the same numbers."""
        if torch.compiler.is_compiling():
            return
        for device, state in self.whole.items():
            generator(device).set_state(state)
        self.whole = {}


def generator(device: torch.device) -> torch.Generator:
    """The default generator of a device."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    return module.default_generators[module.current_device() if device.index is None else device.index]


@dataclass(frozen=True)
class Turn:
    """Hook: one switch."""

    mesh: Mesh
    cut: bool

    def __call__(self, module: nn.Module, *_: Any) -> None:
        """Change streams, in training only."""
        if module.training:
            turn(self.mesh, self.cut)


@dataclass(frozen=True)
class Frame:
    """Hooks of the root: a forward begins and ends whole."""

    mesh: Mesh

    def begin(self, module: nn.Module, args: Any) -> None:
        """Return to the whole stream where the last forward failed in a cut region.

        A recomputation may have stopped within one too; then the generator is whole again already.
        """
        streams = self.mesh.streams
        if streams.running:
            streams.draw_whole()
        streams.running, streams.whole = True, {}

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Return to the whole stream."""
        self.mesh.streams.draw_whole()
        self.mesh.streams.running = False


def turn(mesh: Mesh, cut: bool) -> None:
    """Draw cut numbers, or whole ones, from now on."""
    if mesh.degree == 1 or mesh.dry:
        return
    if cut:
        mesh.streams.draw_cut(mesh.rank, mesh.device)
    else:
        mesh.streams.draw_whole()


def add_switches(root: nn.Module, switches: Iterable[Switch], mesh: Mesh) -> None:
    """Hook each switch to its module: first of the input hooks, last of the output hooks."""
    switches = tuple(switches)
    for switch in switches:
        module, hook = root.get_submodule(switch.module), Turn(mesh, switch.cut)
        if switch.side == "input":
            module.register_forward_pre_hook(hook, prepend=True)
        else:
            module.register_forward_hook(hook)
    if switches:
        frame = Frame(mesh)
        root.register_forward_pre_hook(frame.begin, prepend=True)
        root.register_forward_hook(frame.end)


def seed_ranks(seed: int, mesh: Mesh) -> None:
    """Bring the tp ranks of one dp rank into the same random state, those of different dp ranks into different ones."""
    torch.manual_seed((seed + mesh.dp_rank * APART) % SEEDS)
