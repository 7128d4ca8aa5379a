"""Run a planned module on the ranks of a mesh."""

from tpconvert.parallel.comm.mesh import Mesh, dry_mesh, make_mesh
from tpconvert.parallel.compiled.layers import compile_layers
from tpconvert.parallel.convert import load_local, parallelize
from tpconvert.parallel.grads.clip import clip_grad_norm_
from tpconvert.parallel.layers.loss import cross_entropy

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
