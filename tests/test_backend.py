"""The public surface: what a compiled model returns, what it reports, what it hands to the inner backend."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from helpers import SelfAttention, assert_exact, exchanges, tokens
from torch import nn

import spcompile
from spcompile.ops import chunks
from spcompile.testing import simulate

S = 7


class Model(nn.Module):
    """One of each: a self-attention, a cross-attention, a regather, an output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.q, self.kv = (
            *(SelfAttention() for _ in range(2)),
            nn.Linear(24, 24),
            nn.Linear(24, 48),
        )

    def forward(self, x, context):
        x = self.first(x).flip(1)
        k, v = (t.unflatten(-1, (12, -1)).transpose(1, 2) for t in self.kv(context).chunk(2, dim=-1))
        q = self.q(x).unflatten(-1, (12, -1)).transpose(1, 2)
        cross = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.second(x + cross.transpose(1, 2).flatten(2))


def inputs():
    return tokens(S), tokens(5)


def test_everything_public_is_listed():
    assert all(hasattr(spcompile, name) for name in spcompile.__all__)
    assert {"backend", "Report", "SPError"} <= set(spcompile.__all__)


# degree 1


def test_one_rank_gets_the_model_compiled_unchanged():
    seen = []

    def inner(module, example_inputs):
        seen.append(module)
        return module.forward

    model, args = Model(), inputs()
    backend = spcompile.backend(sp=1, inner=inner)
    with torch.no_grad():
        assert torch.equal(torch.compile(model, backend=backend)(*args), model(*args))
    assert "spcompile" not in seen[0].code
    assert backend.report().graphs == 0


def test_one_rank_may_train():
    model, x = SelfAttention(), tokens(S)
    torch.compile(model, backend=spcompile.backend(sp=1, inner="aot_eager"))(x).sum().backward()
    assert model.qkv.weight.grad is not None


def test_one_simulated_rank_returns_the_eager_result():
    run = simulate(Model(), inputs(), sp=1)
    assert len(run.outputs) == 1
    assert run.report.attention == []


# inner backends


