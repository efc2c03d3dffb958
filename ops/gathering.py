"""K/V gather: every rank keeps its queries and collects the keys and values of all ranks along the axis.

Source: the all-gather form of context parallelism (Llama 3 training report, arXiv:2407.21783, section 3.3.2).
Shapes and layouts as in `spcompile.ops.ulysses`; g ranks along the mesh's kv_gather axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spcompile.ops import chunks, wire
from spcompile.ops import mesh as meshes


def _check(k: Tensor, v: Tensor, kv_layout: Sequence[int], mesh: Sequence[int]) -> None:
    meshes.check(mesh)
    if k.dtype != v.dtype or k.device != v.device:
        raise ValueError(f"k is {k.dtype} on {k.device}, v is {v.dtype} on {v.device}: want the same")
    for x in (k, v):
        chunks.check(kv_layout, meshes.degree(mesh), x.shape[-2], span=mesh[2])


@dataclass
class _Gather:
    """A gather on its way: ``finish(received, out)`` makes whole keys and values, in ``out`` where it can."""

    started: wire.Started
    finish: Callable[[Any, Sequence[Tensor | None]], list[Tensor]]


_ON_THE_WAY: dict[int, _Gather] = {}
"""Gathers that were started, by the address of their tickets."""


def start_program(rank: int, k: Tensor, v: Tensor, kv_layout: Sequence[int], mesh: Sequence[int]) -> wire.Program:
    """This rank's part of `kv_gather_start`."""
    gather = _begin(k, v, kv_layout, mesh)
    yield gather.started
    ticket = torch.zeros(1, dtype=torch.uint8, device=k.device)
    _ON_THE_WAY[ticket.data_ptr()] = gather
    return ticket


def program(
    rank: int,
    k: Tensor,
    v: Tensor,
    ticket: Tensor | None,
    kv_layout: Sequence[int],
    mesh: Sequence[int],
    out: Sequence[Tensor | None] = (None, None),
) -> wire.Program:
    """This rank's part of `kv_gather`: K and V together, one all-gather, now or long since on its way."""
    if ticket is None:
        gather = _begin(k, v, kv_layout, mesh)
        yield gather.started
    else:
        _check(k, v, kv_layout, mesh)
        gather = _ON_THE_WAY.pop(ticket.data_ptr())
    received = yield wire.Wait(gather.started)
    k, v = gather.finish(received, [None if x is None else x.transpose(-3, -2) for x in out])
    return k.transpose(-3, -2), v.transpose(-3, -2)


def _begin(k: Tensor, v: Tensor, kv_layout: Sequence[int], mesh: Sequence[int]) -> _Gather:
    _check(k, v, kv_layout, mesh)
    sent = [x.transpose(-3, -2).contiguous() for x in (k, v)]  # as models store them: long runs to copy
    in_place = _in_place(sent, k.dim() - 3, kv_layout, mesh) if k.is_cpu else None
    return in_place or _packed(sent, k.dim() - 3, kv_layout, mesh)


def _packed(sent: list[Tensor], dim: int, layout: Sequence[int], mesh: Sequence[int]) -> _Gather:
    """K and V in one buffer; every chunk is copied to its place afterwards."""
    degree, sizes = meshes.degree(mesh), [x.numel() for x in sent]
    send = sent[0].new_empty(sum(sizes))
    for slot, x in zip(send.split(sizes), sent, strict=True):
        slot.view(x.shape).copy_(x)

    def finish(gathered: Tensor, out: Sequence[Tensor | None]) -> list[Tensor]:
        parts = [p.view(mesh[1], *x.shape) for p, x in zip(gathered.split(sizes, dim=1), sent, strict=True)]
        return [chunks.join(p, dim, layout, degree, mesh[2], x) for p, x in zip(parts, out, strict=True)]

    return _Gather(wire.AllGather(send, "kv_gather"), finish)


def _in_place(sent: list[Tensor], dim: int, layout: Sequence[int], mesh: Sequence[int]) -> _Gather | None:
    """Every chunk is sent from where it lies to its place; None where it has no place of its own.

    For ranks on CPUs, where a send is cheap to start and a copy is not.
    """
    degree, block, axis = meshes.degree(mesh), mesh[2], mesh[1]
    gathered = [chunks.resized(x, (dim, chunks.extent(layout, degree, block * axis))) for x in sent]
    mine = [chunks.pieces(x, dim, layout, degree, block, 1) for x in sent]
    places = [chunks.pieces(x, dim, layout, degree, block, axis) for x in gathered]
    if any(p is None for p in (*mine, *places)):
        return None
    send = [piece for blocks in mine if blocks for piece in blocks[0]]
    into = [[piece for blocks in places if blocks for piece in blocks[i]] for i in range(axis)]
    return _Gather(wire.Collect(send, into, "kv_gather"), lambda _, out: gathered)


@torch.library.custom_op("spcompile::kv_gather_start", mutates_args=())
def kv_gather_start(k: Tensor, v: Tensor, kv_layout: Sequence[int], mesh: Sequence[int], group: str) -> Tensor:
    """Start `kv_gather`, so that what does not need its results is computed while they travel.

    Args: as for `kv_gather`, which must get the same ``k`` and ``v`` later: they are read until then.
    Returns:
        A ticket for `kv_gather`, uint8 [1]. It may be handed in once.
    """
    return wire.over_group(start_program(wire.rank_in(group), k, v, kv_layout, mesh), group, mesh)


@kv_gather_start.register_fake
def _(k: Tensor, v: Tensor, kv_layout: Sequence[int], mesh: Sequence[int], group: str) -> Tensor:
    _check(k, v, kv_layout, mesh)
    return torch.zeros(1, dtype=torch.uint8, device=k.device)


@torch.library.custom_op("spcompile::kv_gather", mutates_args=())
def kv_gather(
    k: Tensor, v: Tensor, ticket: Tensor | None, kv_layout: Sequence[int], mesh: Sequence[int], group: str
) -> tuple[Tensor, Tensor]:
    """The keys and values of all ranks along the kv_gather axis. One all-gather for both.

    Args:
        k: [..., G, T_block, D], a block of u chunks (one chunk without Ulysses).
        v: [..., G, T_block, E], same dtype and device.
        ticket: from `kv_gather_start`, or None to start here.
        kv_layout: ``[1, 1, *segments]`` of the key tokens.
        mesh: ``[ring, kv_gather, ulysses]``.
        group: process group name.
    Returns:
        k and v of g * u chunks in global order, stored as [..., tokens, heads, width]; all of them, without padding,
        if g * u = P.
    Raises:
        ValueError: lengths that do not fit the layout, mixed dtypes.
    """
    return wire.over_group(program(wire.rank_in(group), k, v, ticket, kv_layout, mesh), group, mesh)


@kv_gather.register_fake
def _(
    k: Tensor, v: Tensor, ticket: Tensor | None, kv_layout: Sequence[int], mesh: Sequence[int], group: str
) -> tuple[Tensor, Tensor]:
    _check(k, v, kv_layout, mesh)
    tokens = chunks.extent(kv_layout, meshes.degree(mesh), mesh[1] * mesh[2])
    return tuple(chunks.fake_attention_operand(x, x.shape[-3], tokens) for x in (k, v))  # type: ignore[return-value]
