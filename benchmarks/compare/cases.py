"""Which cases are measured."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.compare.case import Case

SIZES = ((8, 4096), (4, 16384))
"""Layers and tokens of the Llama."""
OTHERS = (("bert-large", 24, 8192, 16), ("gpt2-xl", 12, 4096, 4), ("mixtral", 4, 4096, 1), ("vit-l", 24, 6304, 1))
"""Kind, layers, tokens, sequences."""
WAITS = ("mixtral",)
"""Kinds whose forward waits for the GPU, to see which experts have tokens: no CUDA graph can hold that."""
GRAPHED = (("graphed", True),)
"""Forward and backward as one CUDA graph."""
COPIES, NCCL = (("collectives", "copies"),), (("collectives", "nccl"),)
"""What else than ``auto`` two GPUs can do: copy everything into each other's memory, or nothing."""


def network(gpus: int, more: tuple[tuple[tuple[str, object], ...], ...] = ()) -> list[Case]:
    """On real ranks; ``more`` are further options of the converted model."""
    found = []
    for layers, tokens in SIZES:
        whole = Case("whole", layers=layers, tokens=tokens)
        found += [replace(whole, compiled=c, options=o) for c in (False, True) for o in ((), GRAPHED)]
        for tp in (d for d in (2, 4, 8) if d <= gpus):
            base = replace(whole, tp=tp, network=True)
            ours = replace(base, way="converted")
            other = COPIES if tokens <= 4096 else NCCL  # what auto does not do there
            found += [
                replace(ours, compiled=c, options=o, sequence_parallel=s)
                for o in ((), GRAPHED, other, GRAPHED + other)
                for c in (False, True)
                for s in (False, True)
                if o != other or (c and not s)
            ]
            found += [replace(ours, compiled=True, options=o, sequence_parallel=s) for o in more for s in (False, True)]
            found += [
                replace(base, way="megatron"),
                replace(base, way="transformers"),
                replace(base, way="dtensor", compiled=True),
                replace(base, way="fsdp", compiled=True),
            ]
    eight = Case("whole", compiled=True, optimizer=True)
    found += [eight] + [replace(eight, way="converted", tp=tp, network=True) for tp in (2, 4, 8) if tp <= gpus]
    return found


def alone(more: tuple[tuple[tuple[str, object], ...], ...] = ()) -> list[Case]:
    """Rank 0 of a group in which nobody else is."""
    found = []
    for tp in (2, 4):
        base = Case("converted", tp=tp)
        found += [
            base,
            replace(base, compiled=True),
            replace(base, compiled=True, sequence_parallel=True),
            *(replace(base, compiled=True, sequence_parallel=s, options=GRAPHED) for s in (False, True)),
            replace(base, way="megatron"),
            replace(base, way="transformers"),
            replace(base, way="dtensor", compiled=True),
            *(replace(base, compiled=True, options=o) for o in more),
        ]
    found += [
        replace(c, layers=4, tokens=16384) for c in (Case("converted", tp=4, compiled=True, sequence_parallel=True),)
    ]
    found += [Case("converted", tp=1), Case("converted", tp=1, compiled=True)]
    return found


def others() -> list[Case]:
    """Other kinds of models, whole and as rank 0."""
    found = []
    for kind, layers, tokens, rows in OTHERS:
        whole = Case("whole", model=kind, layers=layers, tokens=tokens, batch=rows, compiled=True)
        every = [whole, replace(whole, way="converted", tp=2), replace(whole, way="converted", tp=4)]
        found += every + [replace(case, options=GRAPHED) for case in every if kind not in WAITS]
    return found


def costs() -> list[Case]:
    """One thing changed at a time, as rank 0, compiled, with sequence parallelism."""
    base = Case("converted", tp=2, layers=4, compiled=True, sequence_parallel=True)
    found = [base]
    found += [replace(base, layers=n) for n in (2, 8, 16)]
    found += [replace(base, tokens=n) for n in (2048, 8192, 16384)]
    found += [replace(base, width=w) for w in (0.5, 2)]
    found += [replace(base, tp=n) for n in (4, 8)]
    return found
