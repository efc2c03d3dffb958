"""What travels between ranks.

An exchange is written once, as a generator: it packs what this rank sends, *yields* a request, is handed
what came back, and returns the result. `over_group` answers requests with collectives of a process group;
`in_lockstep` answers them inside one process for all ranks, which is how `spcompile.testing` simulates a run
with the very code that real ranks execute.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group, _world

from spcompile.ops import mesh as meshes


@dataclass(frozen=True)
class AllToAll:
    """``send`` [n, ...]: slice i goes to peer i along ``axis``; the answer is [n, ...], slice i from peer i."""

    send: Tensor
    axis: str | None = None


@dataclass(frozen=True)
class AllGather:
    """``send`` [...] goes to every peer along ``axis``; the answer is [n, ...], slice i from peer i."""

    send: Tensor
    axis: str | None = None


@dataclass
class Shift:
    """``send`` goes to the next peer along ``axis``, around a ring, and the previous peer's comes in.

    Answered at once with None, so that the rank can compute meanwhile; a `Wait` for it brings the tensor.
    """

    send: Tensor
    axis: str
    works: list[dist.Work] = field(default_factory=list)
    received: Tensor | None = None


@dataclass(frozen=True)
class Wait:
    """The answer is what a `Shift` received."""

    shift: Shift


Request = AllToAll | AllGather | Shift | Wait
Program = Generator[Request, Any, Any]

_all_gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor  # the name until torch 2.12


def rank_in(group_name: str) -> int:
    """This process's rank in the named group."""
    return dist.get_rank(_resolve_process_group(GroupName(group_name)))


def over_group(program: Program, group_name: str, mesh: Sequence[int]) -> Any:
    """Run this rank's ``program`` over a process group, seen as ``mesh``, and return what it returns."""
    group = _resolve_process_group(GroupName(group_name))
    answer: Any = None
    try:
        while True:
            request = program.send(answer)
            answer = _collective(request, group, mesh)
    except StopIteration as stop:
        return stop.value


def axis_group(group: dist.ProcessGroup, mesh: Sequence[int], axis: str | None) -> dist.ProcessGroup:
    """The sub-group along an axis that this rank belongs to. The first call on a mesh makes it, on all its ranks.

    c10d keeps it: it is found again by its description, so that graphs can name the whole group only.
    """
    members = meshes.peers(mesh, dist.get_rank(group), axis)
    if len(members) == group.size():
        return group
    ranks = dist.get_process_group_ranks(group)
    description = f"spcompile {axis} of {'x'.join(map(str, mesh))} in {group.group_name}"
    for known in _world.pg_map:
        if known.group_desc == description and dist.get_process_group_ranks(known) == [ranks[m] for m in members]:
            return known
    made = dist.new_group([ranks[m] for m in members], use_local_synchronization=True, group_desc=description)
    assert isinstance(made, dist.ProcessGroup)
    return made


def _collective(request: Request, group: dist.ProcessGroup, mesh: Sequence[int]) -> Tensor | None:
    if isinstance(request, Wait):
        for work in request.shift.works:
            work.wait()
        return request.shift.received
    if isinstance(request, Shift):
        _start(request, axis_group(group, mesh, request.axis))
        return None
    peers = axis_group(group, mesh, request.axis)
    send = request.send.contiguous()
    raw = send.view(-1).view(torch.uint8)  # collectives do not take every dtype, and bytes are bytes
    if isinstance(request, AllToAll):
        received = torch.empty_like(raw)
        dist.all_to_all_single(received, raw, group=peers)
        return received.view(send.dtype).view(send.shape)
    gathered = _gather_on_cpu(raw, peers) if raw.is_cpu else funcol.wait_tensor(_all_gather(raw, 0, peers))
    return gathered.view(send.dtype).view(peers.size(), *send.shape)


def _gather_on_cpu(raw: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather by sends: gloo's own goes through buffers of its own, and takes twice the time."""
    rank, size = dist.get_rank(group), group.size()
    gathered = raw.new_empty((size, raw.numel()))
    gathered[rank].copy_(raw)
    others = [r for r in range(size) if r != rank]
    transfers = [dist.P2POp(dist.isend, raw, group=group, group_peer=r) for r in others]
    transfers += [dist.P2POp(dist.irecv, gathered[r], group=group, group_peer=r) for r in others]
    for work in dist.batch_isend_irecv(transfers) if transfers else ():
        work.wait()
    return gathered.view(-1)


def _start(shift: Shift, group: dist.ProcessGroup) -> None:
    rank, size = dist.get_rank(group), group.size()
    shift.received = torch.empty_like(shift.send)
    outgoing, incoming = shift.send.view(-1).view(torch.uint8), shift.received.view(-1).view(torch.uint8)
    to, source = (rank + 1) % size, (rank - 1) % size
    shift.works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, outgoing, group=group, group_peer=to),
            dist.P2POp(dist.irecv, incoming, group=group, group_peer=source),
        ]
    )


def bytes_sent(program: Program, mesh: Sequence[int]) -> int:
    """Bytes that a rank sends for a program of one collective."""
    request = next(program)
    assert isinstance(request, (AllToAll, AllGather))
    peers = len(meshes.peers(mesh, 0, request.axis))
    num_bytes = request.send.numel() * request.send.element_size()
    return num_bytes * (peers - 1) if isinstance(request, AllGather) else num_bytes * (peers - 1) // peers


def in_lockstep(programs: Sequence[Program], mesh: Sequence[int]) -> list[Any]:
    """Run every rank's program inside this process; rank i's result is element i."""
    results: list[Any] = [None] * len(programs)
    answers: list[Any] = [None] * len(programs)
    while True:
        requests: list[Request] = []
        for rank, program in enumerate(programs):
            try:
                requests.append(program.send(answers[rank]))
            except StopIteration as stop:
                results[rank] = stop.value
        if not requests:
            return results
        kinds = {(type(r).__name__, getattr(r, "axis", None)) for r in requests}
        if len(requests) < len(programs) or len(kinds) > 1:
            raise RuntimeError(f"{len(requests)} of {len(programs)} ranks ask for {kinds}: real ranks would hang")
        answers = [_answer(requests, mesh, rank) for rank in range(len(programs))]


def _answer(requests: Sequence[Request], mesh: Sequence[int], rank: int) -> Tensor | None:
    """What one rank gets, given what all ranks ask for."""
    mine = requests[rank]
    if isinstance(mine, Wait):
        return mine.shift.received
    peers = meshes.peers(mesh, rank, mine.axis)
    at = peers.index(rank)
    sends = [requests[p].send for p in peers]  # type: ignore[union-attr]
    if isinstance(mine, AllToAll):
        return torch.stack([s[at] for s in sends])
    if isinstance(mine, AllGather):
        return torch.stack(sends)
    mine.received = sends[at - 1].clone()
    return None
