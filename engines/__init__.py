"""What ships: the words, engines, measurements, bundle, sampler and runtime; numpy alone."""

__version__ = "0.1.0"
