"""The loop over batches: look-ahead under the staleness bound, and the batches
of embedding workers."""
