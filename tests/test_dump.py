"""Stage files: written where asked, by one rank, and readable without the rest."""

from __future__ import annotations

import ast

import pytest
import torch
from helpers import SelfAttention, tokens
from torch import nn

import spcompile
from spcompile.testing import simulate

FILES = {"captured.py", "layouts.txt", "rewritten.py", "report.txt"}


@pytest.fixture
def dumped(dump_folder):
    run = simulate(nn.Sequential(SelfAttention(), SelfAttention()), (tokens(7),), ulysses=2, dump=str(dump_folder))
    return dump_folder / "graph0", run.report


def test_one_folder_per_graph_with_four_files(dump_folder):
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = SelfAttention(), SelfAttention()

        def forward(self, x):
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.second(x)

    simulate(Broken(), (tokens(7),), ulysses=2, dump=str(dump_folder))
    assert sorted(f.name for f in dump_folder.iterdir()) == ["graph0", "graph1"]
    for folder in dump_folder.iterdir():
        assert {f.name for f in folder.iterdir()} == FILES


@pytest.mark.parametrize(
    "name",
    [
        "captured.py",
        "rewritten.py",
    ],
)
def test_graphs_are_python_with_shapes_and_source_lines(dumped, name):
    text = (dumped[0] / name).read_text()
    ast.parse(text)
    assert "scaled_dot_product_attention" in text
    assert "helpers.py" in text
    assert "f32[2, 7, 24]" in text


def test_the_rewritten_graph_shows_the_exchange(dumped):
    text = (dumped[0] / "rewritten.py").read_text()
    assert text.count("spcompile.ulysses_in.default(") == 2
    assert "f32[2, 4, 24]" in text


def test_layouts_are_a_line_per_value(dumped):
    header, *lines = (dumped[0] / "layouts.txt").read_text().splitlines()
    assert "2 ranks" in header
    (first,) = (line for line in lines if line.startswith("scaled_dot_product_attention "))
    assert "2 12 (7)/2 2" in first
    assert "<- ulysses" in first
    assert all(len(line.split()) > 2 for line in lines)


def test_layouts_mark_regathers(dump_folder):
    first, second = SelfAttention(), SelfAttention()
    simulate(lambda x: second(first(x).flip(1)), (tokens(7),), ulysses=2, dump=str(dump_folder))
    lines = (dump_folder / "graph0" / "layouts.txt").read_text().splitlines()
    assert ["flip" in line.split()[0] for line in lines if "<- regather" in line] == [True]


def test_the_report_is_the_one_of_the_backend(dumped):
    folder, report = dumped
    assert (folder / "report.txt").read_text() == f"{report}\n"


def test_the_environment_names_a_folder(dump_folder, monkeypatch, fake_group):
    fake_group(2)
    monkeypatch.setenv("SPCOMPILE_DUMP", str(dump_folder))
    with torch.no_grad():
        torch.compile(SelfAttention(), backend=spcompile.backend(ulysses=2, inner="eager"))(tokens(6))
    assert {f.name for f in (dump_folder / "graph0").iterdir()} == FILES


def test_a_refused_graph_is_dumped_too(dump_folder):
    first, second = SelfAttention(), SelfAttention()
    with pytest.raises(spcompile.UnsupportedGraphError, match="strict=True"):
        simulate(lambda x: second(first(x).flip(1)), (tokens(7),), ulysses=2, strict=True, dump=str(dump_folder))
    assert (dump_folder / "graph0" / "rewritten.py").exists()
