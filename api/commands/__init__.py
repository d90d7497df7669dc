"""The commands of `mlx-troupe`, one a module: `add` describes it to argparse, `run` does it. See `common.Command`."""
