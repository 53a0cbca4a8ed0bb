"""Read the configuration of LBNL's Node Health Check."""
