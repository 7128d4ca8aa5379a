"""What a run shows: one line on the console, the same in ``metrics.jsonl`` and in TensorBoard."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from tpconvert.errors import ConfigError
from tpconvert.train.model.flops import Work
from tpconvert.train.settings.config import Logging
from tpconvert.train.shown.profile import Watch

LEAST = 0.005
"""Of a step: a smaller share of its time is not worth a word."""


@dataclass(frozen=True, slots=True)
class Measure:
    """One logged step; time and tokens are those since the line before."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    step_seconds: float
    tokens_per_second: float
    epoch: int
    memory_gib: float
    """Peak of this rank's GPU; 0 on a CPU."""
    data_seconds: float = 0.0
    """Of ``step_seconds``, those in which the step waited for its batch."""
    communication_seconds: float | None = None
    """Those in which nothing was computed while something was sent, by the share last measured; None before."""
    tokens_per_second_per_gpu: float = 0.0
    tflops_per_gpu: float | None = None
    """Of the model's products; None where they are not known."""
    mfu: float | None = None
    """The same as a share of what the GPU could."""

    @property
    def compute_seconds(self) -> float:
        """What remains of ``step_seconds``."""
        return max(self.step_seconds - self.data_seconds - (self.communication_seconds or 0.0), 0.0)

    def to_json(self) -> dict[str, Any]:
        """Every number, those that are not known left out."""
        return {k: v for k, v in (asdict(self) | {"compute_seconds": self.compute_seconds}).items() if v is not None}

    def line(self, steps: int) -> str:
        """The console line.

        >>> Measure(10, 2.5, 3e-4, 0.71, 0.25, 8192.0, 0, 0.0).line(60)
        'step 10/60  loss 2.5000  lr 3.00e-04  grad norm 0.710  8,192 tokens/s  0.250 s/step'
        """
        width = len(str(steps))
        memory = f"  {self.memory_gib:.1f} GiB" if self.memory_gib else ""
        rate = f"  {self.tflops_per_gpu:.4g} TFLOP/s" if self.tflops_per_gpu is not None else ""
        mfu = f"  MFU {self.mfu:.1%}" if self.mfu is not None else ""
        return (
            f"step {self.step:>{width}}/{steps}  loss {self.loss:.4f}  lr {self.lr:.2e}  "
            f"grad norm {self.grad_norm:.3f}  {self.tokens_per_second:,.0f} tokens/s  "
            f"{self.step_seconds:.3f} s/step{self._split()}{rate}{mfu}{memory}"
        )

    def _split(self) -> str:
        """What else than computing a step spends its time on, where that is seen."""
        parts = (("communication", self.communication_seconds), ("data", self.data_seconds))
        told = [
            f"{name} {part / self.step_seconds:.0%}" for name, part in parts if (part or 0) >= LEAST * self.step_seconds
        ]
        return f" ({', '.join(told)})" if told else ""


