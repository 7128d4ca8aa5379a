"""The steps that a run writes, and which of them stay: the newest, and the best by what was held out."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from tpconvert.errors import CheckpointError
from tpconvert.train.saving.best import Best, best_of, check_link, link_to, linked
from tpconvert.train.saving.save import Save
from tpconvert.train.saving.state import Progress, Run, begin_step, complete_steps, number_of
from tpconvert.train.settings.config import Config


def is_due(step: int, config: Config) -> bool:
    """Whether this is one of the steps that are saved, whatever they are worth."""
    return config.checkpoint.every is not None and step % config.checkpoint.every == 0


def find_best(run: Run, progress: Progress) -> Best | None:
    """The best step that the run so far has left in the output folder, which the link then names, and only that."""
    best, wanted = progress.best, run.config.checkpoint.keep_best
    step = run.output / f"step-{best.step}" if best is not None else None
    there = step is not None and step in complete_steps(run.output)
    if wanted:
        check_link(run.output)
    if run.first and (there or wanted):
        link_to(run.output, step.name if step is not None and there else None)
    return best if there else None


class Saves:
    """The steps that a run writes, at most one at a time.  One that fails costs that step and not the run."""

    def __init__(
        self,
        run: Run,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        say: Callable[[str], None],
        best: Best | None = None,
    ):
        self._run, self._module, self._optimizer, self._say = run, module, optimizer, say
        self._open: Save | None = None
        self.last: int | None = None
        """The last step that is complete on disk, of those of this run."""
        self.best = best
        """The best of all steps that are complete on disk."""
        self._better: Best | None = None
        """One that is better, and yet to be complete."""

    @property
    def writing(self) -> bool:
        """Whether this rank is still busy with a step in the background."""
        return self._open is not None and self._open.running

    def is_best(self, step: int, found: Mapping[str, float] | None) -> bool:
        """Whether these measures make the step the best so far, which is then to be saved, where that is wanted."""
        settings = self._run.config.checkpoint
        if not settings.keep_best or found is None:
            return False
        writing = self._open is not None and self._is_better(number_of(self._open.out))
        better = best_of(step, found, settings, self._better if writing else self.best)
        self._better = better or self._better
        return better is not None

    def begin(self, progress: Progress) -> None:
        """Save this step, in the background if so configured; the step before it is finished first."""
        self.finish()
        background = self._run.config.checkpoint.asynchronous
        with self._told():
            self._begin(progress, background)
        if not background:
            self.finish()

    def finish(self) -> None:
        """Complete the step that is on its way, if one is; every rank must call it."""
        if self._open is not None:
            with self._told():
                self._complete()

    def end(self, progress: Progress) -> None:
        """Leave this step complete on disk, or raise: after it there is no other chance."""
        self.finish()
        if self.last != progress.step:
            self._begin(progress, background=False)
            self._complete()
        if self.best is not None and self._run.config.checkpoint.keep_best:
            self._say(f"best: step-{self.best.step} ({self.best.told()})")

    def _begin(self, progress: Progress, background: bool) -> None:
        best = self._better if self._is_better(progress.step) else self.best
        progress = replace(progress, best=best)
        self._open = begin_step(self._run, self._module, self._optimizer, progress, background=background)

    def _is_better(self, step: int) -> bool:
        return self._better is not None and self._better.step == step

    def _complete(self) -> None:
        save, self._open = self._open, None
        assert save is not None
        save.finish()
        self.last, told = number_of(save.out), ""
        if self._is_better(self.last):
            self.best = self._better
            told = f", the best so far: {self.best.told()}" if self.best is not None else ""
        if self._run.first:
            self._tidy(save.out, fresh=bool(told))
        self._say(f"saved {save.out}{told}")

    def _tidy(self, newest: Path, *, fresh: bool) -> None:
        """Let the link name the best step if that is a ``fresh`` one, and remove what need not stay."""
        output = self._run.output
        try:
            if fresh and self.best is not None:
                link_to(output, f"step-{self.best.step}")
        except CheckpointError as error:
            self._say(f"NOT LINKED: {error} Training goes on.")
        best = [output / f"step-{self.best.step}"] if self.best is not None else []
        _forget(output, self._run.config.checkpoint.keep, newest, {*best, linked(output)})

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            last = "none is saved yet" if self.last is None else f"the last good one is step-{self.last}"
            self._say(f"NOT SAVED: {error} Training goes on; {last}.")


def _forget(output: Path, keep: int, newest: Path, dear: Collection[Path | None]) -> None:
    """Remove all steps but the ``dear`` ones and, of the others, the last ``keep``."""
    for old in [step for step in complete_steps(output) if step not in dear][:-keep]:
        if old != newest:
            shutil.rmtree(old, ignore_errors=True)
