"""The transformers of diffusers, unmodified, on simulated ranks.

Twelve are taken apart here: the default run takes each at uneven lengths by Ulysses, by what costs least, and by a
product; `-m long` takes all labels and degrees. All 75 are compared with their row in `docs/models.md`; the default
run takes some of them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path

import diffusers
import pytest
import torch
from helpers import exchanges

import spcompile
from spcompile.testing import simulate, zoo
from spcompile.testing.zoo.common import MODELS
from spcompile.testing.zoo.record import difference, line, record, recorded

TOLERANCE = 1e-5  # of the largest value of the output; what float32 sums in another order come to


@dataclass(frozen=True)
class Expected:
    """Sites by how they are computed, and sums over tokens."""

    exchanged: int
    local: int = 0
    replicated: int = 0
    reductions: int = 0


EXPECTED = {
    "flux": Expected(exchanged=4),
    "flux2": Expected(exchanged=4),
    "wan": Expected(exchanged=2, local=2),
    "qwenimage": Expected(exchanged=2),
    "sd3": Expected(exchanged=4),
    "pixart": Expected(exchanged=2, local=2),
    "cogvideox": Expected(exchanged=2),
    # the text refiner pools its tokens, before the first block
    "hunyuanvideo": Expected(exchanged=6, reductions=1),
    "ltx": Expected(exchanged=2, local=2),
    "auraflow": Expected(exchanged=4),
    # the pooler of the second text has one query
    "hunyuandit": Expected(exchanged=6, local=6, replicated=1),
    "latte": Expected(exchanged=2, local=4),
}
OTHERWISE = {
    # frames are in the batch: a rank takes all of one sample's
    ("latte", "batch2", ("sp", 2)): Expected(exchanged=0, local=6),
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
                short = (label, i) == ("batch2", 1) or (label, degrees) == ("odd", {"sp": 4})
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

    expected, report = OTHERWISE.get((name, label, *degrees.items()), EXPECTED[name]), run.report
    assert report.regathers == []
    assert sum(r.collectives for r in report.reductions) == expected.reductions
    assert (report.graphs, report.unshards) == (1, 1)
    counts = Counter(exchanges(report))
    assert (counts.pop("local", 0), counts.pop("replicated", 0)) == (expected.local, expected.replicated)
    assert counts.total() == expected.exchanged
    if "sp" not in degrees:
        asked = next(iter(degrees)) if len(degrees) == 1 else _text(degrees)
        assert set(counts) == {asked}
        per_site = sum(COLLECTIVES[axis] for axis in degrees)
        assert report.collectives == per_site * expected.exchanged + expected.reductions + 1
    elif degrees["sp"] == 2:
        assert set(counts) <= {"kv_gather", "switch"}
        assert expected.exchanged or report.collectives == 1  # of the output


# all of them

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
SHORT = [name for name in zoo.names() if name not in zoo.CORE][::9]


def test_the_zoo_has_every_transformer_of_diffusers():
    exported = [getattr(diffusers, name) for name in dir(diffusers)]
    classes = {
        c.__name__
        for c in exported
        if isinstance(c, type) and issubclass(c, torch.nn.Module) and ".transformers." in c.__module__
    }
    assert {entry.cls for entry in MODELS.values()} == classes
    assert set(recorded(PAGE)) == classes


@pytest.mark.parametrize("name", [n if n in SHORT else pytest.param(n, marks=pytest.mark.long) for n in zoo.names()])
def test_a_class_is_as_the_page_says(name):
    found = record(name)
    assert found.exact, found.largest
    page = recorded(PAGE)[found.cls].split(" | ")
    here = line(found).split(" | ")
    assert here[2:] == page[2:]  # all but the name with its note, and how near


@pytest.mark.parametrize("label", ["even", "batch2"])
@pytest.mark.parametrize("name", [n for n in zoo.names() if n not in zoo.CORE])
@pytest.mark.long
def test_a_class_at_other_lengths(name, label):
    case = next((c for c in zoo.CASES[name] if c.label == label), None)
    if case is None:
        pytest.skip(f"{name} takes no such input")
    model, inputs = case.build(), case.inputs()
    with torch.no_grad():
        want = model(**inputs)
    try:
        run = simulate(model, kwargs=inputs, sp=2)
    except spcompile.SPError:
        assert recorded(PAGE)[case.cls].count("refused")
        return
    assert max(difference(out, want) for out in run.outputs) < case.tolerance
