"""A checkpoint on disk as a lazy mapping: names, shapes and dtypes at once, bytes when asked."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor

from tpconvert.checkpoint.files.header import AGAIN, LONGEST_HEADER, make_header, no_duplicates
from tpconvert.checkpoint.files.tensorfile import Buffers, TensorFile, check_stamp, load_pickle, stamp
from tpconvert.checkpoint.tensors.compose import Box, part_of
from tpconvert.errors import CheckpointError
from tpconvert.spec import manifest
from tpconvert.spec.manifest import OriginalFile, safe_path

INDEX = ".index.json"
_PICKLES = {".bin", ".pt", ".pth"}
_OTHER_FORMATS = {".h5", ".msgpack", ".onnx", ".onnx_data", ".gguf", ".ot", ".ckpt", ".pt", ".pth", ".tflite", ".npz"}
_SKIPPED_FOLDERS = {".git", ".cache", "__pycache__"}


class Store:
    """The tensors of one or several files, by name."""

    def __init__(
        self,
        files: Mapping[str, TensorFile | Mapping[str, Tensor]],
        *,
        root: Path | None = None,
        stamps: Mapping[Path, tuple[int, ...]] | None = None,
    ) -> None:
        self.root = root
        """The folder they are in, whose other files belong to the checkpoint; None for a lone file or a dict."""
        self._stamps = dict(stamps or {})
        self._files = dict(files)
        self._where: dict[str, str] = {}
        for file, held in self._files.items():
            for name in _names(held):
                if name in self._where:
                    raise CheckpointError(f"The tensor {name} is stored twice: in {self._where[name]} and in {file}.")
                self._where[name] = file

    def names(self) -> list[str]:
        """The stored names, file by file."""
        return list(self._where)

    def __contains__(self, name: object) -> bool:
        return name in self._where

    def files(self) -> list[str]:
        """The files read."""
        return list(self._files)

    def where(self, name: str) -> str:
        """The file that holds a tensor; empty when none does."""
        return self._where.get(name, "")

    def info(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype, without touching the bytes."""
        held = self._held(name)
        if isinstance(held, TensorFile):
            return held.header.tensors[name].shape, held.header.tensors[name].dtype
        return tuple(held[name].shape), held[name].dtype

    def tensor(self, name: str) -> Tensor:
        """The tensor, as a view of its file."""
        held = self._held(name)
        return held.tensor(name) if isinstance(held, TensorFile) else held[name]

    def read(self, name: str, start: int = 0, stop: int | None = None, dim: int = 0) -> Tensor:
        """Rows ``start`` to ``stop`` of ``dim``, as a view of the file."""
        whole = self.tensor(name)
        if whole.dim() == 0:
            return whole
        return whole.narrow(dim, start, (whole.shape[dim] if stop is None else stop) - start)

    def box(self, name: str, box: Box, buffers: Buffers | None = None) -> Tensor:
        """The elements of a box on the CPU: read from its file, or a part of the tensor held."""
        held = self._held(name)
        return (
            held.read(name, box, buffers) if isinstance(held, TensorFile) else part_of(held[name].detach(), box).cpu()
        )

    def check_unchanged(self) -> None:
        """Raise if a file was written to or replaced since it was opened."""
        for held in self._files.values():
            if isinstance(held, TensorFile):
                held.check_unchanged()
        for path, before in self._stamps.items():
            check_stamp(path, before)

    def release(self) -> None:
        """Give back the memory of pages read so far."""
        for held in self._files.values():
            if isinstance(held, TensorFile):
                held.release()

    @property
    def pickled(self) -> bool:
        """Whether the tensors come from something other than safetensors files."""
        return any(not isinstance(held, TensorFile) for held in self._files.values())

    def becomes(self) -> dict[str, str]:
        """Pickled files -> the safetensors files that a merge gives back in their place."""
        pickled = [file for file, held in self._files.items() if not isinstance(held, TensorFile)]
        return {file: safetensors_name(file) for file in pickled if file != safetensors_name(file)}  # else of no file

    def original_files(self, keep: Mapping[str, object]) -> tuple[OriginalFile, ...]:
        """The safetensors files a merge gives back: these, or what pickled files become, with ``keep`` only."""
        out = []
        for file, held in self._files.items():
            if isinstance(held, TensorFile):
                out.append(OriginalFile(file, held.header.text))
                continue
            kept = {name: (tuple(t.shape), t.dtype) for name, t in held.items() if name in keep}
            out.append(OriginalFile(safetensors_name(file), make_header(kept, {"format": "pt"}).text))
        return tuple(out)

    def fingerprint(self) -> str:
        """A hash of what is stored where (not of the values): another model or another split has another one."""
        digest = hashlib.sha256()
        for name in sorted(self._where):
            shape, dtype = self.info(name)
            digest.update(f"{self._where[name]}\0{name}\0{list(shape)}\0{dtype}\n".encode())
        return digest.hexdigest()

    def _held(self, name: str) -> TensorFile | Mapping[str, Tensor]:
        if name not in self._where:
            raise CheckpointError(f"The checkpoint has no tensor named {name}.")
        return self._files[self._where[name]]


