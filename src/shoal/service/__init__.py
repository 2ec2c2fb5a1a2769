"""Many jobs, many people: the queue, who may ask for what, and what runs the jobs."""
