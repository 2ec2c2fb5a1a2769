"""steps -> disk: what must survive, and a store that keeps it."""
