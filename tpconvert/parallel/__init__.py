"""Run a planned module on the ranks of a mesh."""

from tpconvert.parallel.clip import clip_grad_norm_
from tpconvert.parallel.compiled import compile_layers
from tpconvert.parallel.convert import load_local, parallelize
from tpconvert.parallel.loss import cross_entropy
from tpconvert.parallel.mesh import Mesh, dry_mesh, make_mesh

__all__ = [
    "Mesh",
    "clip_grad_norm_",
    "compile_layers",
    "cross_entropy",
    "dry_mesh",
    "load_local",
    "make_mesh",
    "parallelize",
]
