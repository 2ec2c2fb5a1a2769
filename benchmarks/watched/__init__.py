"""A training of short steps, with everything that is kept of it, or with nothing."""
