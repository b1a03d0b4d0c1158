"""The engine: a model attached to its streams, stepped as a whole."""
