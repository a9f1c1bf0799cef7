"""Weight updates: what they hold, how they are checked, stored and sent to engines."""