def open_store(path: Path) -> Store:
    """The checkpoint in a folder or a single file: safetensors, else ``.bin``/``.pt`` read with ``weights_only``."""
    path = Path(path)
    if path.is_file():
        return Store({path.name: _open_file(path)}, stamps=_stamps([path]))
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such file or folder.")
    if (path / manifest.NAME).is_file():
        raise CheckpointError(
            f"{path}: this is a folder of rank files, not a source.", hint="Merge it, or reshard it to another degree."
        )
    names, index = _weight_files(path)
    stamps = _stamps(path / name for name in names)
    store = Store({name: _open_file(inside(path, name)) for name in names}, root=path, stamps=stamps)
    for name, file in index.items():
        if store.where(name) != file:
            raise CheckpointError(f"{path}: the index says that {file} holds {name}, which it does not.", hint=AGAIN)
    return store


def inside(root: Path, name: str) -> Path:
    """The path of ``name`` in ``root``, refused if it or the link it is leads out (the hub's cache of blobs apart)."""
    path = root / safe_path(name, str(root))
    real, home = path.resolve(), root.resolve()
    allowed = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    if not any(real.is_relative_to(folder) for folder in allowed):
        raise CheckpointError(
            f"{root}: the file {name!r} is a link out of its folder: refused.", hint="Put the file itself there."
        )
    if not real.is_file():
        raise CheckpointError(f"{path}: no such file, though the checkpoint needs it.", hint=AGAIN)
    return path


def other_files(store: Store) -> tuple[list[str], list[str]]:
    """The files of the store's folder besides its weights: those that belong to it, and those that are left out.

    Left out are the same weights in other formats and files that are not read: they would be stale after training.
    """
    if store.root is None:
        return [], []
    kept: list[str] = []
    left: list[str] = []
    used = set(store.files())
    for name in sorted(_walk(store.root)):
        if name in used:
            continue
        path = PurePosixPath(name)
        weights = path.suffix in {".safetensors", ".bin"} and len(path.parts) == 1
        inside(store.root, name)
        foreign_index = name.endswith(INDEX) and not _indexes(store.root / name, used)
        (left if weights or foreign_index or path.suffix in _OTHER_FORMATS else kept).append(name)
    return kept, left


def safetensors_name(file: str) -> str:
    """The name a file gets as safetensors: ``pytorch_model-1-of-2.bin`` becomes ``model-1-of-2.safetensors``."""
    path = PurePosixPath(file)
    return file if path.suffix == ".safetensors" else f"{path.stem.replace('pytorch_model', 'model')}.safetensors"


def read_index(path: Path) -> dict[str, str]:
    """The ``weight_map`` of an index file: tensor name -> file name."""
    try:
        if (size := path.stat().st_size) > LONGEST_HEADER:
            raise CheckpointError(f"{path}: {size:,} bytes, which no index of weights has: refused.")
        weight_map = json.loads(path.read_text("utf-8"), object_pairs_hook=no_duplicates)["weight_map"]
        entries = {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise CheckpointError(
            f"{path}: not an index of weights ({type(error).__name__}: {error}).", hint=AGAIN
        ) from None
    for file in set(entries.values()):
        safe_path(file, str(path))
    return entries


def write_index(weight_map: Mapping[str, str], size: int) -> str:
    """The text of an index file."""
    data = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(data, indent=2) + "\n"


def _weight_files(root: Path) -> tuple[list[str], dict[str, str]]:
    """The files to read, and what the index says about them, if there is one."""
    for single in ("model.safetensors", "pytorch_model.bin"):
        if (root / single).is_file():
            return [single], {}
        if (root / f"{single}{INDEX}").is_file():
            return _indexed(root, f"{single}{INDEX}")
    indexes = sorted(p.name for p in root.glob(f"*{INDEX}"))
    if len(indexes) == 1:
        return _indexed(root, indexes[0])
    for pattern in ("*.safetensors", "*.bin", "*.pt", "*.pth"):
        if names := sorted(p.name for p in root.glob(pattern) if p.name != "training_args.bin"):
            return names, {}
    raise CheckpointError(
        f"{root}: holds no weights (no *.safetensors, *.bin or *.pt file).",
        hint="Give the folder that save_pretrained wrote.",
    )


def _indexed(root: Path, index: str) -> tuple[list[str], dict[str, str]]:
    weight_map = read_index(inside(root, index))
    return sorted(set(weight_map.values())), weight_map


def _indexes(path: Path, used: set[str]) -> bool:
    return set(read_index(path).values()) == used


def _open_file(path: Path) -> TensorFile | dict[str, Tensor]:
    return load_pickle(path) if path.suffix in _PICKLES else TensorFile(path)


def _stamps(paths: Iterable[Path]) -> dict[Path, tuple[int, ...]]:
    """Of files that are no :class:`TensorFile`, which has its own."""
    return {path: stamp(path) for path in paths if path.suffix in _PICKLES}


def _names(held: TensorFile | Mapping[str, Tensor]) -> list[str]:
    return list(held.header.tensors if isinstance(held, TensorFile) else held)


def _walk(root: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if f not in _SKIPPED_FOLDERS]
        for file in files:
            yield (Path(folder) / file).relative_to(root).as_posix()
