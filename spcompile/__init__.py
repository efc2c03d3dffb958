"""Sequence parallelism for diffusion transformers, as a torch.compile backend.

`backend` makes the object for ``torch.compile``; its ``report()`` says what was done. `spcompile.testing`
simulates any number of ranks in one process; `spcompile.ops` are the custom ops.
"""

from spcompile.backend import Backend, backend
from spcompile.errors import RankMismatchError, SPConfigError, SPError, UnsupportedGraphError
from spcompile.report import AttentionEntry, RegatherEntry, Report

__all__ = [
    "AttentionEntry",
    "Backend",
    "RankMismatchError",
    "RegatherEntry",
    "Report",
    "SPConfigError",
    "SPError",
    "UnsupportedGraphError",
    "backend",
]
