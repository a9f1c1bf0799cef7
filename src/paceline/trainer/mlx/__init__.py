"""Training on Apple silicon. Nothing here needs torch."""
