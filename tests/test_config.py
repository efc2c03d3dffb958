"""Options of `spcompile.backend`: what cannot be right is refused at once, with what was given and what would fit."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import SelfAttention, tokens

import spcompile
from spcompile.testing import simulate


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sp": 0}, "sp=0: a degree is a whole number of ranks, 1 or more"),
        ({"sp": -2}, "sp=-2"),
        ({"sp": 2.0}, "sp=2.0"),
        ({"sp": "2"}, "sp='2'"),
        ({"sp": True}, "sp=True"),
        ({"ulysses": 0}, "ulysses=0"),
        ({"ring": 0}, "ring=0"),
        ({"kv_gather": "all"}, "kv_gather='all'"),
        ({"sp": 4, "ulysses": 3}, "sp=4, but ulysses=3 is 3 ranks: say sp=3"),
        (
            {"sp": 8, "ring": 2, "ulysses": 2},
            "sp=8, but ring=2, ulysses=2 multiply to 4 ranks: raise one of",
        ),
        ({"kernel": "flash9"}, "kernel='flash9' is not known; choose one of auto, sdpa"),
        ({"min_tokens": 0}, "min_tokens=0"),
        ({"min_tokens": 1.5}, "min_tokens=1.5"),
        ({"min_tokens": True}, "min_tokens=True"),
        ({"inner": 3}, "inner=3: want the name of a torch.compile backend, or a callable"),
        ({"strict": "no"}, "strict='no': want True or False"),
        ({"dump": 3}, "dump=3: want a folder"),
        ({"options": 3}, "options=3: want a mapping"),
        *(({"timeout": t}, f"timeout={t}: want seconds") for t in (math.inf, math.nan, 1e12)),
    ],
    ids=str,
)
def test_an_option_that_cannot_be_right_is_refused(options, text):
    with pytest.raises(spcompile.SPConfigError, match=text):
        spcompile.backend(**options)


@pytest.mark.parametrize(
    ("options", "degree", "mesh"),
    [
        ({}, None, None),
        ({"sp": 1}, 1, None),
        ({"sp": 4}, 4, None),
        ({"ulysses": 4}, 4, (1, 1, 4)),
        ({"sp": 4, "ulysses": 4}, 4, (1, 1, 4)),
        ({"ring": 1}, 1, (1, 1, 1)),
        ({"ring": 2, "kv_gather": 3, "ulysses": 4}, 24, (2, 3, 4)),
        ({"sp": 6, "ring": 2, "kv_gather": 3}, 6, (2, 3, 1)),
    ],
)
def test_degrees_that_fit_are_taken(options, degree, mesh):
    config = spcompile.backend(**options).config
    assert (config.degree, config.mesh) == (degree, mesh)


def test_options_are_frozen():
    options = {"max_autotune": False}
    config = spcompile.backend(options=options).config
    options["max_autotune"] = True
    assert config.options == {"max_autotune": False}
    with pytest.raises(AttributeError):
        config.strict = True


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "a simulation needs a number of ranks: sp=2"),
        ({"sp": 2, "inner": "inductor"}, "leave inner= out"),
        ({"sp": 2, "mesh": "any"}, "leave mesh= out"),
        ({"sp": 0}, "sp=0"),
    ],
    ids=str,
)
def test_simulate_refuses_what_it_has_no_use_for(options, text):
    with pytest.raises(spcompile.SPConfigError, match=text):
        simulate(lambda x: x, (1,), **options)


@pytest.mark.parametrize("options", [{"check": "never"}, {"verify": True}, {"timeout": 0}, {"timeout": True}])
def test_options_about_ranks_are_checked(options):
    (name,) = options
    with pytest.raises(spcompile.SPConfigError, match=f"{name}="):
        spcompile.backend(sp=2, **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"cudagraphs": "on"}, "cudagraphs='on': choose one of 'off', 'piecewise', 'full'"),
        ({"cudagraphs": True}, "cudagraphs=True"),
        ({"max_recordings": 0}, "max_recordings=0: want how often graphs may be recorded, 1 or more"),
        ({"max_recordings": True}, "max_recordings=True"),
        ({"cudagraphs": "full", "options": {"triton.cudagraphs": True}}, "leave one of them out"),
        ({"cudagraphs": "piecewise", "inner": "cudagraphs"}, "leave one of them out"),
    ],
    ids=str,
)
def test_options_of_cuda_graphs_that_cannot_be_right_are_refused(options, text):
    with pytest.raises(spcompile.SPConfigError, match=text):
        spcompile.backend(**options)


def test_options_that_inductor_does_not_have_are_refused(fake_group):
    fake_group(2)
    backend = spcompile.backend(sp=2, options={"max_autotun": True})
    with torch.no_grad(), pytest.raises(spcompile.SPConfigError, match="Inductor has none of the name max_autotun"):
        torch.compile(SelfAttention(), backend=backend)(tokens(6))


@pytest.mark.parametrize("given", [{"mode": "max-autotune"}, {"options": {"max_autotune": True}}])
def test_what_torch_compile_takes_for_inductor_alone_is_refused(given):
    compiled = torch.compile(SelfAttention(), backend=spcompile.backend(sp=2), **given)
    with torch.no_grad(), pytest.raises(spcompile.SPConfigError, match=r"say spcompile\.backend"):
        compiled(tokens(6))
