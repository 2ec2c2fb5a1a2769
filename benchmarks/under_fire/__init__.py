"""Scripts that train until they are stopped, while workers of theirs are killed."""
