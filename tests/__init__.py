"""Tests; the default run needs no network and no downloaded model."""
