"""What is refused at compile time, as which error, and with which text: where, what was found, why, what would work."""

from __future__ import annotations

import pickle
import re

import pytest
import torch
import torch.nn.functional as F
from helpers import C, SelfAttention, attend, tokens
from torch import nn

import spcompile
from spcompile.testing import simulate

S = 7


def refusal(model, *args, error=spcompile.UnsupportedGraphError, degree=2, **options) -> str:
    """The text with which compiling ``model`` is refused, through `torch.compile`, as that type."""
    with pytest.raises(error) as info:
        simulate(model, args or (tokens(S),), ulysses=degree, **options)
    assert isinstance(info.value, spcompile.SPError)
    assert type(info.value).__name__ == error.__name__
    assert str(info.value) == f"[{info.value.code}] {info.value.text}"
    return info.value.text


def line_of(text: str, file: str) -> int:
    """The number of the first line of ``file`` with ``text``."""
    with open(file) as lines:
        return next(i for i, line in enumerate(lines, 1) if text in line)


def test_the_errors_are_of_the_families_they_belong_to():
    assert issubclass(spcompile.SPConfigError, (spcompile.SPError, ValueError))
    assert issubclass(spcompile.UnsupportedGraphError, (spcompile.SPError, RuntimeError))
    assert issubclass(spcompile.RankMismatchError, (spcompile.SPError, RuntimeError))
    assert issubclass(spcompile.SPConfigError, ValueError)
    assert issubclass(spcompile.UnsupportedGraphError, RuntimeError)
    assert not issubclass(spcompile.UnsupportedGraphError, ValueError)


