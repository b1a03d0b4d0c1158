"""Bulk memory: one arena per tier, cut into regions that live as long as the engine."""
