"""Device functions of the matrix-product families: copies, clusters, and the products themselves."""

from rammer_cuda.device import source

PREAMBLE = source("products")
