"""The HTTP application, its wire types and the command line."""
