"""What moves during a step: parameters in, gradients out."""
