"""Where a Hugging Face model lies: a local folder, or a hub id brought into the cache."""

from __future__ import annotations

import difflib
import errno
import fnmatch
import glob
import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tpconvert.checkpoint.files.remote import fetch_folder
from tpconvert.errors import SourceError

_BESIDE = ("*.json", "*.py", "*.txt", "*.model", "*.jinja", "*.tiktoken")

_OTHER_FORMS = ("onnx/*", "openvino/*", "coreml/*", "tflite/*", "tf/*", "flax/*", "gguf/*")
"""Folders in which a repository keeps the same model for other programs."""

_FORMS = (
    ("model.safetensors", ("*.safetensors",)),
    ("pytorch_model.bin", ("*.bin", "*.pt", "*.pth")),
)
"""What the weights are called, and whatever else may hold them; the first that is there is taken."""

_OF_TRAINING = ("training_args.bin", "optimizer.*", "scheduler.*", "rng_state*", "scaler.*")

SOURCES = "SOURCE is a Hugging Face id, a folder with a config.json, or file.py:function."

_DISK = frozenset([errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS])


@dataclass(frozen=True, slots=True)
class Home:
    """The files of one model; those of a hub id are downloaded when they are first needed."""

    name: str
    folder: Path
    revision: str = ""
    hub: bool = False

    def with_weights(self) -> Path:
        """The folder, its weights downloaded: safetensors, or pickles where there are none."""
        if self.hub:
            listed = _listed(self.name, self.revision)
            wanted = weight_files(listed or [path.name for path in self.folder.iterdir()], self.folder)
            if listed and not wanted:
                raise SourceError(f"{self.name} holds no weights as safetensors, .bin or .pt.")
            if not wanted:
                raise _unreachable(self.name, f"No weights of {self.name} are in the Hugging Face cache")
            _download(self.name, self.revision, [glob.escape(name) for name in wanted])
            if missing := [name for name in wanted if not (self.folder / name).is_file()]:
                raise _unreachable(self.name, f"{missing[0]} of {self.name} is not in the Hugging Face cache")
        return self.folder

    @property
    def has_weights(self) -> bool:
        """Whether weights lie in the folder; a hub id is taken to have them."""
        return self.hub or _holds_weights(self.folder)


def find_home(name: str, revision: str | None) -> Home:
    """The folder of ``name``, a path or a hub id, with its configuration present."""
    path = Path(name).expanduser()
    if path.is_dir():
        if revision:
            raise SourceError(f"--revision is for ids on the Hugging Face hub; {name} is a folder.")
        if not (path / "config.json").is_file():
            raise SourceError(f"{name} has no config.json.", hint=_folder_hint(path))
        return Home(name, path)
    if "://" in name:
        if revision:
            raise SourceError(f"--revision is for ids on the Hugging Face hub; {name} is a URL.")
        return replace(find_home(str(fetch_folder(name)), None), name=name)
    if path.is_file():
        hint = f"Name a function in it: {name}:FUNCTION." if path.suffix == ".py" else SOURCES
        raise SourceError(f"{name} is a file.", hint=hint)
    if _is_path(name):
        raise SourceError(f"There is no {name}.", hint=_near_path(path))
    folder = _download(name, revision or "", _BESIDE, _OTHER_FORMS)
    if not (folder / "config.json").is_file():
        raise SourceError(f"{name} has no config.json on the Hugging Face hub.", hint=_other_hint(folder))
    # The cache names a snapshot's folder by its commit, which says more than a branch.
    return Home(name, folder, revision=folder.name, hub=True)


def weight_files(names: Collection[str], folder: Path) -> list[str]:
    """Which of a repository's files are its weights: what the index of the first form names, or its one file.

    Other copies of the same weights that lie beside them (another precision, the original of a vendor) are left alone.
    """
    for single, patterns in _FORMS:
        index = f"{single}.index.json"
        if index in names and (folder / index).is_file():
            return _indexed(folder / index)
        if single in names:
            return [single]
        found = [n for n in names if "/" not in n and any(fnmatch.fnmatchcase(n, p) for p in patterns)]
        if found := [n for n in found if not any(fnmatch.fnmatchcase(n, p) for p in _OF_TRAINING)]:
            return sorted(found)
    return []


