"""Tests of the actors: their cores as pure tables, their loops assembled around the fake engine."""
