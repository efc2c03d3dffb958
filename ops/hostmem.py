"""Exchanges between ranks of one host through memory that they share, instead of gloo's sockets.

A message is copied once by the rank that sends it, into a segment of its own, and once by each that takes it. Through
a socket it is copied by the kernel twice more, and the rank that waits is woken by a thread that was woken first.

Segments are anonymous files (memfd) which peers open through /proc, so nothing has a name, nothing is left behind by
a rank that is killed, and the size of /dev/shm does not matter. That a message is complete is told by a counter stored
after it, which other cores see in this order on x86-64; other machines, and ranks on several hosts, use gloo.

Source: intra-host transports of MPI, as in Nemesis (Buntinas et al., CCGrid 2006).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import sys
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spcompile.ops import running

SLOT = 32 << 20
"""Bytes of one message at most; what is larger goes through gloo."""
_HEADER, _LINE = 4096, 64
_SIZE = _HEADER + 2 * (_LINE + SLOT)
_SPIN_S, _NAP_S, _LOOK_S = 0.005, 5e-5, 0.1


class Interrupted(RuntimeError):
    """Another thread ended the exchange."""


class OutOfStep(RuntimeError):
    """Ranks met in an exchange from different calls."""

    def __init__(self, rank: int, theirs: Sequence[int], mine: Sequence[int]) -> None:
        same = "the same graph" if theirs[0] == mine[0] else "another graph"
        super().__init__(
            f"rank {rank} of the group is in another call: number {theirs[1]}, of {same}, where this rank is in number "
            f"{mine[1]} ({theirs[2]} bytes against {mine[2]})"
        )


class HostMemory:
    """What the ranks of ``group`` share: for each rank two slots for messages, and two counters.

    ``sent`` counts the messages a rank has put, ``taken`` those of all others that it has read. Message n lies in slot
    n % 2, and is overwritten by message n + 2 when all have taken it.
    """

    def __init__(self, group: dist.ProcessGroup, pids: Sequence[int], maps: Sequence[mmap.mmap]) -> None:
        self.rank, self.pids = dist.get_rank(group), pids
        self.timeout_s = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        self.segments = [torch.frombuffer(m, dtype=torch.uint8) for m in maps]
        counters = [s[:_HEADER].view(torch.int64).numpy() for s in self.segments]
        self.sent, self.taken = ([c[i * _LINE :] for c in counters] for i in (0, 1))
        self.number = self.waits = 0
        self.waiting = self.interrupted = self.freed = 0  # which wait it is

    @property
    def others(self) -> list[int]:
        return [r for r in range(len(self.pids)) if r != self.rank]

    @property
    def idle(self) -> bool:
        """Has this rank taken all messages that it asked for? All ranks run one program, so all answer alike."""
        return int(self.taken[self.rank][0]) == self.number

    def put(self, pieces: Sequence[Tensor]) -> Message:
        """Send ``pieces`` (contiguous, of as many bytes in all on every rank) to all others."""
        message = Message(self, self.number + 1, [p.numel() * p.element_size() for p in pieces])
        for r in self.others:
            self.wait(r, self.taken[r], message.number - 2, self.number)
        message.header(self.rank)[:] = message.identity
        for piece, slot in zip(pieces, message.pieces(self.rank), strict=True):
            slot.copy_(as_bytes(piece))
        self.number = self.sent[self.rank][0] = message.number
        return message

    def wait(self, rank: int, counter: Any, number: int, before: int) -> None:
        """Until a rank's counter is there. Raises RuntimeError, as gloo does, if it is no use to wait on.

        Interrupted, this rank has sent ``before`` messages again when `interrupt` returns.
        """
        start = last_look = time.monotonic()
        self.waits += 1
        self.waiting = self.waits
        try:
            while counter[0] < number:
                now = time.monotonic()
                if now - last_look > _LOOK_S:
                    last_look = now
                    self._look(rank, now - start)
                if now - start > _SPIN_S:
                    time.sleep(_NAP_S)
                else:
                    os.sched_yield()
        except Interrupted:
            self.number = self.sent[self.rank][0] = before
            self.freed = self.waiting
            raise
        finally:
            self.waiting = 0

    def interrupt(self) -> bool:
        """From another thread: end the exchange in which this rank waits, as if it had never begun.

        For one that not all ranks have begun. False if this rank does not wait here, or what it waited for came.
        """
        self.interrupted = wait = self.waiting
        while wait and self.waiting == wait:
            time.sleep(_NAP_S)
        return wait > 0 and self.freed == wait

    def settle(self) -> None:
        """After an exception between `put` and `done`: what was not taken is not wanted."""
        self.taken[self.rank][0] = self.number

    def _look(self, rank: int, waited: float) -> None:
        if self.interrupted == self.waiting:
            raise Interrupted("an exchange that not all ranks had begun was ended")
        status = Path(f"/proc/{self.pids[rank]}/stat")
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] in "ZX":
            raise RuntimeError(
                f"rank {rank} of the group has ended (process {self.pids[rank]}) in the middle of a step"
            )
        if waited > self.timeout_s:
            raise RuntimeError(f"rank {rank} of the group sent nothing for {waited:g} s, the group's timeout")


class Message:
    """One message of every rank."""

    def __init__(self, memory: HostMemory, number: int, sizes: Sequence[int]) -> None:
        self.memory, self.number, self.sizes = memory, number, sizes
        self.identity = [*running.call(), sum(sizes)]

    def header(self, rank: int) -> Any:
        """What a rank's message is: the graph, its call, the bytes."""
        start = _HEADER + self.number % 2 * (_LINE + SLOT)
        return self.memory.segments[rank].narrow(0, start, _LINE).view(torch.int64).numpy()[: len(self.identity)]

    def pieces(self, rank: int) -> list[Tensor]:
        """Where a rank's pieces lie."""
        slot = self.memory.segments[rank].narrow(0, _HEADER + self.number % 2 * (_LINE + SLOT) + _LINE, SLOT)
        starts = [sum(map(_padded, self.sizes[:i])) for i in range(len(self.sizes))]
        return [slot.narrow(0, start, size) for start, size in zip(starts, self.sizes, strict=True)]

    def arrived(self, rank: int) -> list[Tensor]:
        """A rank's pieces, when they are there, to be read before `done`. Raises `OutOfStep` if they are others."""
        self.memory.wait(rank, self.memory.sent[rank], self.number, self.number - 1)
        theirs = [int(x) for x in self.header(rank)]
        if theirs != self.identity:
            raise OutOfStep(rank, theirs, self.identity)
        return self.pieces(rank)

    def done(self) -> None:
        """This rank has read all it wants."""
        self.memory.taken[self.memory.rank][0] = self.number


