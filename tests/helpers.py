"""Small models and checks that several test files use.

Shapes: B batch, S tokens, C channels, H heads.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn

from spcompile.report import Report
from spcompile.testing import simulate

B, C, H = 2, 24, 12


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int = H, **options: Any) -> Tensor:
    """Attention of q [B, S, C] over k, v [B, T, C]."""
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).flatten(2)


class SelfAttention(nn.Module):
    """x [B, S, C] -> [B, S, C]: one projection, one attention."""

    def __init__(self, channels: int = C, heads: int = H, **options: Any) -> None:
        super().__init__()
        self.qkv, self.heads, self.options = nn.Linear(channels, 3 * channels), heads, options

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return attend(q, k, v, self.heads, **self.options, **options)


class Between(nn.Module):
    """Attention, ``op`` on the sharded tokens, attention again on what it gives ([B, any, any])."""

    def __init__(self, op: Callable[..., Tensor], channels_after: int = C) -> None:
        super().__init__()
        self.before, self.op, self.after = SelfAttention(), op, SelfAttention(channels_after)

    def forward(self, x: Tensor, *side: Tensor) -> Tensor:
        return self.after(self.op(x + self.before(x), *side))


def tokens(num: int, batch: int = B, channels: int = C) -> Tensor:
    return torch.randn(batch, num, channels)


def assert_exact(
    model: Callable[..., Any], *args: Any, degree: int = 2, tolerance: float = 0.0, kwargs: Any = None, **options: Any
) -> Report:
    """Every simulated rank returns what ``model`` returns; ``tolerance`` is relative to the largest value.

    0 means bitwise. Unless the options have degrees, it is Ulysses, by name: a change of what ``sp`` alone
    chooses does not change the test. Neither the model nor its inputs are changed.
    """
    with torch.no_grad():
        eager, eager_args, eager_kwargs = copy.deepcopy((model, args, kwargs or {}))
        expected = eager(*eager_args, **eager_kwargs)
    degrees = {name: n for name, n in options.items() if name in ("sp", "ring", "kv_gather", "ulysses")}
    run = simulate(model, args, kwargs, **({} if degrees else {"ulysses": degree}), **options)
    assert len(run.outputs) == math.prod(degrees.values() or [degree])
    for rank, output in enumerate(run.outputs):
        assert_same(output, expected, tolerance, f"rank {rank} of {len(run.outputs)}")
    return run.report


def assert_same(found: Any, expected: Any, tolerance: float = 0.0, where: str = "") -> None:
    """Equal trees of tensors: same structure, shapes, dtypes, and values within ``tolerance * max |expected|``."""
    found_leaves, found_tree = pytree.tree_flatten(found)
    leaves, tree = pytree.tree_flatten(expected)
    assert found_tree == tree, where
    for i, (a, b) in enumerate(zip(found_leaves, leaves, strict=True)):
        if not isinstance(b, Tensor):
            assert a == b, f"{where}, leaf {i}"
            continue
        scale = float(b.abs().max()) if tolerance and b.numel() else 0.0
        torch.testing.assert_close(
            a, b, rtol=0, atol=tolerance * scale, equal_nan=True, msg=lambda m, i=i: f"{where}, leaf {i}: {m}"
        )


def exchanges(report: Report) -> list[str]:
    return [entry.exchange for entry in report.attention]


def regathered(report: Report) -> list[str]:
    """Ops before which tokens were gathered again."""
    return [entry.op for entry in report.regathers]


def layouts_of(folder: Path) -> str:
    """The dumped layouts of all graphs."""
    return "\n".join(f.read_text() for f in sorted(folder.glob("graph*/layouts.txt")))
