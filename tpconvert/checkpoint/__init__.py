"""Tensors on disk: a folder of them as a lazy mapping, and the one way they are cut, joined and written."""

from tpconvert.checkpoint.folder import (
    NewFolder,
    RankFolder,
    check_folder,
    partial_path,
    read_complete,
    read_manifest,
    read_plan,
)
from tpconvert.checkpoint.load import Inspection, inspect, load_rank
from tpconvert.checkpoint.reshard import merge, reshard, shard
from tpconvert.checkpoint.save import carry, entries_like, finish, write_rank
from tpconvert.checkpoint.tensors.pieces import gather_pieces, same_bytes, take_pieces, unequal_replicas
from tpconvert.checkpoint.tensors.store import Store, open_store
from tpconvert.checkpoint.tensors.weights import (
    Weights,
    file_weights,
    module_weights,
    plain_weights,
    tensor_weights,
    tie,
    ties_of,
)

__all__ = [
    "Inspection",
    "NewFolder",
    "RankFolder",
    "Store",
    "Weights",
    "carry",
    "check_folder",
    "entries_like",
    "file_weights",
    "finish",
    "gather_pieces",
    "inspect",
    "load_rank",
    "merge",
    "module_weights",
    "open_store",
    "partial_path",
    "plain_weights",
    "read_complete",
    "read_manifest",
    "read_plan",
    "reshard",
    "same_bytes",
    "shard",
    "take_pieces",
    "tensor_weights",
    "tie",
    "ties_of",
    "unequal_replicas",
    "write_rank",
]
