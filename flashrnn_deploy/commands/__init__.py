"""The commands of the command line, one module per topic; each is a thin layer over one function of the core."""
