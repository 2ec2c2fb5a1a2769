"""steps -> bytes: groups that move flat buffers between workers."""
