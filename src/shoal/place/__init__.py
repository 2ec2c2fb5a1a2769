"""Plan to nodes: who runs where, and who waits. State in, decisions out; no clock, no I/O, no torch."""
