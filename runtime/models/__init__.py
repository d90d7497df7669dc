"""Models: find, fetch, convert, check, load.

The order of a start is `blas.load_blas()` (before anything imports MLX), `resolve.resolve()`, then on
the MLX thread `loader.load()`. Only `loader` and `quantise` import MLX, inside their functions, so that
every other module can run first and on any thread.
"""
