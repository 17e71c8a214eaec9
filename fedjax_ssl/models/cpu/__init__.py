"""Code for CPUs only: gradients of convolutions and pooling, convolutions with fewer multiplications, the processor.

XLA's CPU backend runs forward convolutions through a fast library. Inside a loop (scan, while, fori), however, the
backward convolutions of automatic differentiation take a naive path that is one to two orders of magnitude slower than
the forward pass. Training runs inside such loops here. On CPUs convolutions therefore have their own backward pass of
forward convolutions and matrix products. If `winograd.py` is faster, it provides both passes.
"""
