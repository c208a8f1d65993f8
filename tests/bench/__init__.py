"""The figures that `make bench` prints, one JSON object a line."""
