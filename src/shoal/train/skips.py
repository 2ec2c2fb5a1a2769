"""Steps that were not taken because a loss or a gradient was no number."""

MOST_IN_A_ROW = 3
"""After so many the parameters themselves are suspected."""


class Skips:
    """Counts them. One bad sample is passed over; several steps in a row are a reason to go back."""

    def __init__(self) -> None:
        self.total = 0
        self._in_a_row = 0
        self._last = -2
        self._went_back_from = -1

    def add(self, step: int) -> bool:
        """Count a step that was skipped; True if it is time to go back to a checkpoint."""
        self._in_a_row = self._in_a_row + 1 if step == self._last + 1 else 1
        self._last = step
        self.total += 1
        return self._in_a_row >= MOST_IN_A_ROW

    def may_go_back(self, step: int) -> bool:
        """Whether going back may help: it did not, where the same step is bad again."""
        is_new = step > self._went_back_from
        self._went_back_from, self._in_a_row, self._last = step, 0, -2
        return is_new