class Metrics:
    """Where measures go on rank 0; on other ranks nothing is opened and nothing written."""

    def __init__(
        self, folder: Path, logging: Logging, steps: int, active: bool, resumed: int = 0, *, out: TextIO | None = None
    ) -> None:
        self._steps, self._out, self._active = steps, out or sys.stdout, active
        self._file: TextIO | None = None
        self._full = False
        self._board: Any = None
        self._clock: Callable[[], float] = time.perf_counter
        self._since, self._tokens, self._count, self._waited = self._clock(), 0, 0, 0.0
        self._done = resumed
        self.work = Work()
        self.watch: Watch | None = None
        self._bar: Bar | None = None
        if not active:
            return
        if self._out.isatty():
            self._bar = Bar(self._out, steps, resumed)
        path = folder / "metrics.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if logging.jsonl:
                _forget_after(path, resumed)
                self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written ({error.strerror}).", hint="Remove it.") from None
        if logging.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=resumed + 1)

    def say(self, text: str) -> None:
        """Print a line, on rank 0; that nobody can read it is no reason to end a run."""
        with contextlib.suppress(OSError):
            if self._bar is not None:
                self._bar.say(text)
            elif self._active:
                print(text, file=self._out, flush=True)

    def _keep(self, step: int, values: Mapping[str, Any]) -> None:
        """Write the values of a step to the files; on a full disk they are told to be missing, once."""
        try:
            if self._file is not None:
                print(json.dumps({"step": step, **values}), file=self._file, flush=True)
            if self._board is not None:
                for name, value in values.items():
                    self._board.add_scalar(name, value, step)
                self._board.flush()
        except OSError as error:
            if not self._full:
                self.say(f"METRICS NOT WRITTEN: {error.strerror or error}. Training goes on.")
            self._full = True

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what a step waits for before it can begin."""
        start = self._clock()
        try:
            yield
        finally:
            self._waited += self._clock() - start

    @contextlib.contextmanager
    def stepping(self, step: int) -> Iterator[None]:
        """Around a step, which may be profiled."""
        if self.watch is None:
            yield
            return
        resume = self.pause()
        self.watch.begin(step)
        resume()
        try:
            yield
        finally:
            resume = self.pause()
            told = self.watch.end(step)
            resume()
        if told:
            self.say(told)

    def count(self, tokens: int) -> None:
        """Note a finished step of ``tokens`` over all ranks."""
        self._tokens += tokens
        self._count += 1
        self._done += 1
        if self._bar is not None:
            self._bar.advance()

    def log(
        self,
        step: int,
        *,
        loss: float,
        lr: float,
        grad_norm: float,
        epoch: int,
        memory_gib: float = 0.0,
    ) -> Measure:
        """Write one line everywhere and begin to count anew."""
        now = self._clock()
        seconds = max(now - self._since, 1e-9)
        each, sending = seconds / max(self._count, 1), self.watch.share if self.watch is not None else None
        measure = Measure(
            step,
            loss,
            lr,
            grad_norm,
            each,
            self._tokens / seconds,
            epoch,
            memory_gib,
            data_seconds=min(self._waited, seconds) / max(self._count, 1),
            communication_seconds=None if sending is None else sending * each,
            tokens_per_second_per_gpu=self._tokens / seconds / self.work.gpus,
            tflops_per_gpu=self.work.rate(each),
            mfu=self.work.share(each),
        )
        self._since, self._tokens, self._count, self._waited = now, 0, 0, 0.0
        self.say(measure.line(self._steps))
        self._keep(step, {name: value for name, value in measure.to_json().items() if name != "step"})
        return measure

    def evaluated(self, step: int, found: Mapping[str, float] | None) -> None:
        """Write what was measured on the held-out set; None for an evaluation that was given up."""
        if found is None:
            return
        told = "  ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in found.items())
        self.say(f"step {step:>{len(str(self._steps))}}/{self._steps}  {told}")
        self._keep(step, found)

    def pause(self) -> Callable[[], None]:
        """Stop the clock, for a save; the function that is returned starts it again."""
        at = self._clock()

        def resume() -> None:
            self._since += self._clock() - at

        return resume

    def close(self) -> None:
        """Close the files."""
        if self.watch is not None and (told := self.watch.close(self._done)):
            self.say(told)
        if self._bar is not None:
            self._bar.close()
        with contextlib.suppress(OSError):
            if self._file is not None:
                self._file.close()
        with contextlib.suppress(OSError):
            if self._board is not None:
                self._board.close()


class Bar:
    """A progress bar below the lines, on a terminal."""

    def __init__(self, out: TextIO, steps: int, done: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

        columns = ("training", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=Console(file=out), transient=True)
        self._task = self._bar.add_task("training", total=steps, completed=done)
        self._bar.start()

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def advance(self) -> None:
        """One step more is done."""
        self._bar.advance(self._task)

    def close(self) -> None:
        """Take the bar away."""
        self._bar.stop()


def _forget_after(path: Path, step: int) -> None:
    """Drop the lines of steps after ``step``: a resumed run writes them again."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):  # the last line of a run that was killed while it wrote
            continue
    path.write_text("".join(kept), encoding="utf-8")
