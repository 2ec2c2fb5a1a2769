"""Shipped, so that others can test their engine, and their job: faults, rigs, contracts."""

from shoal.testing.faults import Faults, FaultyRun

__all__ = ["Faults", "FaultyRun"]
