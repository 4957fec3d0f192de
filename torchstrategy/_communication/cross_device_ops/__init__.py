"""The public ways of reducing and broadcasting across devices."""
