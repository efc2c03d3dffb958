"""Attention within frames and along them in turn: where the cut moves to the other dim, and where it stays.

x is [B, F, S, C]: frames and places of each. Sequences of S are sharded first, so that attention within frames is
the site in question, and attention along frames is local.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import C, H, assert_exact, attend, exchanges, layouts_of, regathered, tokens
from torch import nn

from spcompile import factors, ops
from spcompile.exchanges import Cost
from spcompile.testing import plan, simulate

FRAMES, PLACES = 8, 12
TOLERANCE = 1e-13


@pytest.fixture(autouse=True)
def bytes_decide(monkeypatch):
    """Small tensors, without the price of starting a collective; sequences are what is cut."""
    monkeypatch.setattr(Cost, "LATENCY", 0)
    monkeypatch.setattr(factors, "MAX_CANDIDATES", 0)


class Attention(nn.Module):
    """Self-attention of a normed x [N, T, C], on what ``options`` name."""

    def __init__(self, fused=True, qk_norm=False, rope=False, **options) -> None:
        super().__init__()
        self.fused, self.qk_norm, self.rope, self.options = fused, qk_norm, rope, options
        self.qkv, self.out = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.scale = nn.Parameter(torch.randn(C // H))

    def forward(self, x, modulation=None, **inputs):
        x = F.layer_norm(x, (C,))
        if modulation is not None:
            x = x * (1 + modulation)
        weights, biases = self.qkv.weight.chunk(3), self.qkv.bias.chunk(3)
        parts = (
            self.qkv(x).chunk(3, -1)
            if self.fused
            else [F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]
        )
        q, k, v = (p.unflatten(-1, (H, -1)).transpose(1, 2) for p in parts)
        if self.qk_norm:
            q, k = (F.rms_norm(y, (C // H,), self.scale) for y in (q, k))
        if self.rope:
            angles = torch.outer(torch.arange(q.shape[2]), torch.arange(C // H // 2) + 0.5).to(q)
            q, k = (_turned(y, angles.cos(), angles.sin()) for y in (q, k))
        out = F.scaled_dot_product_attention(q, k, v, **self.options, **inputs)
        return self.out(out.transpose(1, 2).flatten(2))


def _turned(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Factorised(nn.Module):
    """``order`` "st": within frames, then along them; each time added to x, with an MLP behind."""

    def __init__(self, order="st", blocks=2, positions=False, modulated=False, mask=None, **options) -> None:
        super().__init__()
        self.order, self.positions, self.modulated, self.mask = order * blocks, positions, modulated, mask
        self.attention = nn.ModuleList(Attention(**options) for _ in self.order)
        self.mlp = nn.Linear(C, C)
        self.double()

    def forward(self, x):
        for i, (kind, attention) in enumerate(zip(self.order, self.attention, strict=True)):
            x = x if kind == "s" else x.transpose(1, 2)
            y = x.flatten(0, 1)
            if self.positions and i == 1:
                y = y + torch.arange(y.shape[1]).to(y)[:, None].sin()
            inputs = {}
            if self.modulated:
                inputs["modulation"] = torch.arange(y.shape[0]).to(y)[:, None, None].cos().expand(-1, 1, C)
            if self.mask:
                inputs["attn_mask"] = self.mask(y.shape[0], y.shape[1])
            y = y + attention(y, **inputs)
            y = y + F.gelu(self.mlp(y))
            x = y.unflatten(0, x.shape[:2])
            x = x if kind == "s" else x.transpose(1, 2)
        return x


def video(batch=1, frames=FRAMES, places=PLACES):
    return torch.randn(batch, frames, places, C, dtype=torch.float64)


def exact(model, *inputs, **degrees):
    return assert_exact(model, *inputs, tolerance=TOLERANCE, **degrees)


sizes = pytest.mark.parametrize(("frames", "places"), [(8, 12), (7, 11), (7, 12), (8, 13)], ids=str)
orders = pytest.mark.parametrize("order", ["st", "ts"])


@orders
@sizes
@pytest.mark.parametrize("degree", [2, 3, 4])
def test_the_cut_moves_there_and_back(order, frames, places, degree):
    report = exact(Factorised(order), video(2, frames, places), sp=degree, strict=True)
    assert sorted(exchanges(report)) == ["local", "local", "switch", "switch"]
    assert regathered(report) == []
    assert report.unshards == 1
    for entry in report.attention:
        if entry.exchange == "switch":
            assert entry.reason.startswith("cheaper than ")
            assert entry.runner_up


MASKS = {
    "keys": lambda n, t: torch.arange(n * t).view(n, 1, 1, t) % 5 > 0,
    "rows of every sequence": lambda n, t: torch.arange(n * t * t).view(n, 1, t, t).double().sin(),
    "the same rows": lambda n, t: torch.ones(t, t, dtype=torch.bool).tril(),
    "heads": lambda n, t: torch.arange(H * t * t).view(1, H, t, t).double().cos(),
}
OPTIONS = {
    "three projections": dict(fused=False),
    "norms of queries and keys": dict(qk_norm=True),
    "rotary": dict(rope=True),
    "positions of frames": dict(positions=True),
    "a modulation per sequence": dict(modulated=True),
    "all of it": dict(fused=False, qk_norm=True, rope=True, positions=True, modulated=True),
    "causal": dict(is_causal=True),
    "another scale": dict(scale=0.3),
    **{f"a mask of {name}": dict(mask=mask) for name, mask in MASKS.items()},
}


@orders
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize(("degree", "batch"), [(2, 1), (3, 2)])
def test_what_the_site_means_stays(order, options, degree, batch):
    report = exact(Factorised(order, **options), video(batch, 7, 11), sp=degree)
    assert "switch" in exchanges(report)
    assert regathered(report) == []


@pytest.mark.parametrize("kernel", ["math", "cpu_flash"])
def test_a_named_kernel_computes_whole_sequences(kernel):
    report = exact(Factorised(), video(2), sp=4, kernel=kernel)
    assert {(e.exchange, e.kernel) for e in report.attention} == {("switch", kernel), ("local", kernel)}


# what travels


@pytest.mark.parametrize("degree", [2, 4])
def test_a_tensor_travels_there_and_one_back(degree):
    unit = FRAMES * PLACES * C * 8 // degree  # bytes of one rank's tokens
    report = exact(Factorised(), video(), sp=degree)
    first, *_, last, _ = report.attention
    assert (last.collectives, last.bytes_per_rank) == (2, 2 * unit * (degree - 1) // degree)
    assert first.exchange == "switch"


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("axis", ["ulysses", "kv_gather"])
def test_half_of_what_ulysses_or_a_gather_sends_is_enough(axis, degree):
    moved = exact(Factorised(), video(), sp=degree).bytes_per_rank
    asked = exact(Factorised(), video(), **{axis: degree})
    assert set(exchanges(asked)) == {axis, "local"}
    leaving = asked.unshard_bytes
    assert 2 * (moved - leaving) <= asked.bytes_per_rank - leaving


def test_latte_moves_the_cut():
    from spcompile.testing import zoo

    case = zoo.case("latte", "batch2")
    with torch.no_grad():
        model, inputs = case.build(), case.inputs()
        expected = model(**inputs)
    run = simulate(model, kwargs=inputs, sp=2)
    for out in run.outputs:
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-5 * float(expected[0].abs().max()))
    assert exchanges(run.report).count("switch") == 2
    assert regathered(run.report) == []


def test_what_is_whole_on_every_rank_is_cut_where_it_is_needed():
    """Before a first attention without a norm nothing has to travel; only the output does."""
    report = exact(lambda x: attend(x @ x.mT @ x, x, x), tokens(12, batch=4).double(), sp=2)
    (entry,) = report.attention
    assert (entry.exchange, entry.collectives) == ("switch", 1)


# how the site's operands are made


class Around(nn.Module):
    """``attention(y)`` of y [B * F, S, C] between attention along frames, where x is sharded already."""

    def __init__(self, attention) -> None:
        super().__init__()
        self.before, self.attention, self.after = Attention(), attention, Attention()
        self.own = nn.ModuleList(nn.Linear(C, C) for _ in range(4))
        self.double()

    def forward(self, x):
        y = x.flatten(0, 1)
        y = y + self.before(y)
        y = y + self.attention(y, *self.own)
        return y + self.after(y)


def made_by(attention, degree=2, x=None, **options):
    """The entry of the attention in the middle."""
    report = exact(Around(attention), video(2, 7, 11) if x is None else x, sp=degree, **options)
    return report.attention[1], report


def _normed(x):
    return F.layer_norm(x, (C,))


ONE_TENSOR = {
    "it is read elsewhere": lambda x, q, k, v, o: attend(q(n := _normed(x)), k(n), v(n)) + o(n),
    "it is added to the output": lambda x, q, k, v, o: attend(q(x), k(x), v(x)),
    "values without a projection": lambda x, q, k, v, o: attend(q(n := _normed(x)), k(n), n),
    "one tensor for all": lambda x, q, k, v, o: attend(n := q(_normed(x)), n, n),
    "shifted by its mean": lambda x, q, k, v, o: attend(q(n := x - x.mean(1, keepdim=True)), k(n), v(n)),
    "split and stacked": lambda x, q, k, v, o: attend(*torch.stack([q(n := _normed(x)), k(n), v(n)]).unbind()),
}


@pytest.mark.parametrize("attention", ONE_TENSOR.values(), ids=ONE_TENSOR.keys())
@pytest.mark.parametrize("degree", [2, 3])
def test_one_tensor_travels_when(attention, degree):
    entry, _ = made_by(attention, degree)
    assert (entry.exchange, entry.collectives) == ("switch", 2)


def _joined(x, q, k, v, o):
    """Two streams, of which the second is read elsewhere too."""
    other = o(x)
    q, k, v = (torch.cat([f(_normed(x)), f(other.sin())], 1) for f in (q, k, v))
    return attend(q, k, v)[:, : x.shape[1]] + other


TWO_TENSORS = {
    "keys and values are of another": lambda x, q, k, v, o: attend(q(_normed(x)), k(n := o(x)), v(n)) + n,
    "two streams are joined": _joined,
}


@pytest.mark.parametrize("attention", TWO_TENSORS.values(), ids=TWO_TENSORS.keys())
@pytest.mark.parametrize("degree", [2, 4])
def test_two_tensors_travel_where(attention, degree):
    entry, _ = made_by(attention, degree)
    assert (entry.exchange, entry.collectives) == ("switch", 3)


def test_two_sites_that_read_one_tensor_move_it_once():
    _, report = made_by(lambda x, q, k, v, o: attend(q(n := _normed(x)), k(n), v(n)) + attend(o(n), k(n) * 2, v(n) * 3))
    sites = [e for e in report.attention if e.exchange == "switch"]
    assert sum(e.collectives for e in sites[1:3]) == 3


def test_attention_on_the_output_of_attention():
    _, report = made_by(lambda x, q, k, v, o: attend(y := attend(q(n := _normed(x)), k(n), v(n)), y, y))
    assert exchanges(report) == ["switch"] * 4


# where it stays


def test_degrees_by_name_are_binding():
    for degrees in ({"ulysses": 2}, {"kv_gather": 2}, {"ring": 2}):
        assert "switch" not in exchanges(exact(Factorised(), video(), **degrees))


def test_fewer_sequences_than_ranks_stay():
    report = exact(Factorised("s"), video(1, frames=3), sp=4)
    assert "switch" not in exchanges(report)


def test_where_padding_costs_more_than_moving_saves(monkeypatch):
    monkeypatch.setattr(Cost, "FLOPS_PER_BYTE", 1)
    assert "switch" not in exchanges(exact(Factorised(), video(1, frames=5), sp=4))
    assert "switch" in exchanges(exact(Factorised(), video(1, frames=8), sp=4))


def test_small_messages_stay_where_a_collective_has_its_price(monkeypatch):
    monkeypatch.setattr(Cost, "LATENCY", 32 * 1024)
    assert "switch" not in exchanges(exact(Factorised(), video(), sp=2))


def test_where_sequences_are_mixed_the_tensor_behind_travels():
    entry, report = made_by(lambda x, q, k, v, o: attend(q(n := x - x.mean(0)), k(n), v(n)))
    assert (entry.exchange, entry.collectives) == ("switch", 2)
    assert regathered(report) == []


def test_one_sequence_per_sample_and_one_sample_stay():
    assert "switch" not in exchanges(exact(Around(lambda x, q, k, v, o: attend(q(x), k(x), v(x))), video(1, 1), sp=2))


# the graph


def test_the_plan_for_a_gpu_has_two_switches_per_site(tmp_path):
    planned = plan(Factorised(), (video(),), sp=4, device="cuda", dump=str(tmp_path))
    (graph,) = planned.graphs
    switches = [n for n in graph.graph.nodes if n.target is ops.switch._opoverload]
    assert len(switches) == sum(e.collectives for e in planned.report.attention)
    assert "<- switch" in layouts_of(tmp_path)
