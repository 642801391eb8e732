"""Other systems that the benchmarks compare with, in interpreters of their own."""
