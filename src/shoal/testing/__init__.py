"""Shipped, so that others can test their engine: clock, faults, contracts."""
