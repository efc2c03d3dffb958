"""Gathers that start early: the order of calls, and when they do not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import C, assert_exact, attend, tokens
from torch import nn

from spcompile import ops
from spcompile.testing import plan, simulate

START, GATHER = ops.kv_gather_start._opoverload, ops.kv_gather._opoverload


class QueryFirst(nn.Module):
    """The query is ready before keys and values; ``meanwhile``: there is something else to compute."""

    def __init__(self, meanwhile: bool = True) -> None:
        super().__init__()
        self.meanwhile = meanwhile
        self.q, self.k, self.v, self.ff = (nn.Linear(C, C) for _ in range(4))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        out = attend(q, k, v)
        return out + F.gelu(self.ff(x)) if self.meanwhile else out


class KeyIsQuery(nn.Module):
    """Nothing is left to compute once keys and values are there."""

    def __init__(self) -> None:
        super().__init__()
        self.k = nn.Linear(C, C)

    def forward(self, x):
        k = self.k(x)
        return attend(k, k, k)


@pytest.fixture
def everywhere(monkeypatch):
    """Ranks on CPUs start early too, so that it can be run."""
    monkeypatch.setattr("spcompile.overlap.travels_aside", lambda gather: True)


def order(model, device="cuda", **degrees) -> list[str]:
    """The sharded linear layers and the gather, in the order in which ranks call them."""
    (graph,) = plan(model, (tokens(8, batch=1),), device=device, **degrees).graphs
    names = {START: "start", GATHER: "gather", torch.ops.aten.linear.default: "linear"}
    return [names[n.target] for n in graph.graph.nodes if n.target in names]


@pytest.mark.parametrize("degrees", [{"sp": 2}, {"kv_gather": 4}, {"ring": 2, "kv_gather": 2}])
def test_a_gather_starts_before_the_projection_of_the_query_and_a_parallel_layer(degrees):
    assert order(QueryFirst(), **degrees) == ["linear", "linear", "start", "linear", "gather", "linear"]


def test_between_cpus_a_gather_starts_when_its_keys_are_needed():
    assert "start" not in order(QueryFirst(), device=None, sp=2)


def test_a_gather_with_nothing_to_compute_meanwhile_is_one_call():
    assert order(KeyIsQuery(), sp=2) == ["linear", "gather"]


def test_a_gather_behind_ulysses_is_one_call():
    assert "start" not in order(QueryFirst(), ulysses=2, kv_gather=2)


def test_nothing_moves_over_random_numbers():
    class Draws(QueryFirst):
        def forward(self, x):
            return super().forward(x), torch.rand(3)

    assert order(Draws(), sp=2) == ["linear", "linear", "start", "linear", "gather", "linear"]

    class DrawsFirst(QueryFirst):
        def forward(self, x):
            return torch.rand(3), super().forward(x)

    assert "start" not in order(DrawsFirst(), sp=2)


def test_a_buffer_written_before_and_read_after(everywhere):
    class Counts(QueryFirst):
        def forward(self, x):
            self.seen.add_(x.sum())
            return super().forward(x) * self.seen

    assert_exact(Counts().eval(), tokens(5), tolerance=1e-5)


@pytest.mark.parametrize("degrees", [{"sp": 2}, {"kv_gather": 3}, {"ring": 2, "kv_gather": 2}])
@pytest.mark.parametrize("length", [1, 5, 8, 12])
@pytest.mark.parametrize("batch", [1, 3, 9])
def test_early_gathers_are_exact(degrees, length, batch, everywhere):
    model, x = QueryFirst().eval(), tokens(length, batch)
    with torch.no_grad():
        want = model(x)
    for out in simulate(model, (x,), **degrees).outputs:
        torch.testing.assert_close(out, want)


def test_early_gathers_are_run(everywhere):
    """That the fixture does what the tests above rely on."""
    assert "start" in order(QueryFirst(), device=None, sp=2)
