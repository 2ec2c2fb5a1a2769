"""Task parallelism: one function, many items, worker processes that may die. `shoal.map` is in `task_run.py`."""
