"""Each method's rounds against an independent float64 implementation, in the order of its official code."""
