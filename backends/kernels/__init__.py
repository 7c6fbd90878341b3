"""CUDA C++ kernels (`*.cu`, `*.cuh`) and the one description of how to compile (`variants`), divide (`work`) and launch (`launch`) them."""
