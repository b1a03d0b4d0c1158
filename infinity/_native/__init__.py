"""Typed faces of the native libraries, the only place that knows ctypes."""
