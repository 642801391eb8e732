"""Files: where they are, and how each format is read."""
