"""Tasks that run the example on Dataflow, and what their results must show."""
