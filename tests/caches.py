"""Attention with keys and values of earlier steps, in the ways in which models keep them.

Shapes: x [B, N, C]; caches [B, H, T, D], which the models read, write or return.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from helpers import B, C, H
from torch import Tensor, nn

D = C // H
N, T, START = 7, 20, 3


class Cached(nn.Module):
    """``keep(k, v, *caches)`` says what the queries attend to, and what is returned beside the output."""

    def __init__(self, keep: Callable[..., tuple[Tensor, Tensor, tuple[Tensor, ...]]], masked: bool = False) -> None:
        super().__init__()
        self.qkv, self.out, self.mlp = nn.Linear(C, 3 * C), nn.Linear(C, C), nn.Linear(C, C)
        self.keep, self.masked = keep, masked

    def forward(self, x: Tensor, *caches: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (y.unflatten(-1, (H, D)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        k, v, kept = self.keep(k, v, *caches)
        mask = caches[-1] if self.masked else None
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        return (x + self.mlp(self.out(out)), *kept)


class InBuffers(Cached):
    """The caches are buffers of the model."""

    def __init__(self) -> None:
        super().__init__(written_by_slices)
        self.register_buffer("keys", torch.randn(B, H, T, D))
        self.register_buffer("values", torch.randn(B, H, T, D))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return super().forward(x, self.keys, self.values)


def appended(k, v, old_k, old_v):
    """The new ones behind all old ones, returned."""
    k, v = torch.cat([old_k, k], 2), torch.cat([old_v, v], 2)
    return k, v, (k, v)


def last_ones(k, v, old_k, old_v):
    """A sliding window: as many as there were, returned."""
    k, v = torch.cat([old_k, k], 2), torch.cat([old_v, v], 2)
    return k, v, (k[:, :, -T:], v[:, :, -T:])


def written_by_slices(k, v, old_k, old_v):
    """In place, at a place that is known."""
    old_k[:, :, START : START + N], old_v[:, :, START : START + N] = k, v
    return old_k[:, :, : START + N], old_v[:, :, : START + N], ()


def written_for_later(k, v, old_k, old_v):
    """In place, and nobody reads them in this step."""
    old_k[:, :, START : START + N].copy_(k)
    old_v[:, :, START : START + N].copy_(v)
    return k, v, ()


def pushed_through(k, v, old_k, old_v):
    """In place, the oldest make room."""
    for old, new in ((old_k, k), (old_v, v)):
        old[:, :, :-N] = old[:, :, N:].clone()
        old[:, :, -N:] = new
    return old_k, old_v, ()


def written_by_index(k, v, old_k, old_v, places, mask):
    """In place, at places that are an input (a static cache)."""
    old_k.index_copy_(2, places, k)
    old_v.index_copy_(2, places, v)
    return old_k, old_v, ()


def put_by_index(k, v, old_k, old_v, places, mask):
    old_k[:, :, places], old_v[:, :, places] = k, v
    return old_k, old_v, ()


def models() -> dict[str, tuple[nn.Module, list[Tensor]]]:
    """Each with its caches and what else it is given, float64."""
    keys_and_values = [torch.randn(B, H, T, D).double() for _ in range(2)]
    by_index = [*keys_and_values, torch.tensor([4, 5, 6, 8, 1, 0, 15]), torch.rand(B, 1, 1, T) > 0.3]
    plain = (appended, last_ones, written_by_slices, written_for_later, pushed_through)
    found: dict[str, tuple[nn.Module, list[Tensor]]] = {k.__name__: (Cached(k), keys_and_values) for k in plain}
    found |= {k.__name__: (Cached(k, masked=True), by_index) for k in (written_by_index, put_by_index)}
    found["in_buffers"] = (InBuffers(), [])
    return {name: (model.double(), given) for name, (model, given) in found.items()}
