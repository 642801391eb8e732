"""What the columns of a log are, and how their values become ids."""
