"""Uploads on their way to the server: attackers, compression, late delivery, screening, privacy."""
