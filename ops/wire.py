"""What travels between ranks.

An exchange is written once, as a generator: it packs what this rank sends, *yields* a request, is handed
what came back, and returns the result. `over_group` answers requests with collectives of a process group;
`in_lockstep` answers them inside one process for all ranks, which is how `spcompile.testing` simulates a run
with the very code that real ranks execute.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group


@dataclass(frozen=True)
class AllToAll:
    """``send`` [P, ...]: slice i goes to rank i; the answer is [P, ...], slice i from rank i."""

    send: Tensor


@dataclass(frozen=True)
class AllGather:
    """``send`` [...] goes to every rank; the answer is [P, ...], slice i from rank i."""

    send: Tensor


_all_gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor  # the name until torch 2.12

Request = AllToAll | AllGather
Program = Generator[Request, Tensor, Any]


def rank_in(group_name: str) -> int:
    """This process's rank in the named group."""
    return dist.get_rank(_resolve_process_group(group_name))


def over_group(program: Program, group_name: str) -> Any:
    """Run this rank's ``program`` over a process group and return what it returns."""
    group = _resolve_process_group(group_name)
    try:
        request = next(program)
        while True:
            request = program.send(_collective(request, group))
    except StopIteration as stop:
        return stop.value


def in_lockstep(programs: Sequence[Program]) -> list[Any]:
    """Run every rank's program inside this process; rank i's result is element i."""
    results: list[Any] = [None] * len(programs)
    requests: list[Request] = []
    running = True

    def step(rank: int, answer: Tensor | None) -> None:
        nonlocal running
        try:
            requests.append(next(programs[rank]) if answer is None else programs[rank].send(answer))
        except StopIteration as stop:
            results[rank], running = stop.value, False

    answers: list[Tensor | None] = [None] * len(programs)
    while running:
        requests.clear()
        for rank, answer in enumerate(answers):
            step(rank, answer)
        if requests and len(requests) != len(programs):
            raise RuntimeError(
                f"only {len(requests)} of {len(programs)} ranks want to communicate: real ranks would hang"
            )
        if requests:
            answers = list(_all_answers(requests))
    return results


def _collective(request: Request, group: dist.ProcessGroup) -> Tensor:
    send = request.send.contiguous()
    if isinstance(request, AllToAll):
        return funcol.wait_tensor(funcol.all_to_all_single(send, None, None, group))
    gathered = funcol.wait_tensor(_all_gather(send.view(-1), 0, group))
    return gathered.view(group.size(), *send.shape)


def _all_answers(requests: Sequence[Request]) -> list[Tensor]:
    sends = [r.send for r in requests]
    if all(isinstance(r, AllToAll) for r in requests):
        return [torch.stack([s[rank] for s in sends]) for rank in range(len(sends))]
    if all(isinstance(r, AllGather) for r in requests):
        return [torch.stack(sends) for _ in sends]
    raise RuntimeError(f"ranks disagree on the collective: {[type(r).__name__ for r in requests]}")
