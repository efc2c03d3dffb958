"""Each resolution gets a graph of its own, whatever was compiled before; past Dynamo's limit none does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import SelfAttention, assert_exact, tokens
from test_hostile import Ranks, assert_equal
from torch import fx

import spcompile
from spcompile.canonical import canonical
from spcompile.config import Config
from spcompile.pipeline import Distributed, distribute
from spcompile.testing import plan

LENGTHS = (7, 9, 12, 7, 16, 9)


def model_with_numbers(inner: SelfAttention) -> Callable[..., Any]:
    return lambda x, scale, tail: inner(x * scale + torch.arange(x.shape[1])[:, None])[:, tail:]


class Keeping:
    """A backend that keeps what every graph is rewritten to, and runs it as it was."""

    def __init__(self) -> None:
        self.kept: list[Distributed] = []
        self.inputs: list[Any] = []

    def __call__(self, module: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        local = distribute(module, example_inputs, Config(degree=2), 2, "group", 0)
        assert local is not None
        self.kept.append(local)
        self.inputs.append(example_inputs)
        return module.forward


def kept_after(calls: list[tuple[Any, ...]]) -> tuple[Distributed, list[Any]]:
    """The last graph of a model that was called like this."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, keeping = model_with_numbers(SelfAttention().eval()), Keeping()
    compiled = torch.compile(model, backend=keeping)
    with torch.no_grad():
        for call in calls:
            compiled(*call)
    return keeping.kept[-1], keeping.inputs[-1]


def test_graphs_are_the_same_text_whatever_was_compiled_before():
    """After a second length and a second scale Dynamo's graph has sizes and numbers among its inputs."""
    last = (tokens(9), 0.5, 1)
    fresh, plain = kept_after([last])
    dynamic, sized = kept_after([(tokens(7), 0.25, 2), (tokens(8), 0.75, 3), last])
    assert len(sized) > len(plain)
    assert canonical(fresh.module) == canonical(dynamic.module)
    assert fresh.facts == dynamic.facts
    assert len(fresh.inputs_read) == len(dynamic.inputs_read) < len(dynamic.module.graph.find_nodes(op="placeholder"))
    assert fresh.facts != kept_after([(tokens(9), 0.5, 2)])[0].facts


def test_constants_are_part_of_the_text_and_numbers_of_devices_are_not():
    inner = SelfAttention()

    def text(device: str, value: float) -> str:
        torch._dynamo.reset()

        def model(x):
            return inner(x + torch.tensor([value, 1.0]).sum() + torch.arange(x.shape[1], device=x.device)[:, None])

        (graph,) = plan(model, (tokens(7),), sp=2, device=device).graphs
        return canonical(graph)

    assert text("cuda:0", 1.0) == text("cuda:1", 1.0)
    assert text("cuda:0", 1.0) != text("cuda:0", 2.0)


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_every_resolution_is_right(dynamic):
    model = SelfAttention().eval()
    ranks = Ranks(model, dynamic=dynamic)
    with torch.no_grad():
        for length in LENGTHS:
            a = tokens(length)
            assert_equal(ranks(a), [model(a)] * 2, 1e-5)
    assert ranks.backend.report.graphs == len(set(LENGTHS))


def test_a_dim_that_may_be_dynamic_is_specialised_and_one_that_must_be_is_refused():
    a = tokens(7)
    torch._dynamo.maybe_mark_dynamic(a, 1)
    assert_exact(SelfAttention(), a, tolerance=1e-6)
    torch._dynamo.decorators.mark_unbacked(b := tokens(7), 1)
    assert_exact(SelfAttention(), b, tolerance=1e-6)
    torch._dynamo.mark_dynamic(a, 1)
    with pytest.raises(spcompile.UnsupportedGraphError, match="leave it out"):
        assert_exact(SelfAttention(), a)


def test_a_ninth_resolution_runs_unsharded_and_says_so_once_before(fake_group):
    fake_group(2)
    model = SelfAttention().eval().requires_grad_(False)
    call = torch.compile(model, backend=spcompile.backend(sp=2, inner="eager"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for length in range(5, 13):
            call(tokens(length))
        told = [w for w in caught if w.category is spcompile.RecompileLimitWarning]
        assert len(told) == 1
        assert "further shapes will run unsharded" in str(told[0].message)
        assert "Raise the limit" in str(told[0].message)
        for length in (13, 14):  # collectives of this group send nothing: what is right was not shared
            a = tokens(length)
            torch.testing.assert_close(call(a), model(a))
        assert len([w for w in caught if w.category is spcompile.RecompileLimitWarning]) == 1
