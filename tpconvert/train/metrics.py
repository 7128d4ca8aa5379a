"""What a run shows: one line on the console, the same in ``metrics.jsonl`` and in TensorBoard."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from tpconvert.train.config import Logging


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

    def line(self, steps: int) -> str:
        """The console line.

        >>> Measure(10, 2.5, 3e-4, 0.71, 0.25, 8192.0, 0, 0.0).line(60)
        'step 10/60  loss 2.5000  lr 3.00e-04  grad norm 0.710  8,192 tokens/s  0.250 s/step'
        """
        width = len(str(steps))
        memory = f"  {self.memory_gib:.1f} GiB" if self.memory_gib else ""
        return (
            f"step {self.step:>{width}}/{steps}  loss {self.loss:.4f}  lr {self.lr:.2e}  "
            f"grad norm {self.grad_norm:.3f}  {self.tokens_per_second:,.0f} tokens/s  "
            f"{self.step_seconds:.3f} s/step{memory}"
        )


class Metrics:
    """Where measures go on rank 0; on other ranks nothing is opened and nothing written."""

    def __init__(
        self, folder: Path, logging: Logging, *, steps: int, active: bool, out: TextIO | None = None, resumed: int = 0
    ) -> None:
        self._steps, self._out, self._active = steps, out or sys.stdout, active
        self._file: TextIO | None = None
        self._board: Any = None
        self._clock: Callable[[], float] = time.perf_counter
        self._since, self._tokens, self._count = self._clock(), 0, 0
        if not active:
            return
        folder.mkdir(parents=True, exist_ok=True)
        if logging.jsonl:
            path = folder / "metrics.jsonl"
            _forget_after(path, resumed)
            self._file = path.open("a", encoding="utf-8")
        if logging.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=resumed + 1)

    def say(self, text: str) -> None:
        """Print a line, on rank 0."""
        if self._active:
            print(text, file=self._out, flush=True)

    def count(self, tokens: int) -> None:
        """Note a finished step of ``tokens`` over all ranks."""
        self._tokens += tokens
        self._count += 1

    def log(
        self, step: int, *, loss: float, lr: float, grad_norm: float, epoch: int, memory_gib: float = 0.0
    ) -> Measure:
        """Write one line everywhere and begin to count anew."""
        now = self._clock()
        seconds = max(now - self._since, 1e-9)
        measure = Measure(
            step, loss, lr, grad_norm, seconds / max(self._count, 1), self._tokens / seconds, epoch, memory_gib
        )
        self._since, self._tokens, self._count = now, 0, 0
        self.say(measure.line(self._steps))
        if self._file is not None:
            print(json.dumps(asdict(measure)), file=self._file, flush=True)
        if self._board is not None:
            for name, value in asdict(measure).items():
                if name != "step":
                    self._board.add_scalar(name, value, step)
            self._board.flush()
        return measure

    def evaluated(self, step: int, loss: float | None) -> None:
        """Write the loss on what was held out; None for an evaluation that was given up."""
        if loss is None:
            return
        self.say(f"step {step:>{len(str(self._steps))}}/{self._steps}  eval loss {loss:.4f}")
        if self._file is not None:
            print(json.dumps({"step": step, "eval_loss": loss}), file=self._file, flush=True)
        if self._board is not None:
            self._board.add_scalar("eval_loss", loss, step)

    def pause(self) -> Callable[[], None]:
        """Stop the clock, for a save; the function that is returned starts it again."""
        at = self._clock()

        def resume() -> None:
            self._since += self._clock() - at

        return resume

    def close(self) -> None:
        """Close the files."""
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


def _forget_after(path: Path, step: int) -> None:
    """Drop the lines of steps after ``step``: a resumed run writes them again."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):  # the last line of a run that was killed while it wrote
            continue
    path.write_text("".join(kept), encoding="utf-8")
