"""Measured against the peers, as ratios in one run. `python -m benchmarks NAME --json`."""
