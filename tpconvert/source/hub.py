"""Where a Hugging Face model lies: a local folder, or a hub id brought into the cache."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tpconvert.errors import SourceError

_BESIDE = ("*.json", "*.py", "*.txt", "*.model", "*.jinja", "*.tiktoken")


@dataclass(frozen=True, slots=True)
class Home:
    """The files of one model; those of a hub id are downloaded when they are first needed."""

    name: str
    folder: Path
    revision: str = ""
    hub: bool = False

    def with_weights(self) -> Path:
        """The folder, its weights downloaded: safetensors, or pickles where there are none."""
        for patterns in (("*.safetensors",), ("*.bin", "*.pt")) if self.hub else ():
            _download(self.name, self.revision, patterns)
            if _holds_weights(self.folder):
                break
        return self.folder

    @property
    def has_weights(self) -> bool:
        """Whether weights lie in the folder; a hub id is taken to have them."""
        return self.hub or _holds_weights(self.folder)


def find_home(name: str, revision: str | None) -> Home:
    """The folder of ``name``, a path or a hub id, with its configuration present."""
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise SourceError(f"{name} has no config.json.", hint=_folder_hint(path))
        return Home(name, path)
    if _is_path(name):
        raise SourceError(f"There is no {name}.", hint=_near_path(path))
    folder = _download(name, revision or "", _BESIDE)
    # The cache names a snapshot's folder by its commit, which says more than a branch.
    return Home(name, folder, revision=folder.name, hub=True)


def _holds_weights(folder: Path) -> bool:
    return any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "*.bin", "*.pt", "*.pth"))


def _download(name: str, revision: str, patterns: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=list(patterns)))
    except GatedRepoError:
        text, hint = "is gated on the Hugging Face hub.", "Ask for access there, then: hf auth login."
    except RevisionNotFoundError:
        text, hint = f"has no revision {revision!r} on the Hugging Face hub.", ""
    except RepositoryNotFoundError:
        text, hint = "is neither a folder nor a model on the Hugging Face hub.", _near_path(Path(name))
    except (HfHubHTTPError, OSError, ValueError):
        text = "is neither a folder nor in the Hugging Face cache, and the hub cannot be reached."
        hint = f"Fetch it where there is a network (hf download {name}), or give a folder, or file.py:function."
    raise SourceError(f"{name} {text}", hint=hint)


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
    if near:
        return f"Did you mean {path.with_name(near[0])}?"
    return "SOURCE is a Hugging Face id, a folder with a config.json, or file.py:function."


def _folder_hint(path: Path) -> str:
    if (path / "manifest.json").is_file():
        return "It is a sharded folder: tpconvert merge makes an ordinary one of it."
    inside = sorted(p.parent.name for p in path.glob("*/config.json"))
    return f"Did you mean {path / inside[0]}?" if inside else "A folder written by save_pretrained has one."
