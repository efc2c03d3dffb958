"""Random models against their own eager runs: right or refused, no third outcome."""

from __future__ import annotations

import pytest
from graphs.check import Outcome, check
from graphs.generate import build, generate
from graphs.program import Code, Program, script
from graphs.shrink import shrink
from graphs.sweep import Tally, describe, sweep

CHUNK, DEFAULT = 100, 20
LONG = 50 * CHUNK


def assert_right(tally: Tally, share: float = 0.75) -> None:
    """``share`` of the programs must be right, with attention that the ranks share."""
    if tally.failures:
        program, outcome = tally.failures[0]
        small = shrink(program, outcome.kind)
        pytest.fail(f"{len(tally.failures)} of {tally.total} failed, the first:\n{describe(small, check(small))}")
    assert tally.counts["right and distributed"] >= share * tally.total, (tally.counts, tally.refusals)


def test_a_few_random_models_are_right_or_refused():
    assert_right(sweep(range(DEFAULT)))


@pytest.mark.long
@pytest.mark.parametrize("start", range(CHUNK, CHUNK + LONG, CHUNK))
def test_five_thousand_random_models_are_right_or_refused(start: int):
    tally = sweep(range(start, start + CHUNK))
    print(dict(tally.counts))
    assert_right(tally)


def test_programs_depend_on_nothing_but_their_seed():
    for seed in range(50):
        assert generate(seed) == generate(seed)
    assert len({script(generate(seed)) for seed in range(50)}) == 50


def test_every_generated_model_runs_eagerly():
    ops = set()
    for seed in range(300):
        program = generate(seed)
        model, inputs = build(program)
        model(*inputs)
        ops |= {step["op"] for step in program.steps}
    assert len(ops) > 30


def test_a_printed_program_is_a_file_that_runs(capsys: pytest.CaptureFixture[str]):
    exec(compile(script(generate(3)), "program", "exec"), {"__name__": "program"})
    assert "torch.Size" in capsys.readouterr().out


def test_shrinking_keeps_the_failure_and_little_else(monkeypatch: pytest.MonkeyPatch):
    """With a check that fails on every flip of tokens."""

    def fails_on_flip(program: Program) -> Outcome:
        return Outcome("wrong value" if ".flip(1)" in Code(program).source() else "right")

    monkeypatch.setattr("graphs.shrink.check", fails_on_flip)
    program = next(p for p in map(generate, range(1000)) if fails_on_flip(p).failed and len(p.steps) > 6)
    small = shrink(program, "wrong value")
    assert fails_on_flip(small).failed
    assert len(small.steps) <= 3
    assert small.degrees == {"sp": 2}
    assert (small.batch, small.heads) == (1, 1) or small.heads == 2
