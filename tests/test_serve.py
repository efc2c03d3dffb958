"""The example of a deployment, as it runs where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SERVE = Path(__file__).parents[1] / "examples" / "serve.py"


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="it serves from graphs there")
def test_the_server_serves_on_cpus_and_says_that_it_has_no_graphs():
    command = [sys.executable, str(SERVE), "--requests", "3", "--steps", "2"]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=540
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, *_ = done.stdout.splitlines()
    assert "no CUDA GPU here: serving on CPUs with cudagraphs='off' instead of 'piecewise'" in first
    assert "served 3 requests" in done.stdout
    assert "3 graphs" not in done.stdout  # resolutions of as many tokens share one
