"""Traces: what jobs came when, read from files into `Work` for the simulator."""
