"""A trained model outside of a run: predictions, and exports to other formats."""
