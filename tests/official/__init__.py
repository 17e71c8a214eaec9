"""Compares each method's rounds with an independent float64 implementation in the order of its official code."""
