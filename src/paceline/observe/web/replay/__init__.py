"""The page that trains a recorded batch once more."""
