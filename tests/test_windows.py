"""Attention within windows, frames and rows: what is folded into the batch is cut, and ranks have whole sequences."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import SelfAttention, assert_exact
from torch import Tensor, nn

from spcompile import factors

C = 24


class Windows(nn.Module):
    """Attention within windows of ``edge`` ** n tokens of x [B, *grid, C], the grid rolled by ``shift`` (Swin)."""

    def __init__(self, edge: int, shift: int) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(C), SelfAttention(C), nn.Linear(C, C)
        self.edge, self.shift = edge, shift

    def forward(self, x: Tensor, grid: tuple[int, ...]) -> Tensor:
        dims, edge = list(range(1, len(grid) + 1)), self.edge
        y = self.norm(x).view(-1, *grid, C)
        if self.shift:
            y = y.roll([-self.shift] * len(grid), dims)
        windows = [n for size in grid for n in (size // edge, edge)]
        outside, inside = dims_of(windows)
        y = y.view(-1, *windows, C).permute(0, *outside, *inside, len(windows) + 1).reshape(-1, edge ** len(grid), C)
        y = self.attention(y, attn_mask=self.mask(x.shape[0], grid) if self.shift else None)
        y = y.view(-1, *(size // edge for size in grid), *([edge] * len(grid)), C)
        back = [d for pair in zip(dims, (d + len(grid) for d in dims), strict=True) for d in pair]
        y = y.permute(0, *back, 2 * len(grid) + 1).reshape(-1, *grid, C)
        if self.shift:
            y = y.roll([self.shift] * len(grid), dims)
        x = x + y.reshape(x.shape)
        return x + self.mlp(x)

    def mask(self, batch: int, grid: tuple[int, ...]) -> Tensor:
        """[B * windows, 1, S, S]: tokens that rolled around do not see those that did not."""
        region = torch.zeros(grid)
        for dim, size in enumerate(grid):
            bounds = torch.tensor([size - self.edge, size - self.shift])
            shape = [-1 if d == dim else 1 for d in range(len(grid))]
            region = region * 3 + torch.bucketize(torch.arange(size), bounds, right=True).view(shape)
        windows = [n for size in grid for n in (size // self.edge, self.edge)]
        outside, inside = dims_of(windows)
        ids = region.view(windows).permute(*(d - 1 for d in (*outside, *inside))).reshape(-1, self.edge ** len(grid))
        return (ids[:, None] == ids[:, :, None]).repeat(batch, 1, 1)[:, None]


def dims_of(windows: list[int]) -> tuple[list[int], list[int]]:
    """Dims over windows, and within, of [B, *windows]."""
    return list(range(1, len(windows), 2)), list(range(2, len(windows) + 1, 2))


class Swin(nn.Module):
    """An image or a video of patches, blocks of windows in turn plain and shifted, pixels again."""

    def __init__(self, rank: int, edge: int, shift: int) -> None:
        super().__init__()
        self.patches = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1](3, C, 1)
        self.blocks = nn.ModuleList([Windows(edge, s) for s in (0, shift, 0, shift)])
        self.out = nn.Linear(C, 12)

    def forward(self, pixels: Tensor) -> Tensor:
        x, grid = self.patches(pixels).flatten(2).transpose(1, 2), tuple(pixels.shape[2:])
        for block in self.blocks:
            x = block(x, grid)
        x = self.out(x).transpose(1, 2).unflatten(2, grid)
        return F.pixel_shuffle(x, 2) if len(grid) == 2 else x


@pytest.mark.parametrize(
    ("grid", "degree"),
    [((8, 8), 2), ((8, 4), 2), ((16, 16), 4), ((12, 20), 2), ((12, 20), 3), ((4, 8, 4), 2), ((24,), 2), ((24,), 3)],
)
def test_ranks_have_whole_windows_and_rolls_send_rows(grid, degree):
    report = assert_exact(Swin(len(grid), 4, 2), torch.randn(2, 3, *grid), sp=degree, tolerance=1e-6)
    assert {entry.exchange for entry in report.attention} == {"local"}
    assert not report.regathers
    assert all("roll" in entry.op for entry in report.reductions)


@pytest.mark.parametrize(("grid", "degree"), [((12, 12), 4), ((8, 12), 8), ((20, 20), 4), ((12,), 2)])
def test_windows_that_ranks_do_not_divide_are_exact(grid, degree):
    assert_exact(Swin(len(grid), 4, 1), torch.randn(2, 3, *grid), sp=degree, tolerance=1e-6)


def test_degrees_that_are_asked_for_cut_the_sequence():
    report = assert_exact(Swin(2, 4, 0), torch.randn(2, 3, 8, 8), ulysses=2, tolerance=1e-6)
    assert {entry.exchange for entry in report.attention} == {"ulysses"}


class Short(nn.Module):
    """Attention within chunks of 4 tokens, in the form that ``attend(q, k, v)`` takes [N, S, C]."""

    def __init__(self, attend) -> None:
        super().__init__()
        self.embed, self.qkv, self.mlp, self.attend = nn.Linear(C, C), nn.Linear(C, 3 * C), nn.Linear(C, C), attend

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        q, k, v = self.qkv(x).unflatten(1, (-1, 4)).flatten(0, 1).chunk(3, -1)
        x = x + self.attend(q, k, v).reshape(x.shape)
        x = x + self.mlp(x).roll(1, 1)
        q, k, v = self.qkv(x).unflatten(1, (-1, 4)).flatten(0, 1).chunk(3, -1)
        return x + self.attend(q, k, v).reshape(x.shape)


def without_heads(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def by_hand(q, k, v):
    return (q @ k.transpose(1, 2) * q.shape[-1] ** -0.5).softmax(-1) @ v


def heads_in_the_batch(q, k, v):
    q, k, v = (y.unflatten(-1, (6, -1)).transpose(1, 2).flatten(0, 1) for y in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).unflatten(0, (-1, 6)).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("attend", [without_heads, by_hand, heads_in_the_batch])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("degree", [2, 3])
def test_windows_without_a_dim_of_heads(attend, batch, degree):
    report = assert_exact(Short(attend).double(), torch.randn(batch, 24, C).double(), sp=degree, tolerance=1e-13)
    assert {entry.exchange for entry in report.attention} == {"local"}
    assert not report.regathers


class Merged(nn.Module):
    """Windows, then four patches become one, as Swin does by slices, then windows again."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.second = nn.Linear(3, C), Windows(4, 2), Windows(4, 2)
        self.reduce = nn.Linear(4 * C, C)

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = x.shape[1:3]
        x = self.first(self.embed(x).flatten(1, 2), (rows, columns)).view(-1, rows, columns, C)
        x = torch.cat([x[:, i::2, j::2, :] for j in (0, 1) for i in (0, 1)], -1)
        return self.second(self.reduce(x).flatten(1, 2), (rows // 2, columns // 2))


@pytest.mark.parametrize("degree", [2, 4])
def test_patches_are_merged_where_they_lie(degree):
    report = assert_exact(Merged().double(), torch.randn(2, 32, 32, 3).double(), sp=degree, tolerance=1e-12)
    assert {entry.exchange for entry in report.attention} == {"local"}
    assert not report.regathers


class Reversed(nn.Module):
    """Attention within the frames of x [B, F, S, C], whose order changes in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = SelfAttention(C), SelfAttention(C)

    def forward(self, x: Tensor) -> Tensor:
        x = (x + self.first(x.flatten(0, 1)).view(x.shape)).flip(1)
        return x + self.second(x.flatten(0, 1)).view(x.shape)


def test_no_factor_is_cut_that_gathers_where_another_does_not(monkeypatch):
    """However cheap it looks."""
    costs = iter(range(0, -100, -1))
    monkeypatch.setattr(factors, "cost", lambda *_: next(costs))
    assert_exact(Reversed().double(), torch.randn(1, 4, 6, C).double(), sp=2, strict=True, tolerance=1e-13)
    assert next(costs) < -1, "no factor was looked at"


class Alone(nn.Module):
    """Attention of what ``op`` makes of the inputs."""

    def __init__(self, op) -> None:
        super().__init__()
        self.op = op

    def forward(self, *inputs: Tensor) -> Tensor:
        q = self.op(*inputs)
        return F.scaled_dot_product_attention(q, q, q)


NO_TOKENS = {
    "heads as they are given": (lambda q: q * 2, [(1, 4, 12, 8)]),
    "samples": (lambda q: q * 2, [(4, 12, 8)]),
    "heads from features": (lambda x: (x * 2).unflatten(2, (4, 8)).transpose(1, 2).flatten(0, 1), [(1, 12, 32)]),
    "heads from weights": (lambda x, w: torch.einsum("bsc,chd->bhsd", x, w).flatten(0, 1), [(1, 12, 32), (32, 4, 8)]),
}


def factors_found(monkeypatch) -> list:
    """All that are found from here on."""
    found, find = [], factors.factors
    monkeypatch.setattr(factors, "factors", lambda *args: found.extend(new := find(*args)) or new)
    return found


@pytest.mark.parametrize("name", NO_TOKENS)
def test_heads_samples_and_features_are_no_factors(name, monkeypatch):
    op, shapes = NO_TOKENS[name]
    found = factors_found(monkeypatch)
    report = assert_exact(Alone(op).double(), *(torch.randn(s).double() for s in shapes), sp=2, tolerance=1e-13)
    assert report.attention[0].exchange not in ("local", "replicated")
    assert found == []


def test_samples_between_other_dims_stay_whole(monkeypatch):
    """x [S, B, C]: two samples could be cut, where nothing mixes them."""
    found = factors_found(monkeypatch)
    model = Alone(lambda x: x.unflatten(2, (4, 8)).permute(1, 2, 0, 3)).double()
    report = assert_exact(model, torch.randn(12, 2, 32).double(), sp=2, tolerance=1e-13)
    assert report.attention[0].exchange != "local"
    assert [(factor.layout.tokens, factor.given) for factor in found] == [(2, True)]
