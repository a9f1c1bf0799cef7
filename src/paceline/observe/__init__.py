"""Records of a run, and the ways to look at them: terminal, web pages, report."""