def _indexed(index: Path) -> list[str]:
    try:
        named = json.loads(index.read_text("utf-8"))["weight_map"].values()
        return sorted(set(map(str, named)))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise SourceError(f"{index}: the index of the weights cannot be read.") from None


def _holds_weights(folder: Path) -> bool:
    return any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "*.bin", "*.pt", "*.pth"))


def _listed(name: str, revision: str) -> list[str]:
    """The files of a repository; none where the hub cannot be asked."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError

    try:
        return list(HfApi().list_repo_files(name, revision=revision))
    except (HTTPError, OSError):
        return []


def _download(name: str, revision: str, patterns: Sequence[str], without: Sequence[str] = ()) -> Path:
    """The folder of a revision in the cache, with the files that match; what it has already is not sent again."""
    from huggingface_hub import snapshot_download, try_to_load_from_cache
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        found = snapshot_download(
            name, revision=revision or None, allow_patterns=list(patterns), ignore_patterns=list(without) or None
        )
        return Path(found)
    except GatedRepoError:
        text, hint = "is gated on the Hugging Face hub.", "Ask for access there, then: hf auth login."
    except RevisionNotFoundError:
        text, hint = f"has no revision {revision!r} on the Hugging Face hub.", ""
    except RepositoryNotFoundError:
        text, hint = "is neither a folder nor a model on the Hugging Face hub.", _near_path(Path(name))
    except LocalEntryNotFoundError:
        partly = isinstance(try_to_load_from_cache(name, "config.json", revision=revision or None), str)
        where = "only partly" if partly else "neither a folder nor"
        raise _unreachable(name, f"{name} is {where} in the Hugging Face cache") from None
    except HfHubHTTPError as error:
        text, hint = f"could not be fetched: the hub answered {error.response.status_code}.", "Try again later."
    except (HTTPError, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in _DISK:
            raise
        text = f"could not be fetched from the Hugging Face hub: {' '.join(str(error).split())[:200]}"
        hint = "Try again: what was fetched is kept."
    raise SourceError(f"{name} {text}", hint=hint)


def _unreachable(name: str, what: str) -> SourceError:
    from huggingface_hub import constants

    why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
    return SourceError(
        f"{what}, and {why}.",
        hint=f"Fetch it where there is a network (hf download {name}), or give a folder, or file.py:function.",
    )


def _is_path(name: str) -> bool:
    """Whether a name cannot be a hub id: ``owner/model`` or ``model``, of letters, digits and ``-_.``."""
    parts = name.split("/")
    plain = all(part and part[0] not in ".~-" and all(c.isalnum() or c in "-_." for c in part) for part in parts)
    return not plain or len(parts) > 2 or Path(parts[0]).is_dir()


def _near_path(path: Path) -> str:
    """``Did you mean ...?`` with the likeliest entry of the folder it would be in."""
    parent = path.parent if path.parent.is_dir() else None
    names = [p.name for p in parent.iterdir()] if parent else []
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.7)
    return f"Did you mean {path.with_name(near[0])}?" if near and near[0] != path.name else SOURCES


def _other_hint(folder: Path) -> str:
    """What a repository without a config.json is, where its files say it."""
    if (folder / "adapter_config.json").is_file():
        base = re.search(r'"base_model_name_or_path":\s*"([^"]+)"', (folder / "adapter_config.json").read_text("utf-8"))
        return f"It is an adapter{f' of {base.group(1)}' if base else ''}: merge it into its model first."
    if (folder / "model_index.json").is_file():
        return "It is a pipeline of several models: give the folder of one of them."
    return "SOURCE is a model that transformers can load."


def _folder_hint(path: Path) -> str:
    if (path / "manifest.json").is_file():
        return "It is a sharded folder: tpconvert merge makes an ordinary one of it."
    inside = sorted(p.parent.name for p in path.glob("*/config.json"))
    return f"Did you mean {path / inside[0]}?" if inside else "A folder written by save_pretrained has one."
