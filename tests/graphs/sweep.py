"""Many programs, and what became of them."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass, field

from graphs.check import Outcome, check
from graphs.generate import generate
from graphs.program import Program, script


@dataclass
class Tally:
    """``good`` are right programs with attention that no rank computes whole."""

    counts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[Program, Outcome]] = field(default_factory=list)

    def add(self, program: Program, outcome: Outcome) -> None:
        self.counts["failed" if outcome.failed else outcome.kind] += 1
        if outcome.failed:
            self.failures.append((program, outcome))
        if outcome.kind == "right" and outcome.distributed + outcome.local:
            self.counts["right and distributed"] += 1
            self.counts["exchanges"] += outcome.distributed
            self.counts["local"] += outcome.local
            self.counts["replicated"] += outcome.replicated
            self.counts["regathers"] += outcome.regathers
        if outcome.kind in ("refused", "skipped"):
            self.refusals[f"{outcome.kind}: {outcome.detail.splitlines()[0][-150:]}"] += 1

    @property
    def total(self) -> int:
        return sum(self.counts[k] for k in ("right", "refused", "skipped", "failed"))


def sweep(seeds: range, until: float = math.inf, show: bool = False) -> Tally:
    tally = Tally()
    for seed in seeds:
        if time.monotonic() > until:
            break
        program = generate(seed)
        outcome = check(program)
        if show and outcome.failed:
            print(f"seed {seed}: {outcome.kind}: {outcome.detail[:300]}", flush=True)
        tally.add(program, outcome)
    return tally


def describe(program: Program, outcome: Outcome) -> str:
    return f"# seed {program.seed}: {outcome.kind}: {outcome.detail[:600]}\n{script(program)}"
