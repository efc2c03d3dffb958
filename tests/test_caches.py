"""Keys and values of earlier steps and of reference frames; what caches hold afterwards is compared in test_gloo.py."""

from __future__ import annotations

import caches
import pytest
import torch
import torch.nn.functional as F
from helpers import C, SelfAttention, assert_exact, attend, regathered, tokens
from torch import nn

NAMES = list(caches.models())


@pytest.mark.parametrize("degrees", [{"sp": 2}, {"sp": 3}, {"ring": 2}, {"ulysses": 4}, {"kv_gather": 2}], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_attention_over_a_cache_is_exact(name, degrees):
    model, given = caches.models()[name]
    report = assert_exact(model, tokens(caches.N).double(), *given, tolerance=1e-13, **degrees)
    gathered = ["index_copy"] * 2 if name == "written_by_index" else ["index_put"] * 2 if name == "put_by_index" else []
    assert [op.removeprefix("aten.") for op in regathered(report)] == gathered  # rows for a cache that all ranks hold


class References(nn.Module):
    """Tokens of a reference in front; a second layer has only their keys and values left."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.qkv, self.mlp = SelfAttention(), nn.Linear(C, 3 * C), nn.Linear(C, C)

    def forward(self, x, reference):
        num = reference.shape[1]
        y = torch.cat([reference, x], 1)
        y = y + self.first(y)
        q, k, v = self.qkv(y).chunk(3, -1)
        return self.mlp(y[:, num:] + attend(q[:, num:], k, v))


@pytest.mark.parametrize("degrees", [{"sp": 2}, {"sp": 4}, {"ring": 2}, {"ulysses": 2}], ids=str)
def test_reference_tokens_are_read_and_dropped(degrees):
    report = assert_exact(References().double(), tokens(7).double(), tokens(5).double(), tolerance=1e-13, **degrees)
    assert len(report.attention) == 2
    assert not report.regathers


class FirstFrame(nn.Module):
    """Every frame attends to itself and to the first one."""

    def __init__(self, frames: int) -> None:
        super().__init__()
        self.qkv, self.mlp, self.frames = nn.Linear(C, 3 * C), nn.Linear(C, C), frames

    def forward(self, x):
        q, k, v = self.qkv(x.unflatten(1, (self.frames, -1)).flatten(0, 1)).chunk(3, -1)
        k, v = (torch.cat([self.first(y), y], 1) for y in (k, v))
        return x + F.gelu(self.mlp(attend(q, k, v).reshape(x.shape)))

    def first(self, y):
        y = y.unflatten(0, (-1, self.frames))
        return y[:, :1].expand(-1, self.frames, -1, -1).flatten(0, 1)


@pytest.mark.parametrize("degrees", [{"sp": 2}, {"sp": 3}, {"ring": 2}, {"kv_gather": 2}], ids=str)
def test_frames_attend_to_the_first(degrees):
    report = assert_exact(FirstFrame(4).double(), tokens(24).double(), tolerance=1e-13, **degrees)
    assert not report.regathers
