"""The sections of docs/refusals.md, and what their examples raise."""

from __future__ import annotations

import re
import runpy
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

PAGE = Path(__file__).parents[1] / "docs" / "refusals.md"
ON_TWO_RANKS = "# 2 ranks\n"


@dataclass(frozen=True)
class Section:
    code: str
    title: str
    example: str | None
    text: str | None

    @property
    def on_two_ranks(self) -> bool:
        return bool(self.example) and str(self.example).startswith(ON_TWO_RANKS)

    def tells(self, text: str) -> bool:
        """Is ``text`` the section's, whatever stands for its ``...``?"""
        want = [re.escape(" ".join(part.split())) for part in str(self.text).split("...")]
        return re.match(".*".join(want), " ".join(text.split())) is not None


def sections() -> list[Section]:
    heads = re.split(r"^## (SP\d+): (.+)\n", PAGE.read_text(), flags=re.M)[1:]
    found = []
    for code, title, body in zip(heads[::3], heads[1::3], heads[2::3], strict=True):
        blocks = dict(re.findall(r"```(python|text)\n(.*?)```", body, flags=re.S))
        found.append(Section(code, title, blocks.get("python"), blocks.get("text")))
    return found


def preamble() -> str:
    """What the page puts before every example."""
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.S)[0]


def run(section: Section, rank: int = 0) -> None:
    """Run an example as a program of its own. Raises what it raises."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{section.code}.py"
        file.write_text(f"rank = {rank}\n{preamble()}\n{section.example}")
        runpy.run_path(str(file))
