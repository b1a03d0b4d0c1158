"""Modules users build models from, in plain PyTorch."""
