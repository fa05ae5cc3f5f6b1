"""The `ModelRunner` of an NVIDIA GPU over `poolwright_kernels`: what stays on the device, its graphs, plans and draws.

Knows neither the other device nor files nor scheduling beyond the steps it is given.
"""
