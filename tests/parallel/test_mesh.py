"""Where a rank stands, and which groups it has."""

import pickle

import pytest
import torch
import torch.distributed as dist

from tpconvert.errors import PlanError
from tpconvert.parallel import dry_mesh, make_mesh
from tpconvert.spec.layout import Block, Layout


def place(_, tp):
    mesh = make_mesh(tp)
    mesh.connect([Layout(0, (Block(tp // 2, 3),)), Layout(0, (Block(7),)), Layout()])
    mesh.connect([Layout(0, (Block(tp // 2, 3),))])  # made once
    x = torch.tensor(float(dist.get_rank()))
    for group in (mesh.group, mesh.dp_group, *mesh.subgroups.values()):
        if group is not None:
            dist.all_reduce(x, group=group)
    again = pickle.loads(pickle.dumps(mesh))
    assert (again.rank, again.dp_rank, again.tp_groups) == (mesh.rank, mesh.dp_rank, mesh.tp_groups)
    assert again.subgroups.keys() == mesh.subgroups.keys()
    return mesh.rank, mesh.degree, mesh.dp_rank, mesh.dp_degree, list(mesh.subgroups), mesh.dry, x.item()


def test_tp_ranks_are_neighbours_and_dp_is_what_tp_leaves(run_ranks):
    places = run_ranks(place, 2, 2, dp=2)
    assert [p[:4] for p in places] == [(0, 2, 0, 2), (1, 2, 0, 2), (0, 2, 1, 2), (1, 2, 1, 2)]
    assert all(p[4] == [] and not p[5] and p[6] == 6 for p in places)  # both share with both: the tp group itself


def test_ranks_that_share_a_piece_have_a_group(run_ranks):
    places = run_ranks(place, 4, 4)
    assert [p[0] for p in places] == [0, 1, 2, 3] and [p[3] for p in places] == [1] * 4
    assert [p[4] for p in places] == [[(0, 1)], [(0, 1)], [(2, 3)], [(2, 3)]]
    assert [p[6] for p in places] == [12.0] * 4


def wrong_degree(_):
    with pytest.raises(PlanError, match=r"4 ranks cannot be dealt into groups of tp=3 \(4 % 3 is not 0\)"):
        make_mesh(3)


def test_a_degree_that_does_not_divide_the_ranks_is_refused(run_ranks):
    run_ranks(wrong_degree, 4)


def test_one_process_is_a_mesh_of_degree_1_only():
    mesh = make_mesh(1)
    assert (mesh.rank, mesh.degree, mesh.group, mesh.dry) == (0, 1, None, False)
    with pytest.raises(
        PlanError, match=r"tp=2 needs 2 ranks; torch.distributed is not initialised. Start with torchrun."
    ):
        make_mesh(2)


def test_a_mesh_pickled_elsewhere_is_dry():
    mesh = pickle.loads(pickle.dumps(dry_mesh(1, 2)))
    assert mesh.dry and (mesh.rank, mesh.degree) == (1, 2)


def test_a_group_that_was_not_made_is_named():
    with pytest.raises(PlanError, match=r"The mesh has no group of the tp ranks \(0, 1\)"):
        dry_mesh(0, 4).subgroup((0, 1))
