"""What a CPU alone takes: a convolution's gradients of its own, fewer multiplications, what the processor can do.

XLA's CPU backend runs the forward convolution through a fast library, but the backward convolutions that
automatic differentiation makes take a naive path as soon as they stand inside a loop (scan, while, fori):
one to two orders of magnitude slower than the forward pass. Training loops live inside such loops here, so
on CPU the convolution brings its own backward pass, written in forward convolutions and matrix products
only; where that is faster both passes are those of `winograd.py`.
"""
