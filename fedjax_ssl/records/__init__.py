"""What lies in a run's folder, written and read. Knows the configuration, and nothing of training."""
