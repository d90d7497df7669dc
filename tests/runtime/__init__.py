"""The facade, whole: requests through all actors on a real tiny model."""
