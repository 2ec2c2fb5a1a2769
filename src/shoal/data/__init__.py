"""files -> batches: who reads which sample, and how it gets there in time."""
