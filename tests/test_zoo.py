"""Twelve diffusers transformers, unmodified, on simulated ranks.

The default run takes each model at uneven lengths: by Ulysses, by what costs least, and by a product. `-m long`
takes all labels and degrees.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from math import prod

import pytest
import torch
from helpers import exchanges

from spcompile.testing import simulate, zoo

TOLERANCE = 1e-5  # of the largest value of the output; what float32 sums in another order come to


@dataclass(frozen=True)
class Expected:
    """Sites by how they are computed, and where tokens may be gathered again: (op, file in which it stands)."""

    exchanged: int
    local: int = 0
    replicated: int = 0
    regathers: list[tuple[str, str]] = field(default_factory=list)


EXPECTED = {
    "flux": Expected(exchanged=4),
    "flux2": Expected(exchanged=4),
    "wan": Expected(exchanged=2, local=2),
    "qwenimage": Expected(exchanged=2),
    "sd3": Expected(exchanged=4),
    "pixart": Expected(exchanged=2, local=2),
    "cogvideox": Expected(exchanged=2),
    # the text refiner pools its tokens, before the first block
    "hunyuanvideo": Expected(exchanged=6, regathers=[("aten.sum.dim_IntList", "transformer_hunyuan_video.py")]),
    "ltx": Expected(exchanged=2, local=2),
    "auraflow": Expected(exchanged=4),
    # the pooler of the second text has one query
    "hunyuandit": Expected(exchanged=6, local=6, replicated=1),
    "latte": Expected(exchanged=2, local=4),
}


@cache
def model_and_reference(name: str, label: str):
    case = zoo.case(name, label)
    model, inputs = case.build(), case.inputs()
    with torch.no_grad():
        return model, inputs, model(**inputs)[0]


DEGREES = [
    {"ulysses": 2}, {"ring": 2, "ulysses": 2}, {"sp": 2}, {"sp": 3}, {"sp": 4}, {"sp": 8}, {"ring": 2},
    {"kv_gather": 4}, {"ring": 2, "kv_gather": 2, "ulysses": 2},
]  # fmt: skip
COLLECTIVES = {"ulysses": 2, "kv_gather": 1, "ring": 1}
"""Of one site, for the exchanges and degrees above."""


def cases():
    for name in zoo.CORE:
        for label in zoo.SIZES:
            for i, degrees in enumerate(DEGREES):
                short = (label, i) in {("odd", 0), ("batch2", 1)} or (label, degrees) == ("odd", {"sp": 4})
                yield pytest.param(name, label, degrees, id=f"{name}-{label}-{_text(degrees)}",
                                   marks=[] if short else pytest.mark.long)  # fmt: skip


def _text(degrees: dict[str, int]) -> str:
    return " x ".join(f"{axis}={degree}" for axis, degree in degrees.items())


def test_every_model_is_expected_here():
    assert list(EXPECTED) == zoo.CORE


@pytest.mark.parametrize(("name", "label", "degrees"), cases())
def test_every_rank_returns_the_whole_output(name, label, degrees):
    model, inputs, reference = model_and_reference(name, label)
    run = simulate(model, kwargs=inputs, **degrees)
    assert len(run.outputs) == prod(degrees.values())
    for (output,) in run.outputs:
        assert output.dtype == reference.dtype
        assert float((output - reference).abs().max() / reference.abs().max()) < TOLERANCE

    expected, report = EXPECTED[name], run.report
    assert [(r.op, r.source.split("/")[-1].split(":")[0]) for r in report.regathers] == expected.regathers
    assert (report.graphs, report.unshards) == (1, 1)
    counts = Counter(exchanges(report))
    assert (counts.pop("local", 0), counts.pop("replicated", 0)) == (expected.local, expected.replicated)
    assert counts.total() == expected.exchanged
    if "sp" not in degrees:
        asked = next(iter(degrees)) if len(degrees) == 1 else _text(degrees)
        assert set(counts) == {asked}
        per_site = sum(COLLECTIVES[axis] for axis in degrees)
        assert report.collectives == per_site * expected.exchanged + len(expected.regathers) + 1
    elif degrees["sp"] == 2:
        assert set(counts) == {"kv_gather"}
