"""What the server does: training, aggregation, statistics. Knows the engine's language, never the client."""
