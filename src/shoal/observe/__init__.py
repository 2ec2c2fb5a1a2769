"""events -> eyes: journal, metrics, and what they tell people."""
