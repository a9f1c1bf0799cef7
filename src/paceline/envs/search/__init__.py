"""Search over a corpus of short documents: an index, and a service around it."""
