"""Folders at URLs of any kind that fsspec knows: copied here to be read, and from here once they are complete.

Object stores have no rename, so what says that a folder is whole is removed first and written last.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tpconvert.errors import CheckpointError, TPConvertError
from tpconvert.spec.manifest import NAME, safe_path
from tpconvert.spec.plan import NAME as PLAN

_LAST = (NAME, "config.json", PLAN)
"""Without the first of these that a folder has, nothing takes it for a whole one."""


def is_url(name: str) -> bool:
    """Whether a name is a URL."""
    return "://" in name


def fetch_folder(url: str) -> Path:
    """A copy of a folder on this machine; what has not changed since it was last copied is not copied again."""
    place = _cache() / hashlib.sha256(url.encode()).hexdigest()[:16]
    known = place.with_suffix(".json")
    with _told(url):
        system, root = _open(url)
        found = _files(system, root)
        if not found:
            raise CheckpointError(f"{url}: there is no such folder, or it is empty.")
        before = json.loads(known.read_text("utf-8")) if known.is_file() else {}
        stamps: dict[str, str] = {}
        for name, info in found.items():
            stamps[name] = hashlib.sha256(repr(sorted(info.items(), key=str)).encode()).hexdigest()
            if before.get(name) != stamps[name] or not _as_long(place / name, info):
                _fetch(system, info["name"], place / name, info)
        for path in [path for path in place.rglob("*") if path.is_file()]:
            if path.relative_to(place).as_posix() not in found:
                path.unlink()
        known.write_text(json.dumps(stamps), "utf-8")
    return place


@contextmanager
def output_folder(out: str, *, force: bool = False) -> Iterator[Path]:
    """Where to write ``out``: its own path, or for a URL a folder here that is sent when it is complete."""
    if not is_url(out):
        yield Path(out)
        return
    with _told(out):
        system, root = _open(out)
        _check_target(out, _files(system, root), force)
    with TemporaryDirectory(prefix="tpconvert-") as stage:
        local = Path(stage) / "out"
        yield local
        with _told(out):
            _send(local, system, root)


def _send(local: Path, system: Any, root: str) -> None:
    names = sorted(path.relative_to(local).as_posix() for path in local.rglob("*") if path.is_file())
    last = [name for name in _LAST if name in names][:1]
    old = _files(system, root)
    for name in sorted(old, key=lambda name: name not in _LAST):  # what says that the old one is whole goes first
        system.rm_file(old[name]["name"])
    put: list[str] = []
    try:
        for name in (*(name for name in names if name not in last), *last):
            target = f"{root}/{name}"
            system.makedirs(target.rpartition("/")[0], exist_ok=True)
            put.append(target)
            system.put_file(str(local / name), target)
    except BaseException:  # an interrupt too
        for target in put:
            with suppress(Exception):  # of the last one there may be nothing
                system.rm_file(target)
        raise


def _check_target(url: str, held: Mapping[str, Any], force: bool) -> None:
    if held and not force:
        raise CheckpointError(f"{url}: exists already.", hint="Use --force to replace it, or choose another output.")
    if held and not any(name in _LAST or name.endswith(".safetensors") for name in held):
        raise CheckpointError(f"{url}: is no checkpoint, so it is not replaced.", hint="Choose another output.")


def _open(url: str) -> tuple[Any, str]:
    import fsspec

    system, root = fsspec.url_to_fs(url)
    system.invalidate_cache()
    return system, root.rstrip("/")


def _files(system: Any, root: str) -> dict[str, Any]:
    """Relative path -> what the system says of each file."""
    found = system.find(root, detail=True)
    inside = {path: info for path, info in found.items() if path.startswith(f"{root}/")}
    return {safe_path(path.removeprefix(f"{root}/"), root): info for path, info in inside.items()}


def _as_long(path: Path, info: Mapping[str, Any]) -> bool:
    return path.is_file() and path.stat().st_size == info.get("size")


def _fetch(system: Any, path: str, target: Path, info: Mapping[str, Any]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        system.get_file(path, str(part))
        if not _as_long(part, info):
            raise CheckpointError(f"{path}: was cut short, or changed while it was copied.", hint="Try again.")
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    place = Path(home) / "tpconvert" / "urls"
    place.mkdir(parents=True, exist_ok=True)
    return place


@contextmanager
def _told(url: str) -> Iterator[None]:
    """What goes wrong at a URL, in one line: each kind of store has errors of its own."""
    try:
        yield
    except TPConvertError:
        raise
    except Exception as error:
        said = getattr(error, "strerror", None) or str(error)
        first = (said.strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{url}: {first.removesuffix('.')}.") from None
