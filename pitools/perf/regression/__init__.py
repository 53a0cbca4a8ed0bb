"""Find regressions in stored series of measurements, and compare two runs."""
