"""For tests, the user's as much as ours: simulate any number of ranks in one process."""

from spcompile.testing.simulate import Simulation, simulate

__all__ = ["Simulation", "simulate"]
