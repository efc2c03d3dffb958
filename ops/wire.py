"""What travels between ranks.

An exchange is written once, as a generator: it packs what this rank sends, *yields* a request, is handed
what came back, and returns the result. `over_group` answers requests with collectives of a process group;
`in_lockstep` answers them inside one process for all ranks, which is how `spcompile.testing` simulates a run
with the very code that real ranks execute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group, _world

from spcompile.ops import hostmem, running
from spcompile.ops import mesh as meshes
from spcompile.ops.hostmem import as_bytes


@dataclass(frozen=True)
class AllToAll:
    """``send`` [n, ...]: slice i goes to peer i along ``axis``; the answer is [n, ...], slice i from peer i."""

    send: Tensor
    axis: str | None = None


@dataclass(frozen=True)
class AllReduce:
    """The answer is the sum over all peers of ``send``, the same on each."""

    send: Tensor
    axis: str | None = None


@dataclass
class Started:
    """A request that is answered at once, with None, so that the rank can compute meanwhile.

    A `Wait` for it brings what was ``received``.
    """

    works: Sequence[dist.Work | _Taking] = field(default_factory=list, init=False)
    received: Any = field(default=None, init=False)


@dataclass
class AllGather(Started):
    """``send`` [...] goes to every peer along ``axis``; received is [n, ...], slice i from peer i."""

    send: Tensor
    axis: str | None = None


@dataclass
class Collect(Started):
    """The pieces ``send`` go to every peer along ``axis``, and peer i's arrive in the pieces ``into[i]``.

    All pieces are contiguous and piece j has one shape everywhere: what `AllGather` does, without a buffer in between.
    """

    send: Sequence[Tensor]
    into: Sequence[Sequence[Tensor]]
    axis: str | None = None


@dataclass
class Shift(Started):
    """``send`` goes ``step`` peers on along ``axis``, around a ring; received is what came as far."""

    send: Tensor
    axis: str | None
    step: int = 1
    on_host: Tensor | None = field(default=None, init=False)


@dataclass(frozen=True)
class Wait:
    """The answer is what a request received."""

    started: Started


Request = AllToAll | AllReduce | Started | Wait
Program = Generator[Request, Any, Any]


def rank_in(group_name: str) -> int:
    """This process's rank in the named group."""
    return dist.get_rank(_resolve_process_group(GroupName(group_name)))


def is_capturable(group_name: str) -> bool:
    """Can a CUDA graph hold this group's exchanges? NCCL's are kernels; gloo's run on the host.

    A name that no group has is one that is planned for, and planned for NCCL.
    """
    try:
        group = _resolve_process_group(GroupName(group_name))
    except (RuntimeError, LookupError):
        return True
    return "nccl" in dist.get_backend(group)


def over_group(program: Program, group_name: str, mesh: Sequence[int]) -> Any:
    """Run this rank's ``program`` over a process group, seen as ``mesh``, and return what it returns."""
    group = _resolve_process_group(GroupName(group_name))
    if group.size() != meshes.degree(mesh):
        raise RuntimeError(
            f"this graph was compiled for {meshes.degree(mesh)} ranks, and its process group has {group.size()} now: "
            "call torch._dynamo.reset() after the group has changed"
        )
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
    description = f"spcompile {axis} of {'x'.join(map(str, mesh))}{_in(group)}"
    for known in _world.pg_map:
        if known.group_desc == description and dist.get_process_group_ranks(known) == [ranks[m] for m in members]:
            return known
    with _names_never_used(_destroyed[description]):
        made = dist.new_group([ranks[m] for m in members], use_local_synchronization=True, group_desc=description)
    assert isinstance(made, dist.ProcessGroup)
    return made


def sub_groups(group: dist.ProcessGroup) -> list[dist.ProcessGroup]:
    """Those that `axis_group` has made of a group."""
    return [g for g in _world.pg_map if g.group_desc.startswith("spcompile ") and g.group_desc.endswith(_in(group))]


def _in(group: dist.ProcessGroup) -> str:
    return f" in {group.group_name}"


