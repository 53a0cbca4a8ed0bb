"""Read and write the files that describe a fabric, a module per format."""
