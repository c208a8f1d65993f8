"""From graphs to a bundle: sensitivity, exact allocation, search and report."""