def destroy_axis_group(group: dist.ProcessGroup) -> None:
    """Destroy a sub-group that `axis_group` made, unless c10d has already. On all its ranks."""
    if group in _world.pg_map:
        _destroyed[group.group_desc] += 1
        dist.destroy_process_group(group)


_destroyed: Counter[str] = Counter()
"""How often the sub-group of a description was destroyed: all its ranks count alike."""


@contextmanager
def _names_never_used(generation: int) -> Iterator[None]:
    """Let c10d give a group another name than the destroyed ones of the same ranks had.

    It names a group after its ranks and the number of groups there are, and ranks meet under that name in the store,
    where addresses of the destroyed group still are. So there are more groups while it chooses.
    """
    more: Any = {object(): f"spcompile {i}" for i in range(1024 * generation)}
    _world.pg_names.update(more)
    try:
        yield
    finally:
        for key in more:
            del _world.pg_names[key]


def _collective(request: Request, group: dist.ProcessGroup, mesh: Sequence[int]) -> Any:
    if isinstance(request, Wait):
        for work in request.started.works:
            if isinstance(work, _Taking):
                work.wait()
            else:
                with running.sockets():
                    work.wait()
        if isinstance(request.started, Shift) and request.started.on_host is not None:
            request.started.received.copy_(request.started.on_host)
        return request.started.received
    assert isinstance(request, (AllToAll, AllReduce, AllGather, Collect, Shift))
    peers = axis_group(group, mesh, request.axis)
    if isinstance(request, AllToAll):
        send = request.send.contiguous()
        received = torch.empty_like(send)
        if memory := _shared_memory(list(send), peers):
            message = memory.put(list(send))
            for r, slot in enumerate(received):
                as_bytes(slot).copy_(message.arrived(r)[memory.rank])
            message.done()
            return received
        with running.sockets():
            dist.all_to_all_single(as_bytes(received), as_bytes(send), group=peers)
        return received
    if isinstance(request, AllReduce):
        total = request.send.clone(memory_format=torch.contiguous_format)
        if memory := _shared_memory([total], peers):
            return _summed(total, memory)
        with running.sockets():
            dist.all_reduce(torch.view_as_real(total) if total.is_complex() else total, group=peers)
        return total
    if isinstance(request, AllGather):
        request.send = request.send.contiguous()
        request.received = request.send.new_empty((peers.size(), *request.send.shape))
        if request.send.is_cpu:  # by sends: gloo's own gather goes through buffers of its own, and takes twice the time
            request.works = _collect([request.send], [[slot] for slot in request.received], peers)
        else:
            work = dist.all_gather_into_tensor(as_bytes(request.received), as_bytes(request.send), peers, async_op=True)
            request.works = [work] if work is not None else []
    elif isinstance(request, Collect):
        request.works = _collect(request.send, request.into, peers)
    else:
        if peers.size() == 1:
            request.received = request.send.clone()
            return None
        request.send = request.send.contiguous()
        request.received = torch.empty_like(request.send)
        send, received = request.send, request.received
        rank, size = dist.get_rank(peers), peers.size()
        if memory := _shared_memory([send], peers):
            request.works = [_Taking(memory.put([send]), {(rank - request.step) % size: [received]})]
            return None
        if _sends_host_memory_only(peers, send):
            send, received = send.cpu(), torch.empty_like(send, device="cpu")
            request.on_host = received
        transfers = [
            dist.P2POp(dist.isend, as_bytes(send), group=peers, group_peer=(rank + request.step) % size),
            dist.P2POp(dist.irecv, as_bytes(received), group=peers, group_peer=(rank - request.step) % size),
        ]
        request.works = dist.batch_isend_irecv(transfers)
    return None


def _shared_memory(send: Sequence[Tensor], group: dist.ProcessGroup) -> hostmem.HostMemory | None:
    """Memory of all ranks of the group through which ``send`` can go now."""
    memory = hostmem.of(group) if all(p.is_cpu for p in send) else None
    return memory if memory is not None and memory.idle and hostmem.fits(send) else None


