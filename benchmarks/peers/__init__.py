"""Other systems to compare with, in an interpreter of their own."""
