"""Pure arithmetic of units: what moves together, where each value lies, what is needed next."""
