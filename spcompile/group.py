"""Which process group shares one sequence."""

from __future__ import annotations

import os

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from spcompile.errors import RankMismatchError, SPConfigError

AXES = ("ulysses", "sp")
"""Axes of a named mesh that sequence parallelism takes."""


def resolve(mesh: DeviceMesh | dist.ProcessGroup | None, degree: int | None, device_type: str) -> dist.ProcessGroup:
    """The group to run on, of ``degree`` ranks if that is given. Raises `SPConfigError` if there is none."""
    group, what = _group(mesh, degree, device_type)
    if degree is not None and group.size() != degree:
        raise SPConfigError(
            f"sp={degree}, but {what} has {group.size()} ranks: the degrees must multiply to its size. "
            f"Ask for sp={group.size()}, start {degree} ranks, or pass mesh= with a group of {degree}"
        )
    return group


def _group(
    mesh: DeviceMesh | dist.ProcessGroup | None, degree: int | None, device_type: str
) -> tuple[dist.ProcessGroup, str]:
    if isinstance(mesh, dist.ProcessGroup):
        return mesh, "the process group passed as mesh="
    if isinstance(mesh, DeviceMesh):
        axis = _axis(mesh)
        return mesh.get_group(axis), "the mesh" if axis is None else f"the mesh's axis {axis!r}"
    if mesh is not None:
        raise SPConfigError(f"mesh={mesh!r}: want a DeviceMesh or a ProcessGroup")
    if not dist.is_initialized():
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            asked = "" if degree is None else f"sp={degree}: "
            raise SPConfigError(
                f"{asked}no process group, and this process was not started by torchrun (RANK and WORLD_SIZE are "
                f"not set). Start it with `torchrun --nproc-per-node {degree or 'P'} ...`, or use "
                "spcompile.testing.simulate to try it in one process"
            )
        dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    assert dist.group.WORLD is not None
    return dist.group.WORLD, "the default process group"


def _axis(mesh: DeviceMesh) -> str | None:
    """The axis to use: the only one, or the one with our name."""
    if mesh.ndim == 1:
        return None
    names = [n for n in mesh.mesh_dim_names or () if n in AXES]
    if len(names) != 1:
        raise SPConfigError(
            f"the mesh has axes {mesh.mesh_dim_names or mesh.ndim}: want one axis, or one named "
            f"{' or '.join(repr(a) for a in AXES)}; pass mesh['name'] to choose"
        )
    return names[0]


def require_same(group: dist.ProcessGroup, digest: str, what: str) -> None:
    """All ranks must hold the same graph before any of them runs it. Raises `RankMismatchError` on every rank."""
    digests: list[str] = [""] * group.size()
    dist.all_gather_object(digests, digest, group=group)
    if len(set(digests)) > 1:
        ranks = {d: [r for r, other in enumerate(digests) if other == d] for d in digests}
        raise RankMismatchError(
            f"the ranks compiled different graphs for {what}: ranks {' / '.join(map(str, ranks.values()))} differ. "
            "Call the model with inputs of the same shapes, dtypes and options on every rank"
        )
