"""Many jobs, many people: the queue that loses nothing, what starts its jobs, and how it is asked."""
