"""Swap files, the engines that move them, the stores on top."""
