"""What was moved, how long it took, who waited for it."""
