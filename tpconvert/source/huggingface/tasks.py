"""Which class of transformers a model is: named by its config, or chosen by ``--task``."""

from __future__ import annotations

import difflib
import re
from typing import Any

from tpconvert.errors import SourceError


def task_names() -> dict[str, str]:
    """Task -> name of transformers' Auto class: ``causal-lm`` -> ``AutoModelForCausalLM``.

    Read off the names that transformers exports, so that it never lags behind.
    """
    import transformers

    prefix = "AutoModelFor"
    found = {_dashed(n.removeprefix(prefix)): n for n in dir(transformers) if n.startswith(prefix)}
    return {"feature-extraction": "AutoModel"} | found


def auto_class(task: str) -> Any:
    """The Auto class for a task."""
    import transformers

    names = task_names()
    if task not in names:
        near = difflib.get_close_matches(task, names, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"It is one of {', '.join(names)}."
        raise SourceError(f"There is no task {task!r}.", hint=hint)
    return getattr(transformers, names[task])


def named_class(config: Any, where: str) -> Any:
    """The class that ``config.architectures`` names, from transformers."""
    import transformers

    named = getattr(config, "architectures", None) or []
    if not named:
        raise SourceError(
            f"{where}: its config.json names no architecture.",
            hint="Say which head it has with --task: causal-lm, masked-lm, feature-extraction, ...",
        )
    found = getattr(transformers, named[0], None)
    if found is None:
        raise SourceError(
            f"{where}: this transformers ({transformers.__version__}) has no class {named[0]}.",
            hint="Choose another head with --task, or install the transformers that has it.",
        )
    return found


def _dashed(name: str) -> str:
    """``Seq2SeqLM`` -> ``seq2seq-lm``."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z]+\d?", name)
    return re.sub(r"(\d)-", r"\1", "-".join(words).lower())
