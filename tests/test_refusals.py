"""docs/refusals.md has a section for every code, and every example is refused with that code and text."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from refusals import Section, run, sections

import spcompile
from spcompile.errors import CODES

SECTIONS = {s.code: s for s in sections()}
TOGETHER = [s for s in SECTIONS.values() if s.on_two_ranks]
ALONE = [s for s in SECTIONS.values() if s.example and not s.on_two_ranks]
FAMILIES = {"SP1": spcompile.SPConfigError, "SP2": spcompile.UnsupportedGraphError, "SP113": spcompile.ClosedError}


def test_every_code_has_a_section_of_its_title():
    assert [(s.code, s.title) for s in sections()] == list(CODES.items())


def test_every_code_is_raised_somewhere_and_no_other():
    package = Path(spcompile.__file__).parent
    used = {
        c for f in package.rglob("*.py") if f.name != "errors.py" for c in re.findall(r'"(SP\d{3})"', f.read_text())
    }
    assert used == set(CODES)


def test_all_but_defects_have_an_example():
    assert [s.code for s in SECTIONS.values() if not s.example] == ["SP213"]


@pytest.mark.parametrize("section", ALONE, ids=[s.code for s in ALONE])
def test_an_example_is_refused_as_the_page_says(section: Section):
    with pytest.raises(FAMILIES.get(section.code, FAMILIES[section.code[:3]])) as info:
        run(section)
    assert info.value.code == section.code
    assert section.tells(str(info.value)), str(info.value)


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> Path:
    """The folder in which both ranks left what the examples raised there."""
    folder = tmp_path_factory.mktemp("refusals")
    worker = Path(__file__).parent / "workers" / "refusals.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(worker)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, str(folder)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize("section", TOGETHER, ids=[s.code for s in TOGETHER])
def test_an_example_on_two_ranks_is_refused_as_the_page_says(told: Path, section: Section):
    found = [json.loads((told / f"{section.code}.{rank}.json").read_text()) for rank in (0, 1)]
    codes = {"SP301": ["SP301", ""], "SP303": ["SP303", "SP208"], "SP307": ["SP307", "SP301"]}.get(
        section.code, [section.code] * 2
    )
    assert [code for code, _ in found] == codes, found
    assert section.tells(found[0][1]), found[0][1]
