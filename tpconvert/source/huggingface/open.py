"""Opens a Hugging Face model: its own class on meta parameters, by its configuration alone."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shutil import copytree, ignore_patterns
from tempfile import TemporaryDirectory, gettempdir
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import nn

from tpconvert.errors import SourceError
from tpconvert.source.blame import told
from tpconvert.source.build.frugal import frugal, parameters_to_meta
from tpconvert.source.build.initial import on_files
from tpconvert.source.huggingface.hub import Home, find_home
from tpconvert.source.huggingface.tasks import auto_class, named_class
from tpconvert.source.inputs.find import example_inputs
from tpconvert.source.source import Source

if TYPE_CHECKING:
    from tpconvert.checkpoint.tensors.weights import Weights


_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.index.json")


def open_huggingface(
    name: str, *, task: str | None = None, trust_remote_code: bool = False, revision: str | None = None
) -> Source:
    """The source for a hub id or a folder with a ``config.json``; reads no weights."""
    import transformers

    opened = _open(name, task, trust_remote_code, revision)
    home, config, make, module = opened.home, opened.config, opened.make, opened.module
    with quiet():
        inputs = example_inputs(module, config)
    description = {
        "class": type(module).__name__,
        "revision": home.revision,
        "task": task or "",
        "transformers": transformers.__version__,
    }
    return Source(
        name=name,
        module=module,
        inputs=inputs,
        build=partial(_real, home, opened.kind, make, config, trust_remote_code),
        weights=partial(_weights, home, module, make, config),
        initial=partial(_initial, home, module, make, config),
        description={k: v for k, v in description.items() if v},
        has_weights=home.has_weights,
        config=config,
        make=make,
        notes=() if home.has_weights else (f"{name} holds no weights; seeded random ones are used.",),
    )


def skeleton(name: str, *, task: str | None = None, trust_remote_code: bool = False) -> nn.Module:
    """The module of such a source, without the search for example inputs, which runs its forward."""
    return _open(name, task, trust_remote_code, None).module


@dataclass(frozen=True, slots=True)
class _Opened:
    """A configuration and the module made of it."""

    home: Home
    config: Any
    kind: Any
    """The class."""
    make: Callable[..., Any]
    """Another module of random weights from a configuration."""
    module: nn.Module
    """Parameters on meta."""


def _open(name: str, task: str | None, trust: bool, revision: str | None) -> _Opened:
    chosen = auto_class(task) if task else None
    home = find_home(name, revision)
    with quiet():
        config = _config(home, trust)
        kind = chosen or _own_class(home, config, trust)
        make = partial(_from_config, kind, trust=trust and bool(_remote(home)))
        with frugal():
            module = parameters_to_meta(_built(home, make, config)).eval()
    return _Opened(home, config, kind, make, module)


@contextmanager
def quiet() -> Iterator[None]:
    """Within it, transformers shows neither bars nor warnings: what a user must know is said by tpconvert."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _config(home: Home, trust: bool) -> Any:
    from transformers import AutoConfig

    remote = _remote(home)
    try:
        config = AutoConfig.from_pretrained(home.folder, trust_remote_code=bool(remote) and trust)
    except Exception as error:  # whatever a configuration raises of what it is given
        if remote and not trust:
            raise _untrusted(home, remote) from None
        raise SourceError(f"{home.name}: its config.json cannot be read: {told(error)}") from None
    named = getattr(config, "architectures", None)
    if named is not None and not (isinstance(named, list) and all(isinstance(name, str) for name in named)):
        raise SourceError(
            f"{home.name}: its config.json cannot be read: architectures is {named!r}, not a list of names."
        )
    return config


def _own_class(home: Home, config: Any, trust: bool) -> Any:
    """The class named in the config: one of transformers, or one that lies in the folder and is trusted."""
    import transformers

    named = (getattr(config, "architectures", None) or [""])[0]
    remote = next((r for r in _remote(home).values() if r.rpartition(".")[2] == named), "")
    if not remote or hasattr(transformers, named):
        return named_class(config, home.name)
    if not trust:
        raise _untrusted(home, _remote(home))
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    return get_class_from_dynamic_module(remote, str(home.folder))


def _remote(home: Home) -> dict[str, str]:
    """``auto_map`` of the config: Auto class -> ``file.Class`` that lies beside the weights."""
    try:
        found = json.loads((home.folder / "config.json").read_text()).get("auto_map") or {}
    except (json.JSONDecodeError, AttributeError, UnicodeDecodeError):
        return {}
    return {k: v for k, v in found.items() if isinstance(v, str)}


def _untrusted(home: Home, remote: dict[str, str]) -> SourceError:
    file = next(iter(remote.values())).rpartition("--")[2].rpartition(".")[0] + ".py"
    return SourceError(
        f"{home.name} comes with code of its own ({file}), which is not run unasked.",
        hint="Read it, then add --trust-remote-code.",
    )


def _from_config(kind: Any, config: Any, *, trust: bool, seed: int = 0) -> Any:
    """A module of random weights from a copy of the config."""
    copy = deepcopy(config)
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if hasattr(kind, "_from_config"):
            return kind._from_config(copy)
        return kind.from_config(copy, trust_remote_code=trust)


def _built(home: Home, make: Any, config: Any) -> Any:
    try:
        return make(config)
    except Exception as error:
        raise SourceError(f"{home.name}: the model cannot be built from its config: {told(error)}") from error


def _real(home: Home, kind: Any, make: Any, config: Any, trust: bool) -> nn.Module:
    _check_whole(home)
    if not home.has_weights:
        return _in_evaluation(_built(home, make, config))
    with quiet():
        return _in_evaluation(kind.from_pretrained(home.with_weights(), trust_remote_code=trust))


def _in_evaluation(module: nn.Module) -> nn.Module:
    return module.eval()


def _weights(home: Home, module: nn.Module, make: Any, config: Any) -> Weights:
    from tpconvert.source.huggingface.conversion import hf_weights

    _check_whole(home)
    if home.has_weights:
        return hf_weights(home.with_weights(), module)
    return _initial(home, module, make, config, 0)


def _initial(home: Home, module: nn.Module, make: Any, config: Any, seed: int) -> Weights:
    """What the class draws from the seed, as transformers saves it: names on disk may be others than the module's."""
    from tpconvert.source.huggingface.conversion import hf_weights

    _check_whole(home)
    folder = TemporaryDirectory(prefix="tpconvert-")
    try:
        copytree(home.folder, folder.name, dirs_exist_ok=True, ignore=ignore_patterns(*_WEIGHTS))
        with quiet():
            with on_files():
                drawn = _built(home, partial(make, seed=seed), config)
            drawn.save_pretrained(folder.name, max_shard_size="2GB")
    except (OSError, SafetensorError) as error:
        folder.cleanup()
        raise SourceError(
            f"{home.name}: new weights cannot be put into {gettempdir()}: {told(error)}.",
            hint="Set TMPDIR to a folder with room for twice the model.",
        ) from None
    weights = hf_weights(Path(folder.name), module)
    weights.source |= {"name": home.name, "seed": seed}
    weakref.finalize(weights, folder.cleanup)
    return weights


def _check_whole(home: Home) -> None:
    """Raise for a folder of rank files: its config opens, but it must not be taken for one without weights."""
    if (home.folder / "manifest.json").is_file():
        raise SourceError(
            f"{home.name} is a sharded folder, not a source.",
            hint="Merge it first, or use tpconvert reshard for another degree.",
        )
