"""What clients do: labels, thresholds, local training. Knows the engine's language, never the server."""
