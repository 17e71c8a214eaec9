"""Code for CPUs alone: gradients of convolutions, convolutions with fewer multiplications, the processor's features.

XLA's CPU backend runs the forward convolution through a fast library, but the backward convolutions that
automatic differentiation makes take a naive path as soon as they stand inside a loop (scan, while, fori):
one to two orders of magnitude slower than the forward pass. Training loops live inside such loops here, so
on a CPU the convolution has its own backward pass, made of forward convolutions and matrix products
alone; where that is faster both passes are those of `winograd.py`.
"""