def fits(pieces: Sequence[Tensor]) -> bool:
    """Does a message of these pieces fit in a slot?"""
    return sum(_padded(p.numel() * p.element_size()) for p in pieces) <= SLOT


def _padded(size: int) -> int:
    return -(-size // _LINE) * _LINE


def as_bytes(x: Tensor) -> Tensor:
    """The bytes of a contiguous tensor: collectives do not take every dtype, and bytes are bytes."""
    return x.view(-1).view(torch.uint8)


_memories: weakref.WeakKeyDictionary[dist.ProcessGroup, HostMemory | None] = weakref.WeakKeyDictionary()


def of(group: dist.ProcessGroup) -> HostMemory | None:
    """The memory that the ranks of a group share, or None if they cannot. The first call is made by all its ranks."""
    if dist.get_backend(group) != "gloo":
        return None
    if group not in _memories:
        _memories[group] = _make(group)
    return _memories[group]


def _make(group: dist.ProcessGroup) -> HostMemory | None:
    able, mine = sys.platform == "linux" and platform.machine() == "x86_64", -1
    try:
        if able:
            mine = os.memfd_create("spcompile")
            os.ftruncate(mine, _SIZE)  # memory is taken when it is written
    except OSError:  # no more files: then all use gloo
        able = False
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, (_host() if able else None, os.getpid(), mine), group=group)
    hosts, pids, numbers = zip(*everyone, strict=True)
    maps: list[mmap.mmap] = []
    if able and set(hosts) == {hosts[0]}:
        with contextlib.suppress(OSError):  # containers may forbid it, then this rank has fewer than its peers
            maps += [_mapped(f"/proc/{pid}/fd/{number}") for pid, number in zip(pids, numbers, strict=True)]
    counts: list[Any] = [None] * group.size()
    dist.all_gather_object(counts, len(maps), group=group)
    if mine >= 0:
        os.close(mine)
    with torch.inference_mode(False):  # steps in and out of inference mode write there
        return HostMemory(group, pids, maps) if min(counts) == group.size() else None


def _mapped(path: str) -> mmap.mmap:
    file = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(file, _SIZE)
    finally:
        os.close(file)


def _host() -> tuple[str, str]:
    """The same for processes that see each other under /proc."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")


def interrupt(group: dist.ProcessGroup) -> bool:
    """`HostMemory.interrupt` of a group's memory, if it has any."""
    memory = _memories.get(group)
    return memory is not None and memory.interrupt()


def settle(group: dist.ProcessGroup) -> None:
    """`HostMemory.settle` of a group's memory, if it has any."""
    memory = _memories.get(group)
    if memory is not None:
        memory.settle()