class Named(nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([SelfAttention(**options)])

    def forward(self, x):
        return self.blocks[0](x)


def test_heads_that_ulysses_cannot_share():
    """One query head for all key heads: SDPA broadcasts it, an exchange by heads cannot."""

    def model(x, w):
        k = x.unflatten(-1, (12, -1)).transpose(1, 2) * 2
        return F.scaled_dot_product_attention((x @ w).unsqueeze(1), k, k)

    text = refusal(model, tokens(S), torch.randn(C, 2), degree=4)
    assert "q [2, 1, 7, 2], k [2, 12, 7, 2], v [2, 12, 7, 2]" in text
    assert "ulysses: 1 query heads are no multiple of 12 key heads" in text
    assert re.search(r"Degrees that work here: .*kv_gather=4", text)


def test_a_kernel_that_cannot_serve_the_degrees():
    text = refusal(SelfAttention(), degree=None, ring=2, kernel="sdpa")
    assert "ring: kernel sdpa returns no log-sum-exp. Degrees that work here: kv_gather=2 or ulysses=2" in text


def test_the_place_of_a_site_is_its_module_and_line():
    text = refusal(Named(dropout_p=0.5))
    here = line_of("return F.scaled_dot_product_attention(q, k, v, **options)", attend.__code__.co_filename)
    assert text.startswith("blocks.0 (")
    assert f"helpers.py:{here})" in text
    assert "q [2, 12, 7, 2], k [2, 12, 7, 2], v [2, 12, 7, 2]" in text


def test_more_sites_of_a_kind_are_counted():
    text = refusal(nn.Sequential(*(SelfAttention(dropout_p=0.5) for _ in range(3))))
    assert "(2 more sites like it)" in text


@pytest.mark.parametrize("kind", ["self", "cross", "temporal"])
def test_dropout_in_attention(kind):
    def model(x, w):
        if kind == "self":
            return attend(x @ w, x, x, dropout_p=0.25)
        if kind == "cross":
            return attend(x @ w, w[None].expand(2, -1, -1), w[None].expand(2, -1, -1), dropout_p=0.25)
        y = attend(x @ w, x, x)
        y = y.transpose(0, 1)
        return attend(y, y, y, dropout_p=0.25)

    text = refusal(model, tokens(S), torch.randn(C, C))
    assert "dropout_p=0.25: ranks would" in text
    assert "model.eval()" in text


DRAWS = {
    "randn_like": (lambda x: x + torch.randn_like(x), "aten.randn_like"),
    "rand": (lambda x: x * torch.rand(x.shape), "aten.rand."),
    "dropout": (lambda x: F.dropout(x, 0.5, training=True), "aten.dropout"),
    "bernoulli": (lambda x: x + torch.bernoulli(x.sigmoid()), "aten.bernoulli"),
    "randperm": (lambda x: x[:, torch.randperm(x.shape[1])], "aten.randperm"),
    "randn of positions": (lambda x: x + torch.randn(x.shape[1], 1), "aten.randn."),
}


@pytest.mark.parametrize(("draw", "op"), DRAWS.values(), ids=DRAWS.keys())
def test_random_numbers_that_reach_sharded_tokens(draw, op):
    inner = SelfAttention()
    text = refusal(lambda x: inner(draw(inner(x))), check="off")
    assert op in text
    assert "test_messages.py:" in text
    assert "draws random numbers that reach sharded tokens, and with check='off' nobody compares" in text
    assert "Leave check on, draw them outside the compiled model and pass them in, or call model.eval()." in text


@pytest.mark.parametrize("draw", [d for d, _ in DRAWS.values()], ids=DRAWS.keys())
def test_random_numbers_are_drawn_in_full_where_generators_are_compared(draw):
    inner, x = SelfAttention(), tokens(S)
    torch.manual_seed(3)
    want = inner(draw(inner(x)))
    torch.manual_seed(3)
    with torch.no_grad():
        run = simulate(lambda x: inner(draw(inner(x))), (x,), ulysses=2)
    for out in run.outputs:
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


def test_dropout_of_a_model_in_train_mode():
    class Training(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.dropout = SelfAttention(), nn.Dropout(0.1)

        def forward(self, x):
            return self.dropout(self.attention(x))

    assert "aten.dropout" in refusal(Training().train(), check="off")
    simulate(Training().eval(), (tokens(S),), ulysses=2)


def test_strict_names_every_regather():
    first, second = SelfAttention(), SelfAttention()
    text = refusal(lambda x: second(first(x).flip(1).cumsum(1)), strict=True)
    assert "strict=True, and the graph needs:" in text
    assert "regather before `aten.flip`" in text
    assert "it mixes entries along the token dim, or reorders it" in text
    assert "Drop strict to accept that cost." in text


def test_a_view_that_tears_tokens_apart_names_the_sizes():
    first, second = SelfAttention(), SelfAttention()

    def rows_and_columns_change_places(x):
        return second(first(x).unflatten(1, (3, 5)).transpose(1, 2).flatten(1, 2))

    text = refusal(rows_and_columns_change_places, tokens(15), degree=4, strict=True)
    assert "the tokens that 4 ranks share are torn apart; sizes that 4 divides often avoid it" in text


def test_strict_names_every_site_on_all_ranks():
    first, second = SelfAttention(), SelfAttention()
    text = refusal(lambda x, y: (first(x), second(y)), tokens(12), tokens(5), strict=True, min_tokens=6)
    assert re.search(r"\(.*helpers.py:\d+\) stays replicated: 5 query tokens, fewer than min_tokens=6", text)


def test_strict_takes_a_graph_without_either():
    simulate(SelfAttention(), (tokens(S),), ulysses=2, strict=True)


def test_nothing_to_distribute():
    text = refusal(nn.Sequential(SelfAttention(), SelfAttention()), min_tokens=100)
    assert "none of the attention (2 sites) can be distributed:" in text
    assert text.count("7 query tokens, fewer than min_tokens=100") == 2
    assert "Use sp=1, or change what the reasons name." in text


def compiled(model):
    return torch.compile(model, backend=spcompile.backend(ulysses=2, inner="eager"))


def test_training(fake_group):
    fake_group(2)
    with pytest.raises(spcompile.UnsupportedGraphError, match="gradients are not available yet") as info:
        compiled(SelfAttention())(tokens(S))
    assert "torch.no_grad() or torch.inference_mode()" in str(info.value)


def test_grad_mode_without_anything_to_differentiate_is_no_training(fake_group):
    fake_group(2)
    assert compiled(SelfAttention().requires_grad_(False))(tokens(S)).shape == (2, S, C)


def test_memory_read_by_strides_that_sharding_changes():
    def model(x, w):
        y = attend(x @ w, x, x).mT  # its strides are those of a transposed tensor, a gathered one's are not
        return torch.as_strided(y, y.shape, y.stride()) * 2

    text = refusal(model, tokens(S), torch.randn(C, C))
    assert "`aten.as_strided.default` reads memory by strides, which sharding changed" in text
    assert "Use view, reshape or slicing instead." in text


@pytest.mark.parametrize("family", [ValueError, spcompile.SPError, spcompile.SPConfigError])
def test_the_caller_of_a_compiled_model_catches_them_as_what_they_are(family):
    with torch.no_grad(), pytest.raises(family):
        compiled(SelfAttention())(tokens(S))


@pytest.mark.parametrize("family", [RuntimeError, spcompile.SPError, spcompile.UnsupportedGraphError])
def test_the_caller_of_a_refused_graph_catches_it_as_what_it_is(family):
    with pytest.raises(family):
        simulate(SelfAttention(dropout_p=0.5), (tokens(S),), ulysses=2)


def test_fullgraph_does_not_hide_the_error():
    with torch.no_grad(), pytest.raises(spcompile.SPConfigError):
        torch.compile(SelfAttention(), backend=spcompile.backend(sp=2), fullgraph=True)(tokens(S))


def test_a_regather_warns_once_per_graph():
    """With op, place, bytes and the way to refuse it."""

    def model(x, w):
        return attend(x @ w, x, x).flip(1).sort(1).values @ w

    inputs = (tokens(9), torch.randn(C, C))
    with pytest.warns(spcompile.RegatherWarning) as warned:
        simulate(model, inputs, sp=2)
    (warning,) = warned
    text = str(warning.message)
    assert re.search(
        r"before `aten\.flip` \(.*test_messages\.py:\d+\), .* B: it mixes entries along the token dim", text
    )
    assert text.endswith("strict=True refuses them.")
    with pytest.raises(spcompile.UnsupportedGraphError, match=r"strict=True, and the graph needs"):
        simulate(model, inputs, sp=2, strict=True)


def test_an_error_that_left_torch_compile_can_be_sent_and_printed():
    with pytest.raises(spcompile.UnsupportedGraphError) as info:
        simulate(SelfAttention(dropout_p=0.5), (tokens(S),), ulysses=2)
    again = pickle.loads(pickle.dumps(info.value))
    assert type(again) is spcompile.UnsupportedGraphError
    assert (again.code, again.text, str(again)) == ("SP208", info.value.text, str(info.value))
    assert repr(info.value) == f"UnsupportedGraphError('SP208', {info.value.text!r})"
    assert "TORCHDYNAMO_VERBOSE" not in str(info.value) + repr(info.value)


def test_the_place_of_a_site_in_torchs_own_module_is_that_module():
    layer = nn.TransformerEncoderLayer(C, 4, dropout=0.5, batch_first=True).train()
    with pytest.raises(spcompile.UnsupportedGraphError, match=r"self_attn \(in torch's MultiheadAttention\)"):
        simulate(layer, (tokens(S),), sp=2)


def test_an_input_marked_as_unbacked():
    x = tokens(S)
    torch._dynamo.decorators.mark_unbacked(x, 0)
    with pytest.raises(spcompile.UnsupportedGraphError, match=r"\[SP203\].*mark_unbacked"):
        simulate(SelfAttention(), (x,), sp=2)
