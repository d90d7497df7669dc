"""Several models in one process: loaded when asked for, unloaded when nobody needs them."""