@dataclass(frozen=True)
class _Taking:
    """Receiving from shared memory, like `dist.Work`. ``into``: for whose pieces, where they go."""

    message: hostmem.Message
    into: Mapping[int, Sequence[Tensor]]

    def wait(self) -> None:
        for r, pieces in self.into.items():
            for piece, sent in zip(pieces, self.message.arrived(r), strict=True):
                as_bytes(piece).copy_(sent)
        self.message.done()


def _summed(mine: Tensor, memory: hostmem.HostMemory) -> Tensor:
    """The sum over all ranks, by rank: the same bits on each."""
    message = memory.put([mine])
    total = torch.zeros_like(mine)
    for r in range(len(memory.pids)):
        (sent,) = message.arrived(r)
        total += sent.view(mine.dtype).view(mine.shape)
    message.done()
    return total


def _collect(
    send: Sequence[Tensor], into: Sequence[Sequence[Tensor]], group: dist.ProcessGroup
) -> Sequence[dist.Work | _Taking]:
    """Start sending ``send`` to all and receiving ``into``."""
    rank = dist.get_rank(group)
    if memory := _shared_memory(send, group):
        message = memory.put(send)
        for mine, piece in zip(into[rank], send, strict=True):
            mine.copy_(piece)
        return [_Taking(message, {r: into[r] for r in memory.others})]
    transfers = []
    for piece in map(as_bytes, send):
        transfers += [dist.P2POp(dist.isend, piece, group=group, group_peer=r) for r in range(len(into)) if r != rank]
    for r, pieces in enumerate(into):
        transfers += [dist.P2POp(dist.irecv, as_bytes(p), group=group, group_peer=r) for p in pieces if r != rank]
    works = dist.batch_isend_irecv(transfers) if transfers else []
    for mine, piece in zip(into[rank], send, strict=True):
        mine.copy_(piece)
    return works


def _sends_host_memory_only(group: dist.ProcessGroup, x: Tensor) -> bool:
    """Gloo's collectives take CUDA tensors; its sends take an address and read it on the host."""
    return not x.is_cpu and group._get_backend(x.device).name() == "gloo"


def bytes_sent(program: Program, mesh: Sequence[int]) -> tuple[int, int]:
    """(Collectives, bytes that a rank sends for them), of a program that asks for all before it waits for any."""
    collectives = num_bytes = 0
    request = next(program, None)
    while request is not None and not isinstance(request, Wait):
        assert isinstance(request, (AllToAll, AllReduce, AllGather, Collect, Shift))
        peers = len(meshes.peers(mesh, 0, request.axis))
        pieces = request.send if isinstance(request, Collect) else [request.send]
        size = sum(p.numel() * p.element_size() for p in pieces)
        collectives += 1
        if isinstance(request, AllToAll):
            num_bytes += size * (peers - 1) // peers
        elif isinstance(request, AllReduce):  # as reduce-scatter and all-gather
            num_bytes += 2 * size * (peers - 1) // peers
        else:
            num_bytes += size * (1 if isinstance(request, Shift) else peers - 1)
        if isinstance(request, (AllToAll, AllReduce)):
            break
        request = next(program, None)
    return collectives, num_bytes


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


def _answer(requests: Sequence[Request], mesh: Sequence[int], rank: int) -> Any:
    """What one rank gets, given what all ranks ask for."""
    mine = requests[rank]
    if isinstance(mine, Wait):
        return mine.started.received
    assert isinstance(mine, (AllToAll, AllReduce, AllGather, Collect, Shift))
    peers = meshes.peers(mesh, rank, mine.axis)
    at = peers.index(rank)
    sends: list[Any] = [requests[p].send for p in peers]  # type: ignore[union-attr]
    if isinstance(mine, AllToAll):
        return torch.stack([s[at] for s in sends])
    if isinstance(mine, AllReduce):
        return torch.stack(sends).sum(0, dtype=mine.send.dtype)
    if isinstance(mine, AllGather):
        mine.received = torch.stack(sends)
    elif isinstance(mine, Collect):
        for pieces, sent in zip(mine.into, sends, strict=True):
            for piece, given in zip(pieces, sent, strict=True):
                piece.copy_(given)
    else:
        mine.received = sends[(at - mine.step) % len(sends)].clone()
    return None
