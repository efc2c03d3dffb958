"""Which process group shares a sequence."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
import torch.distributed as dist
from helpers import SelfAttention, tokens
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.two_tensor import TwoTensor

import spcompile
from spcompile import ops
from spcompile.agreement import SameInputs, digest
from spcompile.group import hold, let_go, make_axes, resolve


def compiled(**options):
    return torch.compile(SelfAttention(), backend=spcompile.backend(inner="eager", **options))


def degree_on(**options) -> int | None:
    backend = spcompile.backend(inner="eager", **options)
    with torch.no_grad():
        torch.compile(SelfAttention(), backend=backend)(tokens(6))
    return backend.report().degree


def assert_refused(text, mesh=None, **options):
    """``text`` is a regular expression. What Dynamo makes of the error is the affair of test_messages.py."""
    with pytest.raises(spcompile.SPConfigError, match=text):
        resolve(mesh, spcompile.backend(**options).config, "cpu")


def mesh_of(*sizes, names):
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def test_the_default_group_is_taken_whole(fake_group):
    fake_group(4)
    assert degree_on() == 4
    assert degree_on(sp=4) == 4


def test_a_group_is_taken_as_it_is(fake_group):
    fake_group(4)
    assert degree_on(mesh=dist.new_group([0, 2])) == 2


def test_a_mesh_of_one_axis_is_taken_whatever_its_name(fake_group):
    fake_group(4)
    assert degree_on(mesh=init_device_mesh("cpu", (4,))) == 4
    assert degree_on(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "mine"))["mine"]) == 2


@pytest.mark.parametrize("axis", ["sp", "ulysses"])
def test_a_mesh_lends_its_axis_of_our_name(fake_group, axis):
    fake_group(4)
    assert degree_on(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", axis))) == 2


@pytest.mark.parametrize(
    ("names", "sizes", "degrees"),
    [
        (("dp", "ring", "ulysses"), (2, 2, 2), (2, 1, 2)),
        (("ring", "kv_gather", "ulysses"), (2, 2, 2), (2, 2, 2)),
        (("kv_gather", "dp", "ulysses"), (4, 2, 1), (1, 4, 1)),
        (("dp", "ring"), (2, 4), (4, 1, 1)),
    ],
    ids=str,
)
def test_axes_named_after_the_exchanges_prescribe_the_degrees(fake_group, names, sizes, degrees):
    fake_group(8)
    ranks = resolve(mesh_of(*sizes, names=names), spcompile.backend().config, "cpu")
    assert ranks.mesh == degrees
    assert ranks.group.size() == math.prod(degrees)


def test_the_degrees_of_the_mesh_are_those_of_every_site(fake_group):
    fake_group(4)
    backend = spcompile.backend(inner="eager", mesh=mesh_of(2, 2, names=("ring", "ulysses")))
    with torch.no_grad():
        torch.compile(SelfAttention(), backend=backend)(tokens(6))
    assert [(e.exchange, e.reason) for e in backend.report().attention] == [("ring=2 x ulysses=2", "as asked for")]


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (("dp", "tp"), r"\('dp', 'tp'\): want one axis, one named 'sp', or axes named ring, kv_gather, ulysses; pass"),
        (("ulysses", "ring"), r"\('ulysses', 'ring'\): want ring, ulysses in this order, ulysses innermost"),
        (("kv_gather", "ring"), "want ring, kv_gather in this order"),
        (("sp", "ring"), r"\('sp', 'ring'\): name either one axis 'sp' or axes ring, kv_gather, ulysses"),
        (None, r"the mesh has axes 2: want one axis, .* pass mesh\['name'\] to choose"),
    ],
    ids=str,
)
def test_a_mesh_whose_axes_mean_nothing_to_us_is_refused(fake_group, names, text):
    fake_group(4)
    assert_refused(text, mesh=mesh_of(2, 2, names=names))


def test_degrees_that_contradict_the_meshes_are_refused(fake_group):
    fake_group(4)
    assert_refused(
        "ring=1, kv_gather=2, ulysses=2 was asked for, and the part ring, ulysses of the mesh has "
        "ring=2, kv_gather=1, ulysses=2",
        kv_gather=2,
        ulysses=2,
        mesh=mesh_of(2, 2, names=("ring", "ulysses")),
    )


def test_something_that_is_no_mesh_is_refused():
    assert_refused("mesh='sp': want a DeviceMesh or a ProcessGroup", mesh="sp")


def test_degrees_that_do_not_match_the_group_are_refused(fake_group):
    fake_group(4)
    assert_refused(
        "sp=2, but the default process group has 4 ranks: the degrees must multiply to its size. "
        "Ask for sp=4, start 2 ranks, or pass mesh= with a group of 2",
        sp=2,
    )


def test_degrees_that_do_not_match_the_mesh_are_refused(fake_group):
    fake_group(4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    assert_refused("sp=4, but the mesh's axis 'sp' has 2 ranks", sp=4, mesh=mesh)


def test_without_torchrun_the_error_says_how_to_start():
    assert_refused(
        "sp=2: no process group, and this process was not started by torchrun .RANK and WORLD_SIZE are not set.. "
        "Start it with `torchrun --nproc-per-node 2 ...`, or use spcompile.testing.simulate",
        sp=2,
    )
    assert not dist.is_initialized()


def test_a_group_is_started_from_torchruns_environment(monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "0")):
        monkeypatch.setenv(name, value)
    try:
        assert_refused("has 1 ranks", sp=2)
        assert dist.get_backend() == "gloo"
    finally:
        dist.destroy_process_group()


def test_a_group_of_one_changes_nothing(world_of_one):
    model, x = SelfAttention(), tokens(7)
    with torch.no_grad():
        out = torch.compile(model, backend=spcompile.backend(inner="eager"))(x)
        assert torch.equal(out, model(x))


def test_a_model_without_attention_needs_no_group_of_that_size_to_be_right(fake_group):
    fake_group(2)
    model, x = torch.nn.Linear(24, 3), tokens(5)
    with torch.no_grad():
        assert torch.equal(torch.compile(model, backend=spcompile.backend(sp=2, inner="eager"))(x), model(x))


def test_subclasses_and_conjugates_are_compared_too(world_of_one):
    """By the tensors they are made of; a digest sees every bit."""
    weight = TwoTensor(torch.randn(3, 2), torch.randn(3, 2))
    inputs = (weight, torch.randn(2, dtype=torch.complex64).conj(), torch.ones(()), 3)
    names = dict(enumerate(["w", "z", "one", "n"]))
    SameInputs(lambda *xs: xs, dist.group.WORLD, names, draws=True, always=True)(*inputs)
    x = torch.randn(5, 7)
    assert digest(x) == digest(x.clone())
    assert digest(x) != digest(x.flip(0))
    assert digest(x) != digest(x.index_fill(0, torch.tensor([4]), torch.nan))


def test_a_graph_that_reads_no_input_has_nothing_to_compare(world_of_one):
    call = SameInputs(lambda *xs: xs, dist.group.WORLD, {}, draws=False, always=True)
    assert call(3) == (3,)


def test_a_group_that_this_rank_is_not_in(fake_group):
    fake_group(4)
    assert_refused("a group that this rank is not in", dist.new_group([1, 2]), sp=2)


def test_a_graph_for_another_number_of_ranks_is_not_run(world_of_one):
    with pytest.raises(RuntimeError, match="compiled for 2 ranks, and its process group has 1 now"):
        ops.unshard(torch.zeros(1, 3), 1, [1, 1, 6], [1, 2, 1], world_of_one)


def test_sub_groups_are_not_kept_once_all_have_let_go(fake_group):
    group = fake_group(4)
    (axis,) = make_axes(group, {(1, 2, 2)})[:1]
    hold([axis]), hold([axis])
    let_go([axis])
    assert axis in dist.distributed_c10d._world.pg_map
    let_go([axis])
    assert axis not in dist.distributed_c10d._world.pg_map


def test_a_sub_group_that_nobody_has_is_not_held_for_its_holders(fake_group):
    group = fake_group(4)
    hold(make_axes(group, {(1, 2, 2)}))
    made = [weakref.ref(g) for g in make_axes(group, {(1, 2, 2)})]
    del group
    dist.destroy_process_group()
    gc.collect()
    assert [g() for g in made] == [None, None]
