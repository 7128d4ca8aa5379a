"""From a forward to a plan: capture, axes, choice, boundaries, proof."""
