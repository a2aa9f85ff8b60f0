"""Real processes: killed, frozen, cut off, with clocks that are wrong."""
