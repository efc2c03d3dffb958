"""Which process group shares one sequence."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from spcompile.config import Config, Mesh
from spcompile.errors import SPConfigError
from spcompile.ops import wire
from spcompile.ops.mesh import AXES


@dataclass(frozen=True)
class Ranks:
    """The group, and the degrees that its mesh prescribes, if it is named after the exchanges."""

    group: dist.ProcessGroup
    mesh: Mesh | None = None


def resolve(mesh: DeviceMesh | dist.ProcessGroup | None, config: Config, device_type: str) -> Ranks:
    """The ranks to run on. Raises `SPConfigError` if they do not fit the degrees asked for."""
    ranks, what = _find(mesh, config.degree, device_type)
    size = ranks.group.size()
    if ranks.mesh is not None and config.mesh is not None and ranks.mesh != config.mesh:
        raise SPConfigError("SP102", f"{_degrees(config.mesh)} was asked for, and {what} has {_degrees(ranks.mesh)}")
    if config.degree is not None and size != config.degree:
        raise SPConfigError(
            "SP102",
            f"sp={config.degree}, but {what} has {size} ranks: the degrees must multiply to its size. "
            f"Ask for sp={size}, start {config.degree} ranks, or pass mesh= with a group of {config.degree}",
        )
    return ranks


def _degrees(mesh: Mesh) -> str:
    return ", ".join(f"{axis}={degree}" for axis, degree in zip(AXES, mesh, strict=True))


def _find(mesh: DeviceMesh | dist.ProcessGroup | None, degree: int | None, device_type: str) -> tuple[Ranks, str]:
    if isinstance(mesh, dist.ProcessGroup):
        return Ranks(mesh), "the process group passed as mesh="
    if isinstance(mesh, DeviceMesh):
        return _of_device_mesh(mesh)
    if mesh is dist.GroupMember.NON_GROUP_MEMBER:
        raise SPConfigError("SP107", "mesh= is a group that this rank is not in: call the model on its ranks only")
    if mesh is not None:
        raise SPConfigError("SP107", f"mesh={mesh!r}: want a DeviceMesh or a ProcessGroup")
    if not dist.is_initialized():
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            asked = "" if degree is None else f"sp={degree}: "
            raise SPConfigError(
                "SP106",
                f"{asked}no process group, and this process was not started by torchrun (RANK and WORLD_SIZE are "
                f"not set). Start it with `torchrun --nproc-per-node {degree or 'P'} ...`, or use "
                "spcompile.testing.simulate to try it in one process",
            )
        dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    assert dist.group.WORLD is not None
    return Ranks(dist.group.WORLD), "the default process group"


def _of_device_mesh(mesh: DeviceMesh) -> tuple[Ranks, str]:
    """The only axis, the one named ``sp``, or those named after the exchanges, slowest first."""
    names = mesh.mesh_dim_names or ()
    ours = tuple(n for n in names if n in AXES)
    if "sp" in names and ours:
        raise SPConfigError("SP107", f"the mesh has axes {names}: name either one axis 'sp' or axes {', '.join(AXES)}")
    if "sp" in names:
        return Ranks(mesh.get_group("sp")), "the mesh's axis 'sp'"
    if not ours:
        if mesh.ndim == 1:
            return Ranks(mesh.get_group()), "the mesh"
        raise SPConfigError(
            "SP107",
            f"the mesh has axes {names or mesh.ndim}: want one axis, one named 'sp', or axes named "
            f"{', '.join(AXES)}; pass mesh['name'] to choose",
        )
    order = tuple(a for a in AXES if a in ours)
    if ours != order:
        raise SPConfigError(
            "SP107", f"the mesh has axes {names}: want {', '.join(order)} in this order, ulysses innermost"
        )
    sizes = dict(zip(names, mesh.shape, strict=True))
    ring, kv_gather, ulysses = (sizes.get(a, 1) for a in AXES)
    degrees = (ring, kv_gather, ulysses)
    group = mesh.get_group(ours[0]) if len(ours) == 1 else mesh[ours]._flatten("_".join(ours)).get_group()
    assert group.size() == math.prod(degrees)
    return Ranks(group, degrees), f"the part {', '.join(ours)} of the mesh"


def make_axes(group: dist.ProcessGroup, meshes: set[Mesh]) -> list[dist.ProcessGroup]:
    """Make the sub-groups of every mesh that a graph uses, in one order on all ranks, before it runs. Returns them."""
    axes = [(mesh, axis) for mesh in sorted(meshes) for axis, d in zip(AXES, mesh, strict=True) if d > 1]
    made = [wire.axis_group(group, mesh, axis) for mesh, axis in axes]
    return list(dict.fromkeys(g for g in made if g is not group))


_users: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""How many backends hold a sub-group: two on one group share those along its axes."""


def hold(groups: Sequence[dist.ProcessGroup]) -> None:
    """Keep sub-groups until they are let go as often."""
    for group in groups:
        _users[group] = _users.get(group, 0) + 1


def let_go(groups: Sequence[dist.ProcessGroup]) -> None:
    """Destroy the sub-groups that nobody holds any more, in this order, unless c10d has destroyed them already."""
    for group in groups:
        _users[group] -= 1
        if not _users[group]:
            del _users[group]
            wire.destroy_axis_group(group)
