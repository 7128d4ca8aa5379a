"""Where the time of a step goes, by torch's profiler: every so many steps in short, and once in full if asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from tpconvert.train.settings.config import Profile

_SENDING = ("nccl", "gloo:", "c10d::", "mscclpp")
"""How kernels and calls that send begin, whatever comes before ``Kernel``."""
_TOP = 20

Span = tuple[int, int]
"""Begin and end, in ns."""


@dataclass(frozen=True, slots=True)
class Split:
    """What a profiled stretch was spent on, in seconds."""

    wall: float
    sending: float
    """Something was being sent or received."""
    exposed: float
    """And nothing was computed meanwhile."""
    busy: float
    """Something was computed."""
    kernels: tuple[tuple[str, float, int], ...]
    """The longest: name, seconds, how often."""

    @property
    def hidden(self) -> float:
        """Sent behind what was computed."""
        return self.sending - self.exposed

    def table(self) -> str:
        """For people: the shares, then the longest kernels."""
        rows = [("computing", self.busy), ("communication, exposed", self.exposed)]
        rows += [("communication, hidden", self.hidden), ("neither", max(self.wall - self.busy - self.exposed, 0.0))]
        lines = [f"{self.wall:.3f} s"]
        lines += [f"  {name:24} {seconds:10.4f} s {_share(seconds, self.wall):>7}" for name, seconds in rows]
        lines += ["", f"{'longest':70} {'ms':>10} {'share':>7} {'calls':>7}"]
        for name, seconds, count in self.kernels[:_TOP]:
            lines.append(f"{name[:70]:70} {seconds * 1e3:10.2f} {_share(seconds, self.wall):>7} {count:7}")
        return "\n".join(lines) + "\n"


class Watch:
    """Profiles the steps it is asked to, on one rank: those of ``settings`` in full, each ``every``-th in short."""

    def __init__(self, output: Path, settings: Profile, every: int | None, *, gpu: bool) -> None:
        self.share: float | None = None
        """Of a step's time, what exposed communication took when it was last measured."""
        self._folder, self._settings, self._every = output / "profile", settings, every
        self._kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
        self._running: profile | None = None
        self._first = 0
        """Step that the window in full began with; 0 outside of it."""

    def begin(self, step: int) -> None:
        """Step ``step`` begins."""
        window = step == self._settings.start
        if self._running is None and (window or (self._every and step % self._every == 0)):
            self._first = step if window else 0
            self._running = profile(activities=self._kinds)
            self._running.start()

    def end(self, step: int) -> str:
        """Step ``step`` has ended; what is to be said about it."""
        seen = self._running
        if seen is None or (self._first and step < self._first + self._settings.steps - 1):
            return ""
        self._running = None
        seen.stop()
        held = seen.profiler.kineto_results if seen.profiler is not None else None
        found = split(held.events() if held is not None else ())
        self.share = found.exposed / found.wall if found.wall else None
        return self._write(seen, found, step) if self._first else ""

    def close(self, step: int) -> str:
        """The run is over: a window that is still open ends here."""
        if self._running is not None:
            self._settings = Profile(start=self._first, steps=max(step - self._first + 1, 1))
        return self.end(step)

    def _write(self, seen: profile, found: Split, step: int) -> str:
        stem = self._folder / f"steps-{self._first}-{step}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            seen.export_chrome_trace(f"{stem}.json.gz")
            stem.with_suffix(".txt").write_text(found.table(), encoding="utf-8")
        except (OSError, RuntimeError) as error:  # a full disk is no reason to end a run
            return f"the profile of steps {self._first} to {step} cannot be written: {error}"
        return f"profile of steps {self._first} to {step}, in {stem}.json.gz:\n{found.table().rstrip()}"


def split(events: Sequence[Any]) -> Split:
    """What the profiler's events say: kernels where there is a GPU, else the ops on the CPU."""
    # marks, such as FSDP's, span what runs within them
    on_gpu = [e for e in events if e.device_type().name != "CPU" and not e.is_user_annotation()]
    shown = on_gpu or [e for e in events if e.name().startswith(("aten::", *_SENDING))]
    sending, busy = [], []
    seconds: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for event in shown:
        span = event.start_ns(), event.start_ns() + event.duration_ns()
        (sending if is_sending(event.name()) else busy).append(span)
        seconds[event.name()] += event.duration_ns()
        count[event.name()] += 1
    sending, busy = joined(sending), joined(busy)
    both = _length(joined([*sending, *busy]))
    every = [(e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.duration_ns()]
    wall = max((z for _, z in every), default=0) - min((a for a, _ in every), default=0)
    kernels = tuple((name, ns / 1e9, count[name]) for name, ns in seconds.most_common(_TOP))
    return Split(wall / 1e9, _length(sending) / 1e9, (both - _length(busy)) / 1e9, _length(busy) / 1e9, kernels)


def is_sending(name: str) -> bool:
    """Whether a kernel or call sends to other ranks."""
    return name.lower().startswith(_SENDING)


def joined(spans: Sequence[Span]) -> list[Span]:
    """The same time, as spans in order that do not touch."""
    out: list[Span] = []
    for start, stop in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], stop)
        else:
            out.append((start, stop))
    return out


def _length(spans: Sequence[Span]) -> int:
    return sum(stop - start for start, stop in spans)


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else ""
