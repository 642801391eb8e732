"""Topics: brokers, registries, and the values of messages."""
