"""Devices: where compute runs, how bytes reach it, the lanes that order both."""