@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
def test_inner_backends_by_name(inner, world_of_one):
    model, args = Model(), inputs()
    with torch.no_grad():
        out = torch.compile(model, backend=spcompile.backend(inner=inner))(*args)
        torch.testing.assert_close(out, model(*args), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("degree", [1, 2])
def test_options_reach_the_inner_backend(fake_group, degree):
    fake_group(2)
    got = []

    def inner(module, example_inputs, options=None):
        got.append(options)
        return module.forward

    with torch.no_grad():
        torch.compile(Model(), backend=spcompile.backend(sp=degree, inner=inner, options={"x": 1}))(*inputs())
    assert got == [{"x": 1}]


def test_an_unknown_inner_backend_is_refused(fake_group):
    fake_group(2)
    with torch.no_grad(), pytest.raises(spcompile.SPConfigError, match="inner='tvn' is no torch"):
        torch.compile(Model(), backend=spcompile.backend(sp=2, inner="tvn"))(*inputs())


# min_tokens


def test_min_tokens_leaves_short_sequences_on_every_rank():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.long, self.short = SelfAttention(), SelfAttention()

        def forward(self, x, y):
            return self.long(x), self.short(y)

    args = tokens(12).double(), tokens(5).double()
    report = assert_exact(Two().double(), *args, min_tokens=6, tolerance=1e-13)
    assert sorted(exchanges(report)) == ["replicated", "ulysses"]
    (short,) = (a for a in report.attention if a.exchange == "replicated")
    assert short.reason == "5 query tokens, fewer than min_tokens=6"
    assert exchanges(assert_exact(Two().double(), *args, min_tokens=5, tolerance=1e-13)) == ["ulysses"] * 2


# the report


def test_the_report_says_what_was_done():
    report = assert_exact(Model().double(), *(x.double() for x in inputs()), degree=3, tolerance=1e-13)
    assert (report.degree, report.graphs) == (3, 1)
    first, cross, second = report.attention
    assert (first.name, cross.exchange, second.name) == ("first", "local", "second")
    assert first.shape == (2, 12, S, 2, S)
    assert cross.shape == (2, 12, S, 2, 5)
    assert "helpers.py:" in first.source
    assert __file__ in cross.source
    (regather,) = report.regathers
    assert regather.op == "aten.flip"
    assert __file__ in regather.source
    local = 2 * 3 * 24 * 8  # 2 samples of ceil(7 / 3) tokens of 24 channels in float64
    assert regather.bytes_per_rank == report.unshard_bytes == 2 * local
    assert first.bytes_per_rank == 4 * local * 2 // 3
    assert report.unshards == 1
    assert report.shards >= 2
    assert report.collectives == 2 + 0 + 2 + 1 + 1
    assert report.bytes_per_rank == 2 * first.bytes_per_rank + 2 * 2 * local


def test_the_report_as_a_dict_is_json_and_complete():
    report = simulate(Model(), inputs(), ulysses=2).report
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain == report.to_dict()
    assert [a["exchange"] for a in plain["attention"]] == ["ulysses", "local", "ulysses"]
    assert plain["regathers"][0]["op"] == "aten.flip"
    assert plain["totals"] == {"collectives": report.collectives, "bytes_per_rank": report.bytes_per_rank}


def test_the_report_as_text_names_exchanges_regathers_and_totals():
    report = simulate(Model(), inputs(), ulysses=2).report
    text = str(report)
    for part in ("1 graph over 2 ranks", "3 attention sites", "6 collectives", "1 unshard", "1 regather",
                 "ulysses", "local", "aten.flip"):  # fmt: skip
        assert part in text


def test_collectives_are_of_a_step_or_of_one_call_of_each_graph(fake_group):
    fake_group(2)
    backend = spcompile.backend(ulysses=2, inner="eager")
    compiled = torch.compile(SelfAttention(), backend=backend)
    with torch.no_grad():
        compiled(tokens(6))
        assert "3 collectives per step" in str(backend.report())
        compiled(tokens(8))
    assert "6 collectives if each graph runs once" in str(backend.report())


def test_an_empty_report_is_a_line():
    assert str(spcompile.backend(sp=2).report()).startswith("spcompile: 0 graphs over 2 ranks")


def test_graphs_add_up_in_one_report(fake_group):
    fake_group(2)
    backend = spcompile.backend(ulysses=2, inner="eager")
    with torch.no_grad():
        for num in (6, 8):
            torch.compile(SelfAttention(), backend=backend)(tokens(num))
            torch._dynamo.reset()
    report = backend.report()
    assert report.graphs == 2
    assert [a.shape[2] for a in report.attention] == [6, 8]
    assert report.unshards == 2


# simulate


def test_simulate_leaves_the_model_and_its_inputs_as_found():
    class Writing(SelfAttention):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls.add_(1)
            x.add_(1)
            return super().forward(x)

    model, x = Writing(), tokens(S)
    before = x.clone()
    simulate(model, (x,), ulysses=2)
    assert model.calls == 0
    assert torch.equal(x, before)


def test_simulate_takes_keyword_inputs():
    x, context = inputs()
    assert_exact(Model().double(), kwargs={"context": context.double(), "x": x.double()}, tolerance=1e-13)


# the exactness checks can fail


def _wrong_order(original):
    return lambda parts, *rest: original(parts.flip(0), *rest)


def _loses_the_last_token(original):
    def join(parts, dim, *rest):
        whole = original(parts, dim, *rest)
        whole.select(dim, whole.shape[dim] - 1).zero_()
        return whole

    return join


@pytest.mark.parametrize("spoil", [_wrong_order, _loses_the_last_token])
@pytest.mark.parametrize("num_tokens", [7, 8])
def test_an_exactness_test_fails_when_chunks_are_joined_wrongly(monkeypatch, spoil, num_tokens):
    monkeypatch.setattr(chunks, "join", spoil(chunks.join))
    with pytest.raises(AssertionError, match="Tensor-likes are not"):
        assert_exact(SelfAttention(is_causal=True), tokens(num_tokens), tolerance=1e-3)


def test_an_exactness_test_fails_when_one_rank_takes_anothers_chunk(monkeypatch):
    original = chunks.take
    monkeypatch.setattr(chunks, "take", lambda x, dim, layout, rank, degree: original(x, dim, layout, 0, degree))
    with pytest.raises(AssertionError, match="Tensor-likes are not"):
        assert_exact(SelfAttention(), tokens(8), tolerance=1e-3)


def test_the_last_compilation_before_dynamos_limit_warns(fake_group):
    fake_group(2)
    model = SelfAttention().eval().requires_grad_(False)
    call = torch.compile(model, backend=spcompile.backend(sp=2, inner="eager"))
    with torch._dynamo.config.patch(recompile_limit=2), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for length in (5, 7):
            call(tokens(length))
    told = [w for w in caught if w.category is spcompile.RecompileLimitWarning]
    assert len(told) == 1
    assert "compilation 2 of this code" in str(told[0].message)


def test_a_graph_that_draws_random_numbers_is_not_verified_and_says_so(fake_group):
    fake_group(2)
    backend, attention = spcompile.backend(ulysses=2, inner="eager", verify="first"), SelfAttention()
    with torch.no_grad(), pytest.warns(UserWarning, match="a graph that draws random numbers cannot be compared"):
        torch.compile(lambda x: attention(attention(x) + torch.randn_like(x)), backend=backend)(tokens(S))
    assert backend.report().verified == []
