"""What spcompile raises: at compile time, before any rank has computed anything, or when ranks first compare values."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch._dynamo.exc import ShortenTraceback

CODES = {
    "SP101": "A degree that is no number of ranks",
    "SP102": "Degrees that do not multiply to the number of ranks",
    "SP103": "An attention kernel that is not there",
    "SP104": "An option whose value is not allowed",
    "SP105": "An inner backend that is not there",
    "SP106": "No process group",
    "SP107": "A mesh that does not say which ranks",
    "SP108": "A kernel that cannot be registered",
    "SP109": "An attention op that cannot be registered",
    "SP110": "An option that a simulation does not have",
    "SP111": "A tensor on a device that the group does not send from",
    "SP112": "CUDA graphs where there can be none",
    "SP113": "A model whose backend is closed",
    "SP201": "A graph that cannot be traced",
    "SP202": "Memory that is shared in a way a graph of values cannot express",
    "SP203": "An input marked as dynamic",
    "SP204": "A graph to be differentiated",
    "SP205": "Attention inside control flow",
    "SP206": "flex_attention that is more than plain attention",
    "SP207": "Random numbers on sharded tokens that nobody compares",
    "SP208": "Dropout inside attention",
    "SP209": "Attention for which no exchange is exact",
    "SP210": "None of the attention can be distributed",
    "SP211": "strict=True, and something costs more than it should",
    "SP212": "Memory read by strides",
    "SP213": "A defect of spcompile, found before it gives a wrong result",
    "SP214": "A tensor without values",
    "SP215": "A call that a CUDA graph cannot hold",
    "SP301": "A rank that did not come",
    "SP302": "Ranks that compiled different graphs",
    "SP303": "Another rank has no graph",
    "SP304": "Inputs that differ between ranks",
    "SP305": "Random generators that differ between ranks",
    "SP306": "A result that is not the unsharded graph's",
    "SP307": "A call that another rank did not join",
}
"""Code -> what it stands for. Codes stay; each has a section in docs/refusals.md with an example."""


class Refusal(NamedTuple):
    """Why something is refused."""

    code: str
    text: str


class SPError(Exception):
    """Base of everything spcompile refuses. The text says where, what was found, why, and what would work.

    Args:
        code: one of `CODES`; `error.code`. Its section in docs/refusals.md has an example and the ways out.
        text: `error.text`; ``str(error)`` has the code before it.
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(code, text)
        self.code, self.text = code, text

    def __reduce__(self) -> tuple[Any, ...]:  # as what it is, not as what `through_dynamo` makes of it
        public = next(kind for kind in type(self).__mro__ if globals().get(kind.__name__) is kind)
        return public, (self.code, self.text)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.code!r}, {self.text!r})"

    def __str__(self) -> str:  # from the attributes: Dynamo appends advice for its own errors to args[0]
        return f"[{self.code}] {self.text}"


class SPConfigError(SPError, ValueError):
    """The degrees, the mesh or an option cannot be right, whatever the model."""


class UnsupportedGraphError(SPError, RuntimeError):
    """The model's graph cannot be computed exactly with the degrees asked for."""


class RankMismatchError(SPError, RuntimeError):
    """The ranks do not hold the same graph, so their collectives would not match."""


class VerificationError(SPError, RuntimeError):
    """With ``verify="first"``: what the ranks computed is not what the unsharded graph gives."""


class ClosedError(SPError, RuntimeError):
    """A model was called whose backend is closed."""


CLOSED = (
    "the backend of this compiled model was closed, and what it ran with is gone: make another with "
    "spcompile.backend() and compile the model again"
)


class RegatherWarning(UserWarning):
    """An op needs all tokens on every rank: an all-gather that costs speed, once per graph."""


class RecompileLimitWarning(UserWarning):
    """Dynamo is about to give up compiling; what follows runs unsharded on every rank."""


class UnshardedWarning(UserWarning):
    """Code that runs as it is, in full on every rank: unrecognised attention, or a refusal that Dynamo suppresses."""


class RecordingLimitWarning(UserWarning):
    """CUDA graphs were recorded as often as they may be; what follows runs without them."""


@contextmanager
def through_dynamo() -> Iterator[None]:
    """Let an `SPError` leave torch.compile as it is; Dynamo wraps all others in ``BackendCompilerFailed``.

    Where Dynamo is told to run what it cannot compile, nothing leaves it: then a warning says what happens.
    """
    try:
        yield
    except Exception as error:
        if torch._dynamo.config.suppress_errors:
            warnings.warn(
                "torch._dynamo.config.suppress_errors is set: this code runs as it is, in full on this rank, instead "
                f"of raising {type(error).__name__}: {error}",
                UnshardedWarning,
                stacklevel=2,
            )
        if isinstance(error, ShortenTraceback) or not isinstance(error, SPError):
            raise
        kind = type(error)
        members = {"__module__": kind.__module__, "__init__": _as_dynamos}
        raise type(kind.__name__, (kind, ShortenTraceback), members)(error.code, error.text) from error.__cause__


def _as_dynamos(self: Any, code: str, text: str) -> None:
    ShortenTraceback.__init__(self, code, text, first_useful_frame=None)
    self.code, self.text = code, text
