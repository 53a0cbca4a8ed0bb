"""Batches for training out of datasets: a computed order, windows read at memory speed, threads and buffers."""
