"""Compiled kernels for the CPU: explicit vectors, shared threads, attention, linear and elementwise bodies.

Every kernel is a C function of one argument, the address of an array of int64: item counter first, then addresses, sizes and strides in
bytes. The threads of a launch draw items from that counter until none are left, so a slow or stolen core delays a step by one item only.
Invariant: offsets are 64-bit, and which thread computes an item never changes its result.
"""
