"""Write recordings into the shards of a version: chunk layout, plan, workers and files."""
